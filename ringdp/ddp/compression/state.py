"""The state of a RingDP's compression between steps (`ringdp.compression.saved`): the reducer's residuals and the
hook's memory together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import saved
from ringdp.compression.partition import owner_offset_of
from ringdp.ddp.compression.plan import ModelCompression
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import device_for

Entries = dict[str, dict[str, Any]]


def state_dict(compression: ModelCompression, *, consolidated: bool) -> dict[str, Any]:
    """See `RingDP.compression_state_dict`. With `consolidated` all ranks call it."""
    if compression.auto is not None:
        compression.auto.return_residuals()
    hook, group = compression.hook, compression.group
    residuals = compression.residuals()
    if consolidated:
        residuals = _mean(compression, residuals)
    of_hook: Entries = {}
    if hook is not None:
        hook.expect_all()
        of_hook = hook.memory.entries(group, consolidated=consolidated)
    entries: Entries = {}
    for index, one in enumerate(compression.parameters):
        if compression.in_core(index):
            entries[one.name] = {"compressor": compression.describe(index)}
            if index in residuals:
                entries[one.name]["residual"] = residuals[index].clone()
        elif compression.in_hook(index):
            entries[one.name] = of_hook[one.name]
    state = saved.State(
        group.size(),
        None if consolidated else group.rank(),
        entries,
        compression.steps,
        compression.exact_until,
        0 if hook is None else hook.memory.step,
    ).as_dict()
    weights = _owner_weights(compression)
    return state | {"owner_weights": weights} if weights and not consolidated else state


@dataclasses.dataclass(frozen=True)
class CarriedState:
    """The state of compression on one rank while a module's parameters change.

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
    rank, hook = compression.group.rank(), compression.hook
    loaded = saved.State.read(state, rank, compression.group.size())
    entries = loaded.entries
    _check(compression, entries)
    _check_owners(compression, state, loaded)
    residuals = _residuals(compression, entries, consolidated=loaded.rank is None)
    checkpoint = None
    if hook is not None:
        of_hook = {
            one.name: entries[one.name]
            for index, one in enumerate(compression.parameters)
            if compression.in_hook(index) and one.name in entries
        }
        checkpoint = hook.memory.read(dataclasses.replace(loaded, entries=of_hook), rank)
    # All of it fits.
    if compression.auto is not None:
        compression.auto.return_residuals()
    compression.reducer.compression.set_residuals(residuals)
    if hook is not None and checkpoint is not None:
        hook.memory.take(checkpoint)
    compression.resume(loaded.steps, loaded.exact_until)


# The error of the mean so far: the part that each rank left out of its own gradient, divided by the number of ranks,
# and the part that the owner left out of the mean. docs/reference/wire_format.md has the owners.
def _mean(compression: ModelCompression, residuals: Mapping[int, Tensor]) -> dict[int, Tensor]:
    if not residuals:
        return {}
    shares = [
        saved.share_of_residual(
            residual,
            owned_by_this_rank(compression, index, compression.parameters[index].name),
            compression.group.size(),
        )
        for index, residual in sorted(residuals.items())
    ]
    together = torch.cat(shares).to(device_for(compression.group, torch.device("cpu")))
    with named("compression state"):
        dist.all_reduce(together, group=compression.group)
    parts = together.cpu().split([len(one) for one in shares])
    return dict(zip(sorted(residuals), parts, strict=True))


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
        saved.check_compressor(name, saved.field(entries, name, Mapping), compression.describe(known[name]))


def _owner_weights(compression: ModelCompression) -> list[int]:
    """What the ranks' hosts own by the job's map of uplinks; empty where all own alike."""
    from ringdp import _C

    return [] if compression.exchanges_codes else _C.owner_weights_of(compression.group)


def _check_owners(compression: ModelCompression, state: Mapping[str, Any], loaded: saved.State) -> None:
    """A rank's residual is of the mean where it is the owner, and else of its own gradient.

    Raises:
        InvalidArgumentError: an exact state of ranks that owned other parts.
    """
    if loaded.rank is None or not any("residual" in entry for entry in loaded.entries.values()):
        return
    then, now = list(state.get("owner_weights", [])), _owner_weights(compression)
    if then != now:
        raise InvalidArgumentError(
            f"this compression state was saved where hosts owned {_shares(then)} of a buffer, and they own"
            f" {_shares(now)} now, by the map of uplinks (RINGDP_TUNING): give the job the same map, or save the state"
            " with consolidated=True, which loads with any",
            rank=loaded.rank,
        )


def _shares(weights: Sequence[int]) -> str:
    return " : ".join(f"{weight / sum(weights):.0%}" for weight in weights) or "equal parts"


def _residuals(compression: ModelCompression, entries: Mapping[str, Any], *, consolidated: bool) -> dict[int, Tensor]:
    """By index, of what the core compresses. Raises InvalidArgumentError where one does not fit its parameter."""
    residuals: dict[int, Tensor] = {}
    for index, one in enumerate(compression.parameters):
        entry = entries.get(one.name, {})
        if not compression.in_core(index) or "residual" not in entry:
            continue
        residual = entry["residual"]
        saved.check_elements(one.name, "residual", residual, one.parameter.numel())
        residual = residual.to("cpu", copy=True)
        if consolidated:
            residual *= owned_by_this_rank(compression, index, one.name)
        residuals[index] = residual
    return residuals


def owned_by_this_rank(compression: ModelCompression, index: int, name: str) -> Tensor:
    """bool [numel], row by row as residuals are: the elements whose mean this rank computes under that name."""
    from ringdp import _C

    parameter = compression.parameters[index].parameter
    mask = torch.zeros(parameter.numel(), dtype=torch.bool, device="cpu")
    owner_offset = owner_offset_of(name)
    if compression.exchanges_codes:  # every rank is a host of its own
        bounds = _C.part_bounds(parameter.numel(), compression.group.size(), owner_offset)
        rank = compression.group.rank()
        owned_here = [(bounds[rank], bounds[rank + 1])]
    else:
        owned_here = _C.owned_elements(compression.group, parameter.numel(), owner_offset)
    for begin, end in owned_here:
        mask[begin:end] = True
    owned: Tensor = saved.row_by_row(parameter, mask)
    return owned
