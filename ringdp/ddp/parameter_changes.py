"""Parameters of a wrapped module that were replaced, added, removed or renamed after wrapping.

RingDP compares the module with its reducer's parameters at the forward that also looks for frozen parameters. The ranks
compare the changes before the buckets are laid out anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringdp import refusals
from ringdp.compression.parameters import ModelParameter, model_parameters, never_reduced
from ringdp.compression.tensor_parts import Held, held
from ringdp.ddp import elastic as repair
from ringdp.ddp.compression.mixin import CompressedModule
from ringdp.ddp.model_check import check_same_model
from ringdp.ddp.module_state import refuse_unusable
from ringdp.ddp.optimizer_in_backward import has_optimizers
from ringdp.ddp.overflow import ReducedGradients
from ringdp.ddp.refusal import COMPARING_MODELS
from ringdp.ddp.unaveraged import optimizers
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


class ChangingModule(CompressedModule):
    """The part of RingDP that follows changes of the module. Used by the thread that runs forward, between steps.

    Attributes:
        _snapshot: of the module, when its parameters were last laid out.
        _broadcast_new: new parameters become rank 0's.
        _never_reduced: parameters that the reducer does not have, such as integers, as they were then.
    """

    module: Any
    device: torch.device
    logger: Any
    parameters_to_ignore: Any
    broadcast_bucket_size: int
    _features: Callable[[], dict[str, str]]
    _module_parameters: list[torch.nn.Parameter]
    _reduced: ReducedGradients
    _snapshot: Any  # ringdp._C.ModuleSnapshot
    _broadcast_new: bool
    _never_reduced: Sequence[ModelParameter] = ()

    def _follow_parameters(self) -> None:
        """Where the module has changed since the buckets were laid out: compare the changes with all ranks, and lay out
        anew.

        Raises:
            MismatchError: the ranks made different changes; names the parameters.
            InvalidStateError: an argument of this wrapper forbids such a change.
            InvalidArgumentError: a new parameter is on another kind of device.
        """
        from ringdp import _C

        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing repeats this forward inside its backward
        self.reducer.prepare_for_forward()  # raises what the last step left; parameters frozen meanwhile come first
        reduced, after = self._changes()
        changes, others = self._with_never_reduced(reduced, after)
        if changes:
            self._agree_about(changes, reduced, after)
        if reduced:
            self._lay_out(reduced, after)
            _log.info("since the last forward %s: gradients are laid out anew", reduced)
        self._never_reduced = others
        self._note_what_is_not_plain()  # type: ignore[attr-defined]
        self._assign_modules_buffers()  # type: ignore[attr-defined]
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[attr-defined]
        self._snapshot = _C.ModuleSnapshot(self.module)

    def _changes(self) -> tuple[ParameterChanges, list[ModelParameter]]:
        """The changes since the buckets were laid out, and the present parameters."""
        after = model_parameters(self.module, ignored=self.parameters_to_ignore)
        after = without_results(self._watched, after)
        found = self.reducer.find([one.parameter for one in after])
        return ParameterChanges.between(self._watched, after, found), after

    def _with_never_reduced(
        self, reduced: ParameterChanges, after: Sequence[ModelParameter]
    ) -> tuple[ParameterChanges, Sequence[ModelParameter]]:
        """The changes with those of parameters that the reducer does not have, and which of these are there now."""
        others = never_reduced(self.module, ignored=self.parameters_to_ignore)
        if not others and not self._never_reduced:
            return reduced, others
        before = [*self._watched, *self._never_reduced]
        position = {id(one.parameter): index for index, one in enumerate(self._never_reduced, len(self._watched))}
        found = [
            *self.reducer.find([one.parameter for one in after]),
            *(position.get(id(one.parameter), -1) for one in others),
        ]
        return ParameterChanges.between(before, [*after, *others], found), others

    def _refuse_changes_of_this_forward(self) -> None:
        """Refuse parameters that forward itself replaced or added: their gradients would not be averaged.

        Raises:
            InvalidStateError: names the parameters.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # as above
        changes, _ = self._changes()
        if any(one.parameter.requires_grad for one in changes.new):
            raise InvalidStateError(
                f"while forward ran {changes}: such gradients would not be averaged over the ranks. Change parameters"
                " between two steps, before the wrapped module is called",
                name=changes.first_name,
            )

    def _agree_about(
        self, changes: ParameterChanges, reduced: ParameterChanges, after: Sequence[ModelParameter]
    ) -> None:
        """Compare the changes with all ranks, and give new parameters the same values on all.

        Args:
            reduced: those of the changes that the reducer has to follow.
        """
        try:
            if reduced:
                self._refuse_to_follow(reduced)
            check_devices(changes, after, self.device)
            refuse_unusable(_held(changes))
        except RingError as error:
            report_refusal(error, self.process_group, self.device, changes.operation)
            raise
        group = self.process_group
        if group.size() == 1:
            return

        def compare() -> None:
            agree(changes, self.module, group, self.device, ignored=self.parameters_to_ignore)

        as_unit(group, "the comparison of changed parameters", compare)
        if not (self._broadcast_new and changes.new):
            return
        ranks = dist.get_process_group_ranks(group)
        new = [part for one in _held(changes, ranks) for _, part in one.parts]

        def broadcast() -> None:
            with named(f"new parameters: {changes}"):
                dist._broadcast_coalesced(group, new, self.broadcast_bucket_size, 0)  # type: ignore[attr-defined]

        repair.broadcast_in_unit(group, "the broadcast of new parameters", new, broadcast)

    def _lay_out(self, changes: ParameterChanges, after: list[ModelParameter]) -> None:
        """Give these parameters to the reducer and to all parts that number parameters as it does."""
        carried = self._compression_to_carry()
        parameters, names = [one.parameter for one in after], [one.name for one in after]
        remember_names(parameters, names)
        self.reducer.replace_parameters(
            parameters, names, [one.describe_use() for one in after], [one.sparse for one in after]
        )
        self._watched = after
        optimizers.watch(self)
        self._reduced = ReducedGradients(self)
        named_now = self.module.named_parameters()
        self._module_parameters = [one for name, one in named_now if name not in self.parameters_to_ignore]
        self._carry_compression(carried, changes.renamed)
        trainable = [one for one in after if one.parameter.requires_grad]
        self.logger.set_parameters([one.parameter for one in trainable], [one.name for one in trainable])

    def _refuse_to_follow(self, changes: ParameterChanges) -> None:
        given = has_optimizers(one.parameter for one in changes.new)
        features = self._features() | {"other parameters": ""} | ({"optimizer in backward": ""} if given else {})
        if text := refusals.found(features):
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
