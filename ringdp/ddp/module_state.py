"""The part of RingDP that sends parameters and buffers: at construction, the buffers in each forward, after a Join.

`compression.tensor_parts.held` decides which of them are sent. Ranks compare their modules at construction only; later
the name of the buffers' broadcast has the changes of their buffers since, so that the error of ranks whose buffers
differ names these without another message.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringdp.compression.tensor_parts import Held, Treatment, held, held_by, is_plain, why_not_averaged
from ringdp.ddp.elastic import Elastic
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.job.backend import named
from ringdp.job.elastic import as_unit

_log = logging.getLogger("ringdp.parallel")
_NAMES_SHOWN = 4

Layout = list[tuple[str, torch.dtype, torch.Size]]
"""Of the buffers that are sent, or their parts, one after the other: name, type and shape."""


class SentState(Feature):
    """What of one module is sent, and what all ranks have sent last."""

    made_with_reducer = ("_never_averaged", "_plain_buffers", "_repeated_after")
    # Frozen parameters that the reducer could not average if they were not.
    _never_averaged: Sequence[Held] = ()
    # The buffers, as torch lists them, where `held` had nothing to decide about any; else none.
    _plain_buffers: Sequence[Tensor] = ()
    _repeated_after = -1  # the reducer's steps, when a batch was to be repeated

    def __init__(self) -> None:
        self._layout: Layout = []  # of the buffers that the next forward sends
        self._plain_forms: Sequence[tuple[torch.dtype, torch.Size]] = []  # which `_layout` has with their names
        self._agreed: Layout | None = None  # of those that all ranks have sent last; None: nothing was compared yet
        self._logged_left_alone = False

    def refuse_unusable(self, ddp: FeaturedDDP) -> None:
        """Raise InvalidArgumentError where the module has something that can be neither sent nor averaged."""
        refuse_unusable(_held_by(ddp))

    def note_what_is_not_plain(self, ddp: FeaturedDDP) -> None:
        """When the module is given, and after a change of its parameters."""
        found = _held_by(ddp)
        self._never_averaged = [one for one in found if one.kind == "parameter" and why_not_averaged(one.tensor)]
        left_alone = [f"{one.kind} {one.name} ({one.why})" for one in found if one.treatment is Treatment.LEFT_ALONE]
        if left_alone and not self._logged_left_alone and ddp.process_group.rank() == 0:
            self._logged_left_alone = True
            _log.warning("each rank keeps its own, which is neither compared nor sent: %s", ", ".join(left_alone))

    def module_changed(self, ddp: FeaturedDDP) -> None:
        self.note_what_is_not_plain(ddp)
        ddp._assign_modules_buffers()

    def before_forward(self, ddp: FeaturedDDP) -> None:
        """Raises:
        InvalidArgumentError: a parameter that the reducer cannot average requires grad by now.
        """
        for one in self._never_averaged if torch.is_grad_enabled() else ():
            if one.tensor.requires_grad:
                raise InvalidArgumentError(
                    f"RingDP: parameter {one.name} {why_not_averaged(one.tensor)}", name=one.name
                )

    def send(self, ddp: FeaturedDDP, source: int, *, buffers: bool) -> None:
        """Parameters, and buffers if they are asked for, become those of the group's rank `source`."""
        tensors = [part for one in _held_by(ddp, buffers=buffers) for _, part in one.parts]
        if tensors:
            size = ddp.broadcast_bucket_size
            dist._broadcast_coalesced(ddp.process_group, tensors, size, source)  # type: ignore[attr-defined]

    def buffers_to_send(self, ddp: FeaturedDDP) -> list[Tensor]:
        """Called in each forward, when torch has listed the buffers."""
        buffers: list[Tensor] = ddp.modules_buffers
        if len(buffers) == len(self._plain_buffers) and all(map(operator.is_, buffers, self._plain_buffers)):
            forms = [(one.dtype, one.shape) for one in buffers]
            if forms == self._plain_forms and all(one.is_contiguous() for one in buffers):
                return buffers  # as in the last forward
        sent: list[Tensor] = []
        layout: Layout = []
        ranks: list[int] | None = None
        for name, buffer in ddp.named_module_buffers.items():
            if is_plain(buffer):
                sent.append(buffer)
                layout.append((name, buffer.dtype, buffer.shape))
                continue
            ranks = dist.get_process_group_ranks(ddp.process_group) if ranks is None else ranks
            one = held("buffer", name, buffer, ranks=ranks)
            refuse_unusable([one])
            for part, tensor in one.parts:
                sent.append(tensor)
                shown = (buffer.dtype, buffer.shape) if part == "" else (tensor.dtype, tensor.shape)
                layout.append((one.part_name(part), *shown))
        all_plain = ranks is None
        self._plain_buffers = buffers if all_plain else ()
        self._plain_forms = [(one.dtype, one.shape) for one in self._plain_buffers]
        self._layout = layout
        return sent

    def buffers_are_alike(self) -> None:
        """Called when all ranks have the same buffers."""
        self._agreed = self._layout

    def repeat_batch(self, ddp: FeaturedDDP) -> None:
        """Buffers are not sent again up to the next backward that synchronises."""
        self._repeated_after = ddp.reducer.report.steps()

    def is_repeating(self, ddp: FeaturedDDP) -> bool:
        return 0 <= self._repeated_after == ddp.reducer.report.steps()

    def broadcast(self, ddp: FeaturedDDP, tensors: list[Tensor], send: Callable[[], None]) -> None:
        """`send()`, by which these buffers of a forward become those of a rank.

        Raises:
            MismatchError: not all ranks have the same buffers; names those that have changed since the last forward.
        """
        layout, changes = self._layout, _changes(self._agreed, self._layout)
        name = f"buffers{_forward_note(ddp)}" + (f": {'; '.join(_shown(changes))}" if changes else "")

        def named_send() -> None:
            with named(name):
                send()

        try:
            as_unit(ddp.process_group, "the buffers' broadcast", named_send, writes=tensors)
        except MismatchError as error:
            if not changes or self._agreed is None:
                raise
            fields = {field: getattr(error, field) for field in MismatchError._fields}
            advice = "Change buffers alike on all ranks, before the same forward, or pass forward_sync_buffers=False"
            raise MismatchError(
                f"since the last forward of rank {ddp.process_group.rank()} {'; '.join(_shown(changes))}, and not all"
                f" ranks have the same buffers: {str(error).removesuffix('.')}. {advice}",
                **fields | {"name": next(iter(changes)), "advice": advice},
            ) from error
        self._agreed = layout


def _held_by(ddp: FeaturedDDP, *, buffers: bool = True) -> list[Held]:
    ranks = dist.get_process_group_ranks(ddp.process_group)
    return list(held_by(ddp.module, ignored=ddp.parameters_to_ignore, buffers=buffers, ranks=ranks))


def _forward_note(ddp: FeaturedDDP) -> str:
    """The number of the forward, for the name of the buffers' broadcast, which all ranks compare."""
    # Where all ranks that take part run the same forwards; the reducer is not there while the wrapper is constructed.
    compared = not (ddp._join_config.enable or ddp.ringdp_features[Elastic].repairs)
    reducer: Any = ddp.__dict__.get("reducer") if compared else None
    return "" if reducer is None else str(reducer.forwards.note_of(ddp.module.training))


def sends_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether each forward overwrites the buffers with rank 0's, or with the result of a hook."""
    return bool(getattr(ddp, "forward_sync_buffers", ddp.broadcast_buffers))


def refuse_unusable(tensors: Iterable[Held]) -> None:
    """Raise InvalidArgumentError for the first that is refused."""
    for one in tensors:
        if one.treatment is Treatment.REFUSED:
            raise InvalidArgumentError(f"RingDP: {one.kind} {one.name} {one.why}", name=one.name)


def _changes(before: Layout | None, now: Layout) -> dict[str, str]:
    """A text for each buffer that has changed, by its name."""
    if before == now:
        return {}
    known = {name: _form(dtype, shape) for name, dtype, shape in before or ()}
    there = {name: _form(dtype, shape) for name, dtype, shape in now}
    if before is None:
        return {name: f"{name} is {form}" for name, form in there.items()}
    changes = {name: f"{name} was {form} and is gone" for name, form in known.items() if name not in there}
    for name, form in there.items():
        if name not in known:
            changes[name] = f"{name} is new, {form}"
        elif form != known[name]:
            changes[name] = f"{name} was {known[name]} and is {form}"
    return changes or dict.fromkeys(list(there)[:1], "the order of the buffers is another one")


def _shown(changes: dict[str, str]) -> list[str]:
    texts = list(changes.values())
    more = len(texts) - _NAMES_SHOWN
    # The checksum of the rest still differs between two ranks.
    return texts[:_NAMES_SHOWN] + ([f"… {more} more ({_checksum(texts)})"] if more > 0 else [])


def _checksum(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
