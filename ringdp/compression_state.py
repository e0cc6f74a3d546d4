"""What compression remembers between steps, as a state dict: exact for each rank, or one that fits any number of ranks.

Exact: ``{"format", "world_size", "steps", …, "ranks": {"2": {name: entry}}}``, with this rank's entries
only, so that torch.distributed.checkpoint keeps those of all ranks apart. Consolidated: ``"parameters": {name: entry}``
in place of ``"ranks"``, the same on all ranks. An entry has ``"compressor"``, in words, ``"residual"`` (float32
[numel]) where there is error feedback, and whatever else a compressor keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.backend import named
from ringdp.compression.partition import turn_of
from ringdp.errors import InvalidArgumentError
from ringdp.exchange import device_for
from ringdp.model_compression import ModelCompression

_FORMAT = 1
Entries = dict[str, dict[str, Any]]


def state_dict(compression: ModelCompression, *, consolidated: bool) -> dict[str, Any]:
    """See `RingDP.compression_state_dict`. With `consolidated` all ranks call it."""
    if compression.auto is not None:
        compression.auto.settle()
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


def load_state_dict(compression: ModelCompression, state: Mapping[str, Any]) -> None:
    """See `RingDP.load_compression_state_dict`."""
    if state.get("format") != _FORMAT:
        raise InvalidArgumentError(
            f"this is no compression state of ringdp: its format is {state.get('format')!r}, not {_FORMAT}"
        )
    whole = "parameters" in state
    if whole:
        entries = state["parameters"]
    else:
        rank, ranks = compression.group.rank(), compression.group.size()
        if state["world_size"] != ranks:
            raise InvalidArgumentError(
                f"this compression state was saved by {state['world_size']} ranks, one part each, and there are {ranks}"
                " now: save compression_state_dict(consolidated=True), which loads at any number of ranks"
            )
        if str(rank) not in state["ranks"]:
            raise InvalidArgumentError(
                f"this compression state is of rank {', '.join(state['ranks'])}, and this is rank {rank}: each rank"
                " loads what it saved, or all of them a consolidated state"
            )
        entries = state["ranks"][str(rank)]
    if compression.auto is not None:
        compression.auto.settle()
    _load_entries(compression, entries, consolidated=whole)
    compression.resume(int(state["steps"]), int(state["exact_until"]))
    if compression.hook is not None:
        compression.hook.memory.step = int(state["compressed_steps"])


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
# owner left out of the mean. docs/wire_format.md says who owns what.
def _mean_entries(compression: ModelCompression) -> Entries:
    entries: Entries = {}
    ranks = compression.group.size()
    residuals = compression.residuals()
    missing = {
        index: torch.where(owned_by_this_rank(compression, index), residual, residual / ranks)
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


def _load_entries(compression: ModelCompression, entries: Mapping[str, Any], *, consolidated: bool) -> None:
    known = {one.name: index for index, one in enumerate(compression.parameters)}
    unknown = [name for name in entries if name not in known]
    if unknown:
        raise InvalidArgumentError(
            f"the compression state has {unknown[0]!r}, which is no parameter of this model"
            + (f", and {len(unknown) - 1} more such" if len(unknown) > 1 else "")
        )
    residuals: dict[int, Tensor] = {}
    for name, entry in entries.items():
        index = known[name]
        described = compression.describe(index)
        if entry["compressor"] != described:
            raise InvalidArgumentError(
                f"the compression state has {name!r} compressed by {entry['compressor']}, here it is {described}: build"
                " RingDP with the same compression and rules, or leave out the state"
            )
        if "residual" not in entry or not compression.in_core(index):
            continue
        residual = entry["residual"]
        numel = compression.parameters[index].parameter.numel()
        if residual.shape != (numel,):
            raise InvalidArgumentError(
                f"the compression state's residual of {name!r} has shape {list(residual.shape)}, not [{numel}]"
            )
        residual = residual.to("cpu", torch.float32, copy=True)
        residuals[index] = residual * owned_by_this_rank(compression, index) if consolidated else residual
    compression.reducer.set_residuals(residuals)
    if compression.hook is not None:
        held = {
            name: {
                path: _in_memory(compression.parameters[known[name]].parameter, value)
                for path, value in entry.items()
                if path != "compressor"
            }
            for name, entry in entries.items()
            if compression.in_hook(known[name])
        }
        compression.hook.memory.replace(held, compression.group, consolidated=consolidated)


def owned_by_this_rank(compression: ModelCompression, index: int) -> Tensor:
    """bool [numel], row by row as residuals are: the elements whose mean this rank computes."""
    from ringdp import _C

    one = compression.parameters[index]
    parameter = one.parameter
    mask = torch.zeros(parameter.numel(), dtype=torch.bool)
    turn = turn_of(one.name)
    if compression.exchanges_codes:  # every rank is a host of its own
        bounds = _C.part_bounds(parameter.numel(), compression.group.size(), turn)
        owned_here = [tuple(bounds[compression.group.rank() :][:2])]
    else:
        owned_here = _C.owned_elements(compression.group, parameter.numel(), turn)
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
