"""Warns where an optimizer's step applies gradients of a RingDP that were not averaged over the ranks.

The reducer knows of each gradient that stayed in ``.grad`` without being averaged: its backward ran under ``no_sync``,
or went through no output of the wrapper's forward. Whether an optimizer applies it is seen by hooks on all optimizers
of the process. For optimizers without such parameters they cost a look-up and a call that reads a number.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ringdp.compression.parameters import clean_name
from ringdp.ddp.divergence.options import ReplicaGuard
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.parameter_changes import ReducedParameters
from ringdp.text import count

_log = logging.getLogger("ringdp.parallel")
_MOST_NAMES = 3


class OptimizerWatch:
    """The wrappers of this process, and which optimizer has parameters of which. Used by threads that train.

    An entry of `_owners` is right as long as its key is: neither wrappers nor groups of parameters have changed.
    """

    def __init__(self) -> None:
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changes = 0
        self._owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, tuple[Any, ...]]] = (
            weakref.WeakKeyDictionary()
        )
        self._registered = False

    def watch(self, wrapper: Any) -> None:
        """Register a new wrapper, or one whose parameters have changed."""
        self._wrappers.add(wrapper)
        self._changes += 1
        if not self._registered:
            self._registered = True
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)

    def _before(self, _: torch.optim.Optimizer, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if _closure(args, keywords) is None or torch.compiler.is_compiling():
            return
        for wrapper in self._owners_of(args[0]):
            wrapper.reducer.forwards.begin_closure()

    # After the step, since a closure runs backwards in it.
    def _after(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        closure = _closure(args, keywords)
        owners = self._owners_of(optimizer)
        for wrapper in owners:
            if closure is not None:
                wrapper.reducer.forwards.end_closure()
            if wrapper.reducer.has_unaveraged():
                others = [other for other in owners if other is not wrapper]
                wrapper.ringdp_features[Unaveraged].look(wrapper, optimizer, others)

    def _owners_of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        groups = optimizer.param_groups
        key = self._changes, len(groups), sum(len(group["params"]) for group in groups)
        found = self._owners.get(optimizer)
        if found is None or found[0] != key:
            mine = _ids(optimizer)
            owners = [one for one in list(self._wrappers) if not mine.isdisjoint(map(id, one.module.parameters()))]
            found = self._owners[optimizer] = key, tuple(map(weakref.ref, owners))
        return [wrapper for wrapper in (one() for one in found[1]) if wrapper is not None]


optimizers = OptimizerWatch()


class Unaveraged(Feature):
    """Warns once of one RingDP."""

    _warned = False

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        optimizers.watch(ddp)

    def renumbered(self, ddp: FeaturedDDP, renamed: Mapping[str, str]) -> None:
        optimizers.watch(ddp)

    def look(self, ddp: FeaturedDDP, optimizer: torch.optim.Optimizer, others: Sequence[FeaturedDDP]) -> None:
        """Called when `optimizer` has stepped and some gradient of the wrapper was not averaged, unless by one of
        `others`."""
        guard = ddp.ringdp_features[ReplicaGuard]
        if ddp.process_group.size() == 1 or guard.is_off:
            return
        if self._warned and not guard.counts_local_steps:
            return
        mine = _ids(optimizer)
        for other in others:
            mine -= {id(one) for one in other.module.parameters()} - {id(one[1]) for one in _left_over(other)}
        applied = [one for one in _left_over(ddp) if id(one[1]) in mine]
        if not applied:
            return
        guard.stepped_alone(ddp)
        # The program may have averaged them itself: then it has written to them, and sent about as many bytes.
        _, nbytes, sent = ddp.reducer.unaveraged()
        by_hand = 4 * sent >= nbytes or sent < 0
        skipped = [one for one in applied if not (one[3] and by_hand) and not _is_zero(one[1].grad)]
        if not skipped or self._warned:
            return
        self._warned = True
        causes = [
            _listed([name for name, _, under_no_sync, _ in skipped if under_no_sync], _UNDER_NO_SYNC),
            _listed([name for name, _, under_no_sync, _ in skipped if not under_no_sync], _PAST_THE_WRAPPER),
        ]
        _log.warning(
            "rank %d: %s.step() applied gradients of RingDP(%s) that were not averaged over the ranks: %s"
            " (guard=0: no such line)",
            ddp.process_group.rank(),
            type(optimizer).__name__,
            type(ddp.module).__name__,
            "; and ".join(cause for cause in causes if cause),
        )


def _left_over(ddp: FeaturedDDP) -> list[tuple[str, torch.nn.Parameter, bool, bool]]:
    """Name, parameter, whether under ``no_sync``, and whether its gradient was written since."""
    now = {clean_name(name): one for name, one in ddp.module.named_parameters(remove_duplicate=False)}
    found = []
    for index, under_no_sync, changed in ddp.reducer.unaveraged()[0]:
        name = ddp.ringdp_features[ReducedParameters].watched[index].name
        parameter = now.get(name)
        if parameter is not None and parameter.grad is not None:
            found.append((name, parameter, under_no_sync, changed))
    return found


_UNDER_NO_SYNC = "of a backward under no_sync(): leave it for the last micro-batch"
_PAST_THE_WRAPPER = "past the wrapper: call model(x), not model.module(x)"


def _listed(names: Sequence[str], cause: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{count(len(names), 'parameter')} ({', '.join(names[:_MOST_NAMES])}{more}) {cause}"


def _is_zero(gradient: Any) -> bool:
    """As ``zero_grad(set_to_none=False)`` leaves it. False where that cannot be seen."""
    if type(gradient) not in (torch.Tensor, torch.nn.Parameter) or gradient.layout != torch.strided:
        return False
    return not bool(gradient.any())


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _closure(args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Of `Optimizer.step`'s arguments, of which the first is the optimizer."""
    return args[1] if len(args) > 1 else keywords.get("closure")
