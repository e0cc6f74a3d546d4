"""Parameters of a wrapped module that were replaced, added, removed or renamed after wrapping.

RingDP compares the module with its reducer's parameters at the forward that also looks for frozen parameters. The ranks
compare the changes before the buckets are laid out anew.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringdp import refusals
from ringdp.compression.parameters import ModelParameter, model_parameters, never_reduced
from ringdp.compression.tensor_parts import Held, held
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.mixed_precision import in_backward
from ringdp.ddp.model_check import check_same_model
from ringdp.ddp.module_state import refuse_unusable
from ringdp.ddp.optimizer_in_backward import has_optimizers
from ringdp.ddp.refusal import COMPARING_MODELS
from ringdp.ddp.sync_batch_norm import synchronise_on_cpu
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError, RingError
from ringdp.hooks.names import remember_names
from ringdp.job.agreement import difference, report_refusal
from ringdp.job.backend import backend_name, named
from ringdp.job.elastic import as_unit

_log = logging.getLogger("ringdp.parallel")

_NAMES_SHOWN = 5
_ADVICE = "Replace, add and remove the same parameters on all ranks, before the same forward."


@dataclass(frozen=True)
class ParameterChanges:
    """The difference between the parameters of a module and those of its wrapper's reducer.

    Attributes:
        replaced: names under which there is another tensor now.
        added: names that are new, of tensors that are new.
        removed: names that are gone, with their tensors.
        renamed: the old name of each tensor that has another one now, by its new name.
        new: those whose tensors were not there before.
    """

    replaced: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: dict[str, str]
    new: tuple[ModelParameter, ...]

    @classmethod
    def between(
        cls, before: Sequence[ModelParameter], after: Sequence[ModelParameter], found: Sequence[int]
    ) -> ParameterChanges:
        """`found`: for each of `after` its index in `before`, or -1 where its tensor is not there."""
        names_before = {one.name for one in before}
        kept = {index for index in found if index >= 0}
        gone = {one.name for index, one in enumerate(before) if index not in kept}
        new = [one for one, index in zip(after, found, strict=True) if index < 0]
        renamed = {
            one.name: before[index].name
            for one, index in zip(after, found, strict=True)
            if index >= 0 and before[index].name != one.name
        }
        names_new = {one.name for one in new}
        return cls(
            replaced=tuple(one.name for one in new if one.name in names_before),
            added=tuple(one.name for one in new if one.name not in names_before),
            removed=tuple(name for name in sorted(gone) if name not in names_new),
            renamed=renamed,
            new=tuple(new),
        )

    def __bool__(self) -> bool:
        return bool(self.new or self.removed or self.renamed)

    @property
    def first_name(self) -> str:
        return (*self.replaced, *self.added, *self.removed, *self.renamed)[0]

    @property
    def operation(self) -> str:
        """The name under which the ranks compare them."""
        return f"{COMPARING_MODELS}: {self}"

    def lines(self) -> list[str]:
        """The text that the ranks compare; its first line is for people."""
        lists = (self.replaced, self.added, self.removed, tuple(f"{old}\t{new}" for new, old in self.renamed.items()))
        return [str(self), *("\t".join(names) for names in lists)]

    def __str__(self) -> str:
        parts = [
            f"{_listed(names)} {'was' if len(names) == 1 else 'were'} {verb}"
            for names, verb in ((self.replaced, "replaced"), (self.added, "added"), (self.removed, "removed"))
            if names
        ]
        if self.renamed:
            parts.append(_listed([f"{old} is now {new}" for new, old in self.renamed.items()]))
        return "; ".join(parts)


class ReducedParameters(Feature):
    """The parameters that the reducer of a RingDP averages; between two steps they follow the module's.

    Args:
        broadcast_new: new parameters become rank 0's.

    Attributes:
        watched: as the reducer numbers them. Frozen ones too: they may be unfrozen later.
    """

    made_with_reducer = ("watched", "_never_reduced", "_snapshot")
    watched: list[ModelParameter]
    _never_reduced: Sequence[ModelParameter]  # that the reducer does not have, such as integers, as they were then
    _snapshot: Any  # ringdp._C.ModuleSnapshot, when the parameters were last laid out

    def __init__(self, *, broadcast_new: bool) -> None:
        self._broadcast_new = broadcast_new

    def before_reducer(self, ddp: FeaturedDDP) -> None:
        self.watched = model_parameters(ddp.module, ignored=ddp.parameters_to_ignore)
        self._never_reduced = never_reduced(ddp.module, ignored=ddp.parameters_to_ignore)
        remember_names([one.parameter for one in self.watched], [one.name for one in self.watched])

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        from ringdp import _C

        self._snapshot = _C.ModuleSnapshot(ddp.module)

    def before_forward(self, ddp: FeaturedDDP) -> None:
        """Where the module has changed since the buckets were laid out: compare the changes with all ranks, and lay out
        anew.

        Raises:
            MismatchError: the ranks made different changes; names the parameters.
            InvalidStateError: an argument of this wrapper forbids such a change.
            InvalidArgumentError: a new parameter is on another kind of device.
        """
        if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync and self._snapshot.differs(ddp.module)):
            return
        if in_backward():
            return  # checkpointing repeats this forward inside its backward
        ddp.reducer.prepare_for_forward()  # raises what the last step left; parameters frozen meanwhile come first
        reduced, after = self._changes(ddp)
        changes, others = self._with_never_reduced(ddp, reduced, after)
        if changes:
            self._agree_about(ddp, changes, reduced, after)
        if reduced:
            self._lay_out(ddp, reduced, after)
            _log.info("since the last forward %s: gradients are laid out anew", reduced)
        self._never_reduced = others
        for feature in ddp.ringdp_features:
            feature.module_changed(ddp)
        synchronise_on_cpu(ddp.module)
        self.reducer_made(ddp)

    def before_backward(self, ddp: FeaturedDDP) -> None:
        """Refuse parameters that forward itself replaced or added: their gradients would not be averaged.

        Raises:
            InvalidStateError: names the parameters.
        """
        if not (ddp.require_backward_grad_sync and self._snapshot.differs(ddp.module)) or in_backward():
            return
        changes, _ = self._changes(ddp)
        if any(one.parameter.requires_grad for one in changes.new):
            raise InvalidStateError(
                f"while forward ran {changes}: such gradients would not be averaged over the ranks. Change parameters"
                " between two steps, before the wrapped module is called",
                name=changes.first_name,
            )

    def _changes(self, ddp: FeaturedDDP) -> tuple[ParameterChanges, list[ModelParameter]]:
        """The changes since the buckets were laid out, and the present parameters."""
        after = model_parameters(ddp.module, ignored=ddp.parameters_to_ignore)
        after = without_results(self.watched, after)
        found = ddp.reducer.plan.find([one.parameter for one in after])
        return ParameterChanges.between(self.watched, after, found), after

    def _with_never_reduced(
        self, ddp: FeaturedDDP, reduced: ParameterChanges, after: Sequence[ModelParameter]
    ) -> tuple[ParameterChanges, Sequence[ModelParameter]]:
        """The changes with those of parameters that the reducer does not have, and which of these are there now."""
        others = never_reduced(ddp.module, ignored=ddp.parameters_to_ignore)
        if not others and not self._never_reduced:
            return reduced, others
        before = [*self.watched, *self._never_reduced]
        position = {id(one.parameter): index for index, one in enumerate(self._never_reduced, len(self.watched))}
        found = [
            *ddp.reducer.plan.find([one.parameter for one in after]),
            *(position.get(id(one.parameter), -1) for one in others),
        ]
        return ParameterChanges.between(before, [*after, *others], found), others

    def _agree_about(
        self, ddp: FeaturedDDP, changes: ParameterChanges, reduced: ParameterChanges, after: Sequence[ModelParameter]
    ) -> None:
        """Compare the changes with all ranks, and give new parameters the same values on all.

        Args:
            reduced: those of the changes that the reducer has to follow.
        """
        group = ddp.process_group
        try:
            if reduced:
                _refuse_to_follow(ddp, reduced)
            check_devices(changes, after, ddp.device)
            refuse_unusable(_held(changes))
        except RingError as error:
            report_refusal(error, group, ddp.device, changes.operation)
            raise
        if group.size() == 1:
            return

        def compare() -> None:
            agree(changes, ddp.module, group, ddp.device, ignored=ddp.parameters_to_ignore)

        as_unit(group, "the comparison of changed parameters", compare)
        if not (self._broadcast_new and changes.new):
            return
        ranks = dist.get_process_group_ranks(group)
        new = [part for one in _held(changes, ranks) for _, part in one.parts]

        def broadcast() -> None:
            with named(f"new parameters: {changes}"):
                dist._broadcast_coalesced(group, new, ddp.broadcast_bucket_size, 0)  # type: ignore[attr-defined]

        as_unit(group, "the broadcast of new parameters", broadcast, writes=new)

    def _lay_out(self, ddp: FeaturedDDP, changes: ParameterChanges, after: list[ModelParameter]) -> None:
        """Give these parameters to the reducer and to all parts that number parameters as it does."""
        for feature in ddp.ringdp_features:
            feature.before_renumbering(ddp)
        parameters, names = [one.parameter for one in after], [one.name for one in after]
        remember_names(parameters, names)
        ddp.reducer.replace_parameters([one.describe() for one in after])
        self.watched = after
        named_now = ddp.module.named_parameters()
        ddp._module_parameters = [one for name, one in named_now if name not in ddp.parameters_to_ignore]
        for feature in ddp.ringdp_features:
            feature.renumbered(ddp, changes.renamed)
        trainable = [one for one in after if one.parameter.requires_grad]
        ddp.logger.set_parameters([one.parameter for one in trainable], [one.name for one in trainable])


def _refuse_to_follow(ddp: FeaturedDDP, changes: ParameterChanges) -> None:
    given = has_optimizers(one.parameter for one in changes.new)
    others = {"other parameters": ""} | ({"optimizer in backward": ""} if given else {})
    if text := refusals.found(ddp.ringdp_features.in_use(ddp) | others):
        raise InvalidStateError(
            f"since the last forward {changes}, which RingDP cannot follow: {text}", name=changes.first_name
        )


def _held(changes: ParameterChanges, ranks: Collection[int] = ()) -> list[Held]:
    return [held("parameter", one.name, one.parameter, ranks=ranks) for one in changes.new]


def agree(
    changes: ParameterChanges,
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    ignored: Collection[str] = (),
) -> None:
    """Compare the changes, and the module that they led to, with the other ranks'. All ranks must call this.

    Raises:
        MismatchError: not all ranks made the same changes, or they lead to different models; names the parameters.
        RingError: the comparison over another backend than ring failed, for example because a rank never came.
    """
    try:
        with named(changes.operation):
            found = difference(changes.lines(), group, what="changed parameters", doing="follow that", device=device)
            if found is not None:
                _, theirs = found.lines
                raise MismatchError(
                    f"on rank {found.peer} {theirs[0]}.", rank=found.rank, peer=found.peer, operation=COMPARING_MODELS
                )
            check_same_model(module, group, device, ignored=ignored)
    except MismatchError as error:
        fields = {field: getattr(error, field) for field in MismatchError._fields}
        fields["name"] = error.name or changes.first_name
        fields["advice"] = _ADVICE
        raise MismatchError(
            f"since the last forward {changes} on rank {group.rank()}, and not all ranks did the same:"
            f" {str(error).removesuffix('.')}. {_ADVICE}",
            **fields,
        ) from error
    except RingError:
        raise
    except RuntimeError as error:
        raise RingError(
            f"since the last forward {changes} on rank {group.rank()}, and comparing that with the other ranks over"
            f" {backend_name(group)} failed: {error}. {_ADVICE}",
            rank=group.rank(),
            name=changes.first_name,
            advice=_ADVICE,
        ) from error


def without_results(before: Sequence[ModelParameter], after: Sequence[ModelParameter]) -> list[ModelParameter]:
    """`after`, with the known parameter where autograd made the tensor that has its name now.

    `torch.func.functional_call` puts such tensors in the parameters' places for the time of a forward. Their gradients
    go to what they were made of.
    """
    known = {one.name: one for one in before}
    return [
        one if one.parameter.is_leaf else known[one.name] for one in after if one.parameter.is_leaf or one.name in known
    ]


def check_devices(changes: ParameterChanges, after: Sequence[ModelParameter], device: torch.device) -> None:
    """Raise InvalidArgumentError where a new parameter is not on the kind of device that the wrapper reduces."""
    for one in after:
        if one.parameter.device.type != device.type:
            raise InvalidArgumentError(
                f"since the last forward {changes}: parameter {one.name} is on {one.parameter.device}, and RingDP was"
                f" built for a module on {device.type}: move the parameter there, or wrap the module anew",
                name=one.name,
            )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, … {len(names) - _NAMES_SHOWN} more"
