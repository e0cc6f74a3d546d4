"""The guard of a RingDP: finds out whether all ranks still have the same replica.

Once every so many steps, a window, at the forward after a backward that synchronised, a rank hashes a part of its
replica's bytes, the next part each time. The hash travels beside the next step and is compared at the forward after it.
Windows and parts are cut so that a difference is found within `every` steps; in the other steps a guard only counts.

`AttachedGuard` is the one that is on by default: every RINGDP_REPORT_EVERY steps `diagnosis.monitor.StepMonitor` asks
it for a message and gives it those of all ranks, so that the hash of a part is its only cost. `SameData` reads from
the same messages whether all ranks compute the same gradients: then they read the same samples, and all but one of
them are of no use. A message has a hash of some bytes of each bucket before it was averaged, of all steps since the
last message (csrc/torch/reducer/step_report.h).
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringdp.compression.tensor_parts import held_by
from ringdp.ddp.divergence.replica import Difference, Replica, compare, describe_ranks, summary
from ringdp.ddp.module_state import sends_buffers
from ringdp.diagnosis.rank_facts import ATTACHED_BYTES
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.job.backend import named
from ringdp.job.background_gather import BackgroundGather, group_for_background
from ringdp.job.elastic import as_unit, is_elastic

_log = logging.getLogger("ringdp.divergence")
ACTIONS = ("raise", "warn", "sync")
ADVICE = (
    "Find the code that only some ranks run on it, and start from a checkpoint; or let RingDP copy from the majority"
    " (Guard(on='sync')), or leave out what is meant to differ (Guard(ignore=[…]))"
)
_SHORT_ADVICE = "Find what only some ranks did to it; or Guard(on='sync'), or Guard(ignore=[…])"


class Comparison:
    """Of one wrapper's replica. Owned by its guard, used by the thread that runs forward, between steps.

    Args:
        action: of `ACTIONS`.
        ignore: patterns of names to leave out.
        with_buffers: False: parameters and optimizer state alone.
    """

    def __init__(self, action: str, ignore: tuple[str, ...], *, with_buffers: bool) -> None:
        self._action, self._ignore, self._with_buffers = action, ignore, with_buffers
        self._optimizers: list[torch.optim.Optimizer] = []
        self._known_different: set[str] = set()
        self._logged_left_out = False
        self._replica: Replica | None = None
        self._parameters_alone = False
        self._hash: Any = None

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        self._replica = None

    def module_changed(self) -> None:
        self._replica = None

    def forget_differences(self) -> None:
        """Compare again the tensors that a warning named."""
        self._known_different.clear()
        self._replica = None

    def hash(self, wrapper: Any, part: int, parts: int) -> int:
        """Of the replica's `part`-th of `parts` about equal parts."""
        self._follow(wrapper, whole=part == 0)
        number: int = self._hash.part(part, parts)
        return number

    def _follow(self, wrapper: Any, *, whole: bool) -> None:
        """The tensors that are there now. Buffers and optimizer state may be others than they were: once a round."""
        if self._replica is not None and (self._parameters_alone or not whole):
            return
        from ringdp import _C

        self._replica = self.replica_of(wrapper, self._known_different)
        self._hash = _C.ReplicaHash(list(self._replica.tensors))
        self._parameters_alone = all(isinstance(one, torch.nn.Parameter) for one in self._replica.tensors)
        if self._replica.left_out and not self._logged_left_out:
            self._logged_left_out = True
            _log.info("replicas are compared without %s", ", ".join(self._replica.left_out))

    def replica_of(
        self, wrapper: Any, known_different: Collection[str] = (), *, with_buffers: bool | None = None
    ) -> Replica:
        buffers = self._with_buffers if with_buffers is None else with_buffers
        return Replica.of(
            wrapper.module,
            with_buffers=buffers and not sends_buffers(wrapper),
            optimizers=self._optimizers,
            ignored=wrapper.parameters_to_ignore,
            patterns=self._ignore,
            known_different=known_different,
        )

    def act(
        self,
        wrapper: Any,
        group: dist.ProcessGroup,
        step: int,
        *,
        part: int | None = None,
        parts: int = 1,
        uneven: str = "",
    ) -> None:
        """The ranks' hashes or steps differ: find out which tensors do. All ranks of `group` call it.

        Args:
            step: after which they were hashed.
            part: whose hashes differ, of `parts`; None: hashes do not.
            uneven: the difference between the ranks' steps, as text; empty for none.

        Raises:
            MismatchError: the action is "raise"; or tensors are missing on a rank and cannot be copied.
        """
        self._replica = None
        self._follow(wrapper, whole=True)

        def missing(differences: Sequence[Difference]) -> bool:
            return any("" in one.hashes for one in differences)

        def compared() -> list[Difference]:
            with named("which tensors differ"):
                differences = compare(self._replica, self._hash.each(), group)  # type: ignore[arg-type]
            if self._action == "sync" and not missing(differences):
                self._copy(differences, group)
            return differences

        differences = as_unit(group, "the comparison of replicas", compared)
        text = f"found after step {step}: {self._found(differences, part, parts)}" + (f"; {uneven}" if uneven else "")
        rank = wrapper.process_group.rank()
        if self._action == "raise" or (self._action == "sync" and missing(differences)):
            raise difference_error(text, differences, rank=rank, operation="divergence guard", step=step)
        concerned = {0, *(other for one in differences for other in one.minority)}
        if self._action == "sync":
            text += ". All ranks have the majority's from now on" if differences else ""
        else:
            self._known_different.update(one.name for one in differences)
            self._replica = None
            text += f". {_SHORT_ADVICE}. It is not compared again" if differences else ""
        if rank in concerned:
            _log.warning("%s.", text)

    def _found(self, differences: Sequence[Difference], part: int | None, parts: int) -> str:
        assert self._replica is not None
        if differences:
            return f"the replicas differ: {summary(differences, len(self._replica.names))}"
        if part is None:
            return "the ranks' steps differ"
        first, end = self._hash.tensors_in(part, parts)
        names = self._replica.names[first:end]
        between = names[0] if len(names) == 1 else f"one of {names[0]} to {names[-1]}" if names else "a tensor"
        return f"the replicas differed and do so no longer: {between}"

    def _copy(self, differences: Sequence[Difference], group: dist.ProcessGroup) -> None:
        """Tensors that differ become those of the lowest rank of their majority."""
        assert self._replica is not None
        tensors = dict(zip(self._replica.names, self._replica.tensors, strict=True))
        for one in differences:
            target = tensors[one.name]
            copy = target.contiguous().clone() if not target.is_contiguous() else target
            with torch.no_grad(), named(f"{one.name} of rank {one.majority[0]}"):
                dist.broadcast(copy, group=group, group_src=one.majority[0])
                if copy is not target:
                    target.copy_(copy)


def difference_error(
    text: str, differences: Sequence[Difference], *, rank: int, operation: str, step: int | None = None
) -> MismatchError:
    return MismatchError(
        f"{text}. {ADVICE}.",
        rank=rank,
        peer=next((one for one in differences[0].minority if one != rank), None) if differences else None,
        step=step,
        name=differences[0].name if differences else None,
        operation=operation,
        advice=ADVICE,
    )


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
        done = wrapper.reducer.report.steps() + self._local_steps
        if self._first is None:
            self._first = done
        steps = done - self._first
        if steps == self._steps:
            return
        before, self._steps = self._steps, steps
        self._looks += 1
        if self._pending is not None and self._group is not None:
            (gather, step), self._pending = self._pending, None
            self._judge(wrapper, self._group, gather.wait(), step)
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
        name, group = f"divergence guard, step {steps}", wrapper.process_group
        if self._group is None:
            self._group = group_for_background(group, "divergence guard")
        data = _PACKED.pack(steps, self._looks, self.comparison.hash(wrapper, self._part_of(steps), self._rounds))
        if is_elastic(group):  # what is under way beside the training would end it when a rank is lost
            self._judge(wrapper, group, as_unit(group, name, lambda: BackgroundGather(data, group, name).wait()), steps)
        else:
            self._pending = BackgroundGather(data, self._group, name), steps

    def _judge(self, wrapper: Any, group: dist.ProcessGroup, hashes: list[bytes], step: int) -> None:
        """Compare what the ranks sent after that step."""
        gathered = [_PACKED.unpack(one) for one in hashes]
        if all(one == gathered[0] for one in gathered):
            return
        part = None if len({one[2] for one in gathered}) == 1 else self._part_of(step)
        self._looks = max(one[1] for one in gathered)
        uneven = _uneven([one[:2] for one in gathered])
        self.comparison.act(wrapper, group, step, part=part, parts=self._rounds, uneven=uneven)


def cut(every: int, replica_bytes: int) -> tuple[int, int]:
    """How many steps a window has, and in how many parts the replica is hashed, one in each window.

    The cheapest cut by which a difference is found within `every` steps: a byte is hashed within parts * window steps,
    and its hash is compared within a window. A long window has few exchanges, and larger parts.
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


EVERY = 500  # steps within which a difference is found
_ATTACHED = struct.Struct("<qQ")  # the window's number from 1 on, and the part's hash
NOTHING = bytes(_ATTACHED.size)
assert _ATTACHED.size == ATTACHED_BYTES


class AttachedGuard:
    """Used by the thread that runs forward, between steps.

    Args:
        wrapper: the RingDP, which owns this.
        comparison: what is compared.
        window: steps between two messages.
    """

    def __init__(self, wrapper: Any, comparison: Comparison, window: int) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.comparison = comparison
        self._parts = parts_of(window)
        self._number = 0  # of the window whose message is sent
        self._steps = -1  # the reducer's, when it was made
        self._message = NOTHING
        self._received: tuple[int, list[bytes]] | None = None

    def message(self) -> bytes:
        """This rank's message, in a forward before the backward that carries it. Micro-batches of one step have the
        same."""
        wrapper = self._wrapper()
        assert wrapper is not None
        steps = wrapper.reducer.report.steps()
        if steps != self._steps:
            self._steps = steps
            self._number += 1
            self._message = _ATTACHED.pack(
                self._number, self.comparison.hash(wrapper, self._number % self._parts, self._parts)
            )
        return self._message

    def receive(self, step: int, gathered: list[bytes]) -> None:
        """Take all ranks' messages, by rank, in the backward after step `step`. `look` compares them in the next
        forward."""
        self._received = step, gathered

    def look(self) -> None:
        """Called in a forward. Raises MismatchError where replicas differ and the action is "raise"."""
        if self._received is None:
            return
        (step, messages), self._received = self._received, None
        gathered = [_ATTACHED.unpack(one) for one in messages]
        numbers = [number for number, _ in gathered]
        if len(set(numbers)) > 1:  # a rank is new, or had no forward in time: they hashed different parts
            self._number = max(numbers)
            self.comparison.forget_differences()
        elif numbers[0] and any(one != gathered[0] for one in gathered):
            wrapper = self._wrapper()
            assert wrapper is not None
            part = numbers[0] % self._parts
            self.comparison.act(wrapper, wrapper.process_group, step, part=part, parts=self._parts)

    def start_again(self) -> None:
        """Called when the wrapper has another group, or a join is over."""
        self._received = None
        self.comparison.forget_differences()


def parts_of(window: int) -> int:
    """In how many parts the replica is hashed, one in each window, so that a difference is found within `EVERY`."""
    return max(1, (EVERY - 1) // window - 1)


_SAME = struct.Struct("<2Q")  # the hash, and of how many steps; steps whose gradients are zeros do not count
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
        _, steps = _SAME.unpack(gathered[0])
        if steps == 0 or any(one != gathered[0] for one in gathered):
            self._alike = 0
            return
        self._alike += steps
        if self._alike < _LEAST_STEPS:
            return
        self._warned = True
        if rank == 0:
            _log.warning(
                "all %d ranks computed the same gradients, to the bit, in the %d steps up to %d: do they read the same"
                " data? ringdp.prepare(loader) or a DistributedSampler gives each rank its own (guard=0: no such line)",
                len(gathered),
                self._alike,
                step,
            )
