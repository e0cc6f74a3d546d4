"""What a worker of `dist_async` has waited for, in numbers and words."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from ringdp.kvstore.owner import Owner
from ringdp.text import ranks_by_number

_SLOW_S = 0.1  # of waiting, below which no owner is called slow


@dataclasses.dataclass(frozen=True)
class AsyncStats:
    """Of one worker, since the store was made.

    Attributes:
        clock: how often it has called `step`.
        staleness: how many answers had which age: by how many clocks the slowest worker was behind this one.
        waited_s: by owner, for how long this worker waited for it: where one is far above the others, that owner or the
            way to it is slow.
        held_s: for how long it waited for slow workers.
        pushes: that this rank's owner has applied.
        lost_pushes: that count nowhere, because their worker or owner was lost.
    """

    clock: int
    staleness: Mapping[int, int]
    waited_s: Mapping[int, float]
    held_s: float
    pushes: int
    lost_pushes: int

    def report(self, rank: int, owner: Owner | None) -> str:
        """What holds the worker on that rank up; `owner`: that rank's."""
        lines = [
            f"rank {rank}, clock {self.clock}: waited {sum(self.waited_s.values()):.1f} s for owners"
            f" and {self.held_s:.1f} s for slow workers; answers were up to {max(self.staleness, default=0)} clocks"
            " old"
        ]
        if len(self.waited_s) > 1:
            slowest = max(self.waited_s, key=self.waited_s.__getitem__)
            usual_s = statistics.median(it for rank, it in self.waited_s.items() if rank != slowest)
            if self.waited_s[slowest] > max(_SLOW_S, 2 * usual_s):
                lines.append(
                    f"the owner on rank {slowest}, or the way to it, is slow: {self.waited_s[slowest]:.1f} s, others"
                    f" {usual_s:.1f} s"
                )
        if owner is not None and (behind := owner.behind()):
            lines.append(
                f"{ranks_by_number(behind)} {'is' if len(behind) == 1 else 'are'} behind, at clock {owner.clocks.least}"
            )
        return "\n".join(lines)
