"""The guard of a RingDP: finds out whether all ranks still have the same replica.

Once every so many steps, a window, at the forward after a backward that synchronised, a rank hashes a part of its
replica's bytes, the next part each time. The hash travels beside the training and is compared a window later. Windows
and parts are cut so that a difference is found within `every` steps; in the other steps a guard only counts.
"""

from __future__ import annotations

import struct
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ringdp.compression.tensor_parts import held_by
from ringdp.ddp.divergence.comparison import Comparison, difference_error
from ringdp.ddp.divergence.report import compare, describe_ranks, summary
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import named
from ringdp.job.background_gather import BackgroundGather, group_for_background

_EXCHANGE_BYTES = 1 << 20  # that are hashed in the time that an exchange takes
_PACKED = struct.Struct("<qqQ")  # steps, looks, and the part's hash


class DivergenceGuard:
    """Used by the thread that runs forward, between steps; all ranks do the same.

    Args:
        wrapper: the RingDP, which owns this.
        every: steps within which a difference is found.
        comparison: what is compared.
    """

    def __init__(self, wrapper: Any, every: int, comparison: Comparison) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.comparison = comparison
        held = held_by(wrapper.module, buffers=False)
        replica_bytes = sum(part.nbytes for one in held for _, part in one.parts)
        self._window, self._rounds = cut(every, replica_bytes)
        self._ranks = wrapper.process_group.size()
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[BackgroundGather, int] | None = None
        self._first: int | None = 0  # the reducer's steps when counting began; None: at the next forward
        self._steps = self._looks = 0
        self._local_steps = 0  # of optimizers, with gradients that were not averaged

    def count_local_step(self) -> None:
        self._local_steps += 1

    def look(self) -> None:
        """Called where a backward may have synchronised since the last call, or an optimizer stepped without one.

        Raises:
            MismatchError: replicas differ, and the action is "raise"; names the first tensor, the ranks and the step.
        """
        wrapper = self._wrapper()
        assert wrapper is not None
        size = wrapper.process_group.size()
        if size != self._ranks:  # torch's reconfigure: new ranks have run other steps
            self._ranks = size
            self.start_again()
        if size == 1:
            return
        done = wrapper.reducer.steps() + self._local_steps
        if self._first is None:
            self._first = done
        steps = done - self._first
        if steps == self._steps:
            return
        before, self._steps = self._steps, steps
        self._looks += 1
        if steps // self._window != before // self._window:
            self._exchange(wrapper, steps)

    def start_again(self) -> None:
        """Called when the wrapper has another group: steps count from the next forward on, since its ranks have run
        other numbers."""
        self._first, self._steps, self._looks = None, 0, 0
        self._pending = self._group = None

    def _part_of(self, steps: int) -> int:
        """The part of the replica, of `_rounds`, that is hashed in the window that ends with these steps."""
        return steps // self._window % self._rounds

    def _exchange(self, wrapper: Any, steps: int) -> None:
        if self._group is None:
            self._group = group_for_background(wrapper.process_group, "divergence guard")
        if self._pending is not None:
            self._judge(wrapper, self._group)
        data = _PACKED.pack(steps, self._looks, self.comparison.hash(wrapper, self._part_of(steps), self._rounds))
        self._pending = BackgroundGather(data, self._group, f"divergence guard, step {steps}"), steps

    def _judge(self, wrapper: Any, group: dist.ProcessGroup) -> None:
        """Compare the hashes that the ranks sent a window ago."""
        assert self._pending is not None
        (gather, step), self._pending = self._pending, None
        gathered = [_PACKED.unpack(one) for one in gather.wait()]
        if all(one == gathered[0] for one in gathered):
            return
        part = None if len({one[2] for one in gathered}) == 1 else self._part_of(step)
        self._looks = max(one[1] for one in gathered)
        uneven = _uneven([one[:2] for one in gathered])
        self.comparison.act(wrapper, group, step, part=part, parts=self._rounds, uneven=uneven)


def cut(every: int, replica_bytes: int) -> tuple[int, int]:
    """How many steps a window has, and in how many parts the replica is hashed, one in each window.

    The cheapest cut by which a difference is found within `every` steps: a byte is hashed within parts * window steps,
    and its hash is compared a window later. A long window has few exchanges, and larger parts.
    """

    def bytes_per_step(window: int) -> float:
        return (_EXCHANGE_BYTES + replica_bytes / _parts(every, window)) / window

    window = min(range(1, (every + 1) // 2 + 1), key=bytes_per_step)
    return window, _parts(every, window)


def _parts(every: int, window: int) -> int:
    return (every + 1) // window - 1


def _uneven(gathered: Sequence[tuple[int, ...]]) -> str:
    """The text of the difference where the ranks' backwards and forwards are not equally many. `gathered`: both, by
    rank."""
    if len(set(gathered)) == 1:
        return ""
    usual = Counter(gathered).most_common(1)[0][0]
    other = next(rank for rank, one in enumerate(gathered) if one != usual)
    most = [rank for rank, one in enumerate(gathered) if one == usual]
    return (
        f"rank {other} has run {gathered[other][0]} backwards in {gathered[other][1]} steps that began with a forward,"
        f" and {describe_ranks(most)} {usual[0]} in {usual[1]}"
    )


def check_now(wrapper: Any, comparison: Comparison) -> None:
    """Compare every byte of the replicas now. All ranks call it.

    Raises:
        MismatchError: they differ; names the first tensor and the ranks.
        InvalidArgumentError: the module is on a device.
    """
    from ringdp import _C

    if wrapper.device_type != "cpu":
        raise InvalidArgumentError(
            f"check_replicas hashes tensors on the CPU, and this module is on {wrapper.device_type}"
        )
    group = wrapper.process_group
    replica = comparison.replica_of(wrapper, with_buffers=True)
    with named("check_replicas"):
        differences = compare(replica, _C.ReplicaHash(list(replica.tensors)).each(), group)
    if differences:
        text = f"the replicas differ: {summary(differences, len(replica.names))}"
        raise difference_error(text, differences, rank=group.rank(), operation="check_replicas")
