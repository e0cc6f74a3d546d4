"""The guard of a RingDP: do all ranks still have the same replica?

Once every so many steps, a window, at the forward after a backward that synchronised, a rank hashes a part of its
replica's bytes, the next part each time. The hash travels beside the training and is compared a window later. Windows
and parts are cut so that a difference is found within `guard_every` steps; in the other steps a guard only counts.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringdp.ddp.divergence.replica import Replica, check_patterns
from ringdp.ddp.divergence.report import Difference, compare, ranks_in_words, summary
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.job.backend import named
from ringdp.job.background_gather import BackgroundGather, group_for_background

_log = logging.getLogger("ringdp.divergence")
ACTIONS = ("raise", "warn", "sync")
_EXCHANGE_BYTES = 1 << 20  # that are hashed in the time that an exchange takes
_PACKED = struct.Struct("<qqQ")  # steps, looks, and the part's hash
_ADVICE = (
    "Find what only some ranks do to it, and start from a checkpoint; or let RingDP copy from the majority"
    " (on_divergence='sync'), or leave out what is meant to differ (guard_ignore=[…])"
)


@dataclass(frozen=True)
class GuardOptions:
    """RingDP's arguments of the guard.

    Attributes:
        every: steps within which a difference is found; 0: there is no guard.
        action: what happens then.
        ignore: patterns of names to leave out.
    """

    every: int = 0
    action: str = "raise"
    ignore: tuple[str, ...] = ()

    @classmethod
    def checked(cls, every: Any, action: Any, ignore: Any, module: torch.nn.Module) -> GuardOptions:
        """Raises InvalidArgumentError."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise InvalidArgumentError(f"RingDP's guard_every must be a number of steps from 0 on, not {every!r}")
        if action not in ACTIONS:
            raise InvalidArgumentError(
                f"RingDP's on_divergence must be one of {', '.join(map(repr, ACTIONS))}, not {action!r}"
            )
        return cls(every, action, check_patterns(module, tuple(ignore) if not isinstance(ignore, str) else ignore))

    def guard(self, wrapper: Any) -> DivergenceGuard | None:
        """The guard of this wrapper, None where there is none.

        Raises:
            InvalidArgumentError: it was asked for, and the module is on a device.
        """
        if self.every == 0:
            return None
        if wrapper.device_type != "cpu":
            raise InvalidArgumentError(
                f"guard_every={self.every}: the guard hashes tensors on the CPU, and this module is on"
                f" {wrapper.device_type}: leave guard_every out, and compare checkpoints"
            )
        return DivergenceGuard(wrapper, self.every, self.action, self.ignore)

    def __str__(self) -> str:
        return f"guard_every={self.every}, on_divergence={self.action!r}, guard_ignore={list(self.ignore)}"


class DivergenceGuard:
    """Used by the thread that runs forward, between steps; all ranks do the same.

    Args:
        wrapper: the RingDP, which owns this.
        every: steps within which a difference is found.
    """

    def __init__(self, wrapper: Any, every: int, action: str, ignore: tuple[str, ...]) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._action, self._ignore = action, ignore
        self._window, self._rounds = cut(every, sum(one.nbytes for one in wrapper.module.parameters()))
        self._ranks = wrapper.process_group.size()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._known_different: set[str] = set()
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[BackgroundGather, int] | None = None
        self._first: int | None = 0  # the reducer's steps when counting began; None: at the next forward
        self._steps = self._looks = 0
        self._told_left_out = False
        self._snapshot: Any = None
        self._replica: Replica | None = None
        self._parameters_alone = False
        self._hash: Any = None

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        self._replica = None

    def look(self) -> None:
        """In a forward, where a backward may have synchronised since the last one.

        Raises:
            MismatchError: replicas differ, and that is to raise; names the first tensor, the ranks and the step.
        """
        wrapper = self._wrapper()
        assert wrapper is not None
        size = wrapper.process_group.size()
        if size != self._ranks:  # torch's reconfigure: new ranks have run other steps
            self._ranks = size
            self.start_again()
        if size == 1:
            return
        done = wrapper.reducer.steps()
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
        """The wrapper has another group: count steps from the next forward on, since its ranks have run other ones."""
        self._first, self._steps, self._looks = None, 0, 0
        self._pending = self._group = None

    def _part_of(self, steps: int) -> int:
        """Of the replica, of `_rounds`: what is hashed in the window that ends with these steps."""
        return steps // self._window % self._rounds

    def _follow(self, wrapper: Any, steps: int) -> None:
        """The tensors that are there now. Buffers and optimizer state may be others than they were: once a round."""
        changed = self._replica is None or self._snapshot is not wrapper._snapshot
        if not changed and (self._parameters_alone or self._part_of(steps)):
            return
        from ringdp import _C

        self._snapshot = wrapper._snapshot
        self._replica = self.replica_of(wrapper, self._known_different)
        self._hash = _C.ReplicaHash(list(self._replica.tensors))
        self._parameters_alone = all(isinstance(one, torch.nn.Parameter) for one in self._replica.tensors)
        if self._replica.left_out and not self._told_left_out:
            self._told_left_out = True
            _log.info("replicas are compared without %s", ", ".join(self._replica.left_out))

    def replica_of(self, wrapper: Any, known_different: Collection[str] = ()) -> Replica:
        return Replica.of(
            wrapper.module,
            with_buffers=not wrapper._sends_buffers,
            optimizers=self._optimizers,
            ignored=wrapper.parameters_to_ignore,
            patterns=self._ignore,
            known_different=known_different,
        )

    def _exchange(self, wrapper: Any, steps: int) -> None:
        if self._group is None:
            self._group = group_for_background(wrapper.process_group, "divergence guard")
        if self._pending is not None:
            self._judge(wrapper)
        self._follow(wrapper, steps)
        data = _PACKED.pack(steps, self._looks, self._hash.part(self._part_of(steps), self._rounds))
        self._pending = BackgroundGather(data, self._group, f"divergence guard, step {steps}"), steps

    def _judge(self, wrapper: Any) -> None:
        """Compare what the ranks sent a window ago."""
        assert self._pending is not None
        (gather, step), self._pending = self._pending, None
        told = [_PACKED.unpack(one) for one in gather.wait()]
        if all(one == told[0] for one in told):
            return
        part = None if len({one[2] for one in told}) == 1 else self._part_of(step)
        self._looks = max(one[1] for one in told)
        self._replica = None
        self._follow(wrapper, self._steps)
        with named("which tensors differ"):
            differences = compare(self._replica, self._hash.each(), self._group)  # type: ignore[arg-type]
        self._act(wrapper, step, differences, _uneven([one[:2] for one in told]), part)

    def _act(self, wrapper: Any, step: int, differences: list[Difference], uneven: str, part: int | None) -> None:
        assert self._replica is not None
        if differences:
            text = f"the replicas differ: {summary(differences, len(self._replica.names))}"
        elif part is not None:
            first, end = self._hash.tensors_in(part, self._rounds)
            names = self._replica.names[first:end]
            between = names[0] if len(names) == 1 else f"one of {names[0]} to {names[-1]}" if names else "a tensor"
            text = f"the replicas differed and do so no longer: {between}"
        else:
            text = "the ranks' steps differ"
        text = f"found after step {step}: {text}" + (f"; {uneven}" if uneven else "")
        rank = wrapper.process_group.rank()
        if self._action == "raise" or (self._action == "sync" and any("" in one.hashes for one in differences)):
            peer = next((one for one in differences[0].minority if one != rank), None) if differences else None
            raise MismatchError(
                f"{text}. {_ADVICE}.",
                rank=rank,
                peer=peer,
                step=step,
                name=differences[0].name if differences else None,
                operation="divergence guard",
                advice=_ADVICE,
            )
        concerned = {0, *(other for one in differences for other in one.minority)}
        if self._action == "sync":
            self._copy(differences)
            text += ". All ranks have the majority's from now on" if differences else ""
        else:
            self._known_different.update(one.name for one in differences)
            self._replica = None
            text += f". {_ADVICE}. It is not compared again" if differences else ""
        if rank in concerned:
            _log.warning("%s.", text)

    def _copy(self, differences: Sequence[Difference]) -> None:
        """Tensors that differ become those of the lowest rank of their majority."""
        assert self._replica is not None
        assert self._group is not None
        tensors = dict(zip(self._replica.names, self._replica.tensors, strict=True))
        for one in differences:
            target = tensors[one.name]
            copy = target.contiguous().clone() if not target.is_contiguous() else target
            with torch.no_grad(), named(f"{one.name} of rank {one.majority[0]}"):
                dist.broadcast(copy, group=self._group, group_src=one.majority[0])
                if copy is not target:
                    target.copy_(copy)


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


def _uneven(told: Sequence[tuple[int, ...]]) -> str:
    """In words, if the ranks' backwards and forwards are not equally many. `told`: both, by rank."""
    if len(set(told)) == 1:
        return ""
    usual = Counter(told).most_common(1)[0][0]
    other = next(rank for rank, one in enumerate(told) if one != usual)
    most = [rank for rank, one in enumerate(told) if one == usual]
    return (
        f"rank {other} has run {told[other][0]} backwards in {told[other][1]} steps that began with a forward, and"
        f" {ranks_in_words(most)} {usual[0]} in {usual[1]}"
    )


def check_now(wrapper: Any, guard: DivergenceGuard | None) -> None:
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
    replica = (guard or DivergenceGuard(wrapper, 1, "raise", wrapper._guard_options.ignore)).replica_of(wrapper)
    with named("check_replicas"):
        differences = compare(replica, _C.ReplicaHash(list(replica.tensors)).each(), group)
    if differences:
        first = differences[0]
        raise MismatchError(
            f"the replicas differ: {summary(differences, len(replica.names))}. {_ADVICE}.",
            rank=group.rank(),
            peer=next((one for one in first.minority if one != group.rank()), None),
            name=first.name,
            operation="check_replicas",
            advice=_ADVICE,
        )
