"""Whether all ranks compute the same gradients: then they read the same samples, and all but one compute for nothing.

With what the ranks tell each other about their steps travels a hash of some bytes of each bucket, as they were before
they were averaged, of all steps since the last time (csrc/torch/reducer/step_report.h).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

_log = logging.getLogger("ringdp.divergence")
_PACKED = struct.Struct("<2Q")  # the hash, and of how many steps; steps whose gradients are zeros do not count
_LEAST_STEPS = 5  # in a row


class SameData:
    """Of one wrapper. Used by the thread that runs forward."""

    def __init__(self) -> None:
        self._alike = 0
        self._warned = False

    def receive(self, rank: int, step: int, told: Sequence[bytes]) -> None:
        """What all ranks gave, by rank, in the backward after step `step`. Rank 0 says once that they are all alike.

        Args:
            rank: this one.
            step: the last one that is told.
            told: by rank.
        """
        if self._warned or len(told) < 2:
            return
        _, steps = _PACKED.unpack(told[0])
        if steps == 0 or any(one != told[0] for one in told):
            self._alike = 0
            return
        self._alike += steps
        if self._alike < _LEAST_STEPS:
            return
        self._warned = True
        if rank == 0:
            _log.warning(
                "all %d ranks computed the same gradients, to the bit, in %d steps in a row up to step %d: do they read"
                " the same data? Then they train no faster than one. Give each rank samples of its own:"
                " torch.utils.data.DistributedSampler or ringdp.data.BalancedSampler; of an IterableDataset every"
                " world_size-th sample, from number rank on. This appears once; guard_every=0 leaves it out.",
                len(told),
                self._alike,
                step,
            )
