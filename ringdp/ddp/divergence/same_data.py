"""Finds out whether all ranks compute the same gradients. Then they read the same samples, and all but one of them are
of no use.

The message that the ranks exchange about their steps has a hash of some bytes of each bucket before it was averaged, of
all steps since the last message (csrc/torch/reducer/step_report.h).
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

    def receive(self, rank: int, step: int, gathered: Sequence[bytes]) -> None:
        """Take all ranks' hashes in the backward after step `step`. Rank 0 warns once that they are all equal.

        Args:
            rank: this one.
            step: the last step that the hashes cover.
            gathered: the hashes, by rank.
        """
        if self._warned or len(gathered) < 2:
            return
        _, steps = _PACKED.unpack(gathered[0])
        if steps == 0 or any(one != gathered[0] for one in gathered):
            self._alike = 0
            return
        self._alike += steps
        if self._alike < _LEAST_STEPS:
            return
        self._warned = True
        if rank == 0:
            _log.warning(
                "all %d ranks computed the same gradients, to the bit, in %d steps in a row up to step %d: do they read"
                " the same data? Give each rank samples of its own: torch.utils.data.DistributedSampler or"
                " ringdp.data.BalancedSampler; of an IterableDataset every world_size-th sample, from number rank on."
                " Logged once; guard=0 turns it off.",
                len(gathered),
                self._alike,
                step,
            )
