"""The tensors that a guard compares, and its action after a difference."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringdp.ddp.divergence.replica import Replica
from ringdp.ddp.divergence.report import Difference, compare, summary
from ringdp.errors import MismatchError
from ringdp.job.backend import named

_log = logging.getLogger("ringdp.divergence")
ACTIONS = ("raise", "warn", "sync")
ADVICE = (
    "Find the code that only some ranks run on it, and start from a checkpoint; or let RingDP copy from the majority"
    " (Guard(on='sync')), or leave out what is meant to differ (Guard(ignore=[…]))"
)


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
        self._snapshot: Any = None
        self._replica: Replica | None = None
        self._parameters_alone = False
        self._hash: Any = None

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
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
        changed = self._replica is None or self._snapshot is not wrapper._snapshot
        if not changed and (self._parameters_alone or not whole):
            return
        from ringdp import _C

        self._snapshot = wrapper._snapshot
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
            with_buffers=buffers and not wrapper._sends_buffers,
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
        with named("which tensors differ"):
            differences = compare(self._replica, self._hash.each(), group)  # type: ignore[arg-type]
        text = f"found after step {step}: {self._found(differences, part, parts)}" + (f"; {uneven}" if uneven else "")
        rank = wrapper.process_group.rank()
        if self._action == "raise" or (self._action == "sync" and any("" in one.hashes for one in differences)):
            raise difference_error(text, differences, rank=rank, operation="divergence guard", step=step)
        concerned = {0, *(other for one in differences for other in one.minority)}
        if self._action == "sync":
            self._copy(differences, group)
            text += ". All ranks have the majority's from now on" if differences else ""
        else:
            self._known_different.update(one.name for one in differences)
            self._replica = None
            text += f". {ADVICE}. It is not compared again" if differences else ""
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
