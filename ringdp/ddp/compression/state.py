"""What compression remembers between steps, as a state dict: exact for each rank, or one that fits any number of ranks.

Exact: ``{"format", "world_size", "steps", …, "ranks": {"2": {name: entry}}}``, with this rank's entries
only, so that torch.distributed.checkpoint keeps those of all ranks apart. Consolidated: ``"parameters": {name: entry}``
in place of ``"ranks"``, the same on all ranks. An entry has ``"compressor"``, in words, ``"residual"`` (float32
[numel]) where there is error feedback, and whatever else a compressor keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.exchange import saved
from ringdp.compression.partition import owner_offset_of
from ringdp.ddp.compression.plan import ModelCompression
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import device_for

_FORMAT = 1
Entries = dict[str, dict[str, Any]]


def state_dict(compression: ModelCompression, *, consolidated: bool) -> dict[str, Any]:
    """See `RingDP.compression_state_dict`. With `consolidated` all ranks call it."""
    if compression.auto is not None:
        compression.auto.return_residuals()
    state: dict[str, Any] = {
        "format": _FORMAT,
        "world_size": compression.group.size(),
        "steps": compression.steps,
        "exact_until": compression.exact_until,
        "compressed_steps": 0 if compression.hook is None else compression.hook.memory.step,
    }
    if consolidated:
        state["parameters"] = _mean_entries(compression)
    else:
        state["ranks"] = {str(compression.group.rank()): _own_entries(compression)}
    return state


@dataclasses.dataclass(frozen=True)
class CarriedState:
    """What compression remembers while a module's parameters change, on one rank.

    Attributes:
        compression: whose state it is.
        state: as `state_dict` gives it.
        shapes: of its parameters, by name.
    """

    compression: ModelCompression
    state: dict[str, Any]
    shapes: dict[str, torch.Size]

    @classmethod
    def of(cls, compression: ModelCompression) -> CarriedState:
        shapes = {one.name: one.parameter.shape for one in compression.parameters}
        return cls(compression, state_dict(compression, consolidated=False), shapes)

    def give(self, compression: ModelCompression, renamed: Mapping[str, str]) -> None:
        """To parameters of the same name, shape and compressor; `renamed` has earlier names by the new ones."""
        [(rank, entries)] = self.state["ranks"].items()
        taken: Entries = {}
        for index, one in enumerate(compression.parameters):
            name = renamed.get(one.name, one.name)
            entry = entries.get(name)
            same_shape = self.shapes.get(name) == one.parameter.shape
            if entry is not None and same_shape and entry["compressor"] == compression.describe(index):
                taken[one.name] = entry
        load_state_dict(compression, self.state | {"ranks": {rank: taken}})
        compression.set_loss_scale(self.compression.scale_of_scaler)


def load_state_dict(compression: ModelCompression, state: Mapping[str, Any]) -> None:
    """See `RingDP.load_compression_state_dict`."""
    if isinstance(state, Mapping) and state.get("format") != _FORMAT:
        raise InvalidArgumentError(
            f"not a ringdp compression state (format {state.get('format')!r}, expected {_FORMAT})"
        )
    ranks = saved.field(state, "world_size", int)
    steps, exact_until, compressed_steps = (
        saved.field(state, key, int) for key in ("steps", "exact_until", "compressed_steps")
    )
    consolidated = "parameters" in state
    entries = saved.field(state, "parameters", Mapping) if consolidated else _entries_of_rank(compression, state, ranks)
    entries, saved_as = saved.by_known_name(entries, {one.name for one in compression.parameters})
    _check(compression, entries)
    residuals = _residuals(compression, entries, {} if consolidated else saved_as, consolidated=consolidated)
    hook, checkpoint = compression.hook, None
    if hook is not None:
        rank = compression.group.rank()
        of_hook = _of_hook(compression, entries)
        checkpoint = hook.memory.read(of_hook, compressed_steps, rank, consolidated=consolidated, names_before=saved_as)
    # All of it fits.
    if compression.auto is not None:
        compression.auto.return_residuals()
    compression.reducer.set_residuals(residuals)
    if hook is not None and checkpoint is not None:
        hook.memory.take(checkpoint)
    compression.resume(steps, exact_until)


def _entries_of_rank(compression: ModelCompression, state: Mapping[str, Any], ranks: int) -> Mapping[str, Any]:
    rank, ranks_now = compression.group.rank(), compression.group.size()
    by_rank = saved.field(state, "ranks", Mapping)
    if ranks != ranks_now:
        raise InvalidArgumentError(
            f"this compression state was saved by {ranks} ranks, one part each, and there are {ranks_now} now: save"
            " compression_state_dict(consolidated=True), which loads at any number of ranks"
        )
    if str(rank) not in by_rank:
        raise InvalidArgumentError(
            f"this compression state is of rank {', '.join(map(str, by_rank))}, and this is rank {rank}: each rank"
            " loads what it saved, or all of them a consolidated state"
        )
    return saved.field(by_rank, str(rank), Mapping, "the compression state's ranks")


def _own_entries(compression: ModelCompression) -> Entries:
    entries: Entries = {}
    residuals = compression.residuals()
    for index, one in enumerate(compression.parameters):
        if compression.in_core(index):
            entries[one.name] = {"compressor": compression.describe(index)}
            if index in residuals:
                entries[one.name]["residual"] = residuals[index].clone()
    _add_hook(entries, compression, consolidated=False)
    return entries


# What the mean lacks so far: what each rank left out of its own gradient, divided by the number of ranks, and what the
# owner left out of the mean. docs/reference/wire_format.md says who owns what.
def _mean_entries(compression: ModelCompression) -> Entries:
    entries: Entries = {}
    ranks = compression.group.size()
    residuals = compression.residuals()
    missing = {
        index: torch.where(
            owned_by_this_rank(compression, index, compression.parameters[index].name), residual, residual / ranks
        )
        for index, residual in sorted(residuals.items())
    }
    if missing:
        place = device_for(compression.group, torch.device("cpu"))
        together = torch.cat(list(missing.values())).to(place)
        with named("compression state"):
            dist.all_reduce(together, group=compression.group)
        parts = together.cpu().split([len(one) for one in missing.values()])
        missing = {index: part.clone() for index, part in zip(missing, parts, strict=True)}
    for index, one in enumerate(compression.parameters):
        if compression.in_core(index):
            entries[one.name] = {"compressor": compression.describe(index)}
            if index in missing:
                entries[one.name]["residual"] = missing[index]
    _add_hook(entries, compression, consolidated=True)
    return entries


def _add_hook(entries: Entries, compression: ModelCompression, *, consolidated: bool) -> None:
    if compression.hook is None:
        return
    held = compression.hook.state_dict(consolidated=consolidated)["parameters"]
    for index, one in enumerate(compression.parameters):
        if compression.in_hook(index):
            kept = {path: _row_by_row(one.parameter, value) for path, value in held.get(one.name, {}).items()}
            entries[one.name] = {"compressor": compression.describe(index), **kept}


def _check(compression: ModelCompression, entries: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError where a parameter or its compressor is not this model's."""
    known = {one.name: index for index, one in enumerate(compression.parameters)}
    unknown = [name for name in entries if name not in known]
    if unknown:
        raise InvalidArgumentError(
            f"the compression state has {unknown[0]!r}, which is not a parameter of this model"
            + (f", and {len(unknown) - 1} more such" if len(unknown) > 1 else "")
        )
    for name in entries:
        entry = saved.field(entries, name, Mapping)
        compressor = saved.field(entry, "compressor", str, f"the compression state's entry of {name!r}")
        described = compression.describe(known[name])
        if compressor != described:
            raise InvalidArgumentError(
                f"the compression state has {name!r} compressed by {compressor}, here it is {described}: build"
                " RingDP with the same compression and rules, or leave out the state"
            )


def _residuals(
    compression: ModelCompression, entries: Mapping[str, Any], saved_as: Mapping[str, str], *, consolidated: bool
) -> dict[int, Tensor]:
    """By index, of what the core compresses. Raises InvalidArgumentError where one does not fit its parameter."""
    residuals: dict[int, Tensor] = {}
    for index, one in enumerate(compression.parameters):
        if not compression.in_core(index) or "residual" not in entries.get(one.name, ()):
            continue
        residual = entries[one.name]["residual"]
        saved.check_elements(one.name, "residual", residual, one.parameter.numel())
        residual = residual.to("cpu", copy=True)
        if one.name in saved_as:
            before, owned = (owned_by_this_rank(compression, index, name) for name in (saved_as[one.name], one.name))
            residual = saved.rescaled(residual, before, owned, compression.group.size())
        residuals[index] = residual * owned_by_this_rank(compression, index, one.name) if consolidated else residual
    return residuals


def _of_hook(compression: ModelCompression, entries: Mapping[str, Any]) -> Entries:
    """What the hook remembers, as it does: without compressors, in the order of memory."""
    return {
        one.name: {
            path: _in_memory(one.parameter, value) for path, value in entries[one.name].items() if path != "compressor"
        }
        for index, one in enumerate(compression.parameters)
        if compression.in_hook(index) and one.name in entries
    }


def owned_by_this_rank(compression: ModelCompression, index: int, name: str) -> Tensor:
    """bool [numel], row by row as residuals are: the elements whose mean this rank computes under that name."""
    from ringdp import _C

    parameter = compression.parameters[index].parameter
    mask = torch.zeros(parameter.numel(), dtype=torch.bool)
    owner_offset = owner_offset_of(name)
    if compression.exchanges_codes:  # every rank is a host of its own
        bounds = _C.part_bounds(parameter.numel(), compression.group.size(), owner_offset)
        rank = compression.group.rank()
        owned_here = [(bounds[rank], bounds[rank + 1])]
    else:
        owned_here = _C.owned_elements(compression.group, parameter.numel(), owner_offset)
    for begin, end in owned_here:
        mask[begin:end] = True
    owned: Tensor = _row_by_row(parameter, mask)
    return owned


# States are row by row. What is sent, and so what is remembered of it, has the order of the parameter's memory, which
# may be another one (channels_last).


def _row_by_row(parameter: Tensor, value: Any) -> Any:
    if not _is_flat(value, parameter) or not _is_dense(parameter):
        return value
    return value.as_strided(parameter.shape, parameter.stride()).reshape(-1)


def _in_memory(parameter: Tensor, value: Any) -> Any:
    if not _is_flat(value, parameter) or not _is_dense(parameter):
        return value
    flat = torch.empty_like(value)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(value.view(parameter.shape))
    return flat


def _is_flat(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == (parameter.numel(),)


def _is_dense(parameter: Tensor) -> bool:
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return parameter.permute(order).is_contiguous()
