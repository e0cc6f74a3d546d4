"""The costs of rounds, and the drift of the ranks' parameters."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """Since the object was made.

    Attributes:
        steps: of the inner optimizer, also those that a loss scaler skipped.
        rounds: that have ended.
        bytes_sent: by this rank for values, 2 (n - 1) / n of them or of their code each time, without frame headers.
        bytes_of_exact_steps: bytes that averaging all gradients in every step would have sent.
        waited_s: seconds that steps waited for values from other ranks (exposed communication).
        busy_s: seconds that steps spent here otherwise: changes, outer steps, copies.
        drift: by fragment, the norm of this rank's changes over that of the global parameters, when it last left.
        left_out: how often this rank's values were not finite and did not count.
    """

    steps: int
    rounds: int
    bytes_sent: int
    bytes_of_exact_steps: int
    waited_s: float
    busy_s: float
    drift: tuple[float, ...]
    left_out: int
