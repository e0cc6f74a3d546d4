"""The start of rounds: compares the ranks' models and arguments, and gives all ranks the same parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp import refusals
from ringdp.compression.parameters import ModelParameter, model_parameters
from ringdp.compression.tensor_parts import Held, Treatment, held_by, is_dtensor
from ringdp.errors import InvalidArgumentError
from ringdp.job.agreement import checked_alike
from ringdp.job.backend import named, reaches_core
from ringdp.job.byte_collectives import device_for, require_member
from ringdp.job.elastic import as_unit, is_elastic
from ringdp.rounds.fragments import local_part
from ringdp.rounds.settings import Settings

_log = logging.getLogger("ringdp.rounds")
_COMPARING = "comparing rounds"
_COALESCED_BYTES = 250 << 20

Checked = tuple[Settings, list[ModelParameter], list[torch.optim.Optimizer]]


def checked_optimizers(
    who: str, inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Raises InvalidArgumentError."""
    optimizers = [inner] if isinstance(inner, torch.optim.Optimizer) else list(inner) if _is_list(inner) else []
    if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise InvalidArgumentError(f"{who}: inner must be an optimizer or a list of them, not {inner!r}")
    return optimizers


def _is_list(inner: object) -> bool:
    return isinstance(inner, Iterable) and not isinstance(inner, (str, bytes))


def checked_parameters(
    who: str, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: dist.ProcessGroup
) -> list[ModelParameter]:
    """Those that require grad, each once.

    Raises:
        InvalidArgumentError: there are none, an optimizer has one that the model has not, or one is spread over ranks
            of the group.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"{who}: model must be a torch.nn.Module, not {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter) or parameter.is_meta:
            raise InvalidArgumentError(
                f"{who}: parameter {name} has no values yet (it is lazy, or on the device meta): call the model once"
                " before, or its to_empty() and what initializes it",
                name=name,
            )
    ranks = set(dist.get_process_group_ranks(group))
    for tensor in held_by(model, ranks=ranks):
        if tensor.treatment is Treatment.REFUSED:
            raise InvalidArgumentError(f"{who}: {tensor.kind} {tensor.name} {tensor.why}", name=tensor.name)
    parameters = model_parameters(model)
    trained = [one for one in parameters if one.parameter.requires_grad]
    if not trained:
        raise InvalidArgumentError(f"{who}: the model has no parameters that require grad")
    known = {id(one.parameter) for one in parameters}
    for optimizer in optimizers:
        for of_group in optimizer.param_groups:
            for parameter in of_group["params"]:
                if id(parameter) not in known:
                    raise InvalidArgumentError(
                        f"{who}: {type(optimizer).__name__} has a parameter of shape {list(parameter.shape)} that is"
                        " not in the model: put it into the module"
                    )
    for one in trained:
        if is_dtensor(one.parameter):
            _check_mesh(who, one, ranks)
    return trained


def _check_mesh(who: str, one: ModelParameter, ranks: set[int]) -> None:
    mesh = one.parameter.device_mesh  # type: ignore[attr-defined]
    shared = sorted(ranks & set(mesh.mesh.flatten().tolist()))
    if len(shared) > 1:
        raise InvalidArgumentError(
            f"{who}: parameter {one.name} is a DTensor spread over ranks {', '.join(map(str, shared))}, whose parts are"
            " not to be averaged: give the process_group of the ranks that have the same part",
            name=one.name,
        )


def members_of(
    who: str, process_group: dist.ProcessGroup | None, inside: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    """The ranks that average in rounds: those of `process_group` (None: all). In an elastic job, where a rank may lose
    its counterparts, all ranks in place of one of each site: a site's parameters are equal, which `inside` keeps so."""
    group = require_member(process_group, f"ringdp.{who}")
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    alone = inside is not None and inside.size() > 1 and len(_site(group, inside)) == 1
    return world if alone and is_elastic(group) else group


def _site(group: dist.ProcessGroup, inside: dist.ProcessGroup) -> set[int]:
    return set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(inside))


def check_group(who: str, settings: Settings, group: dist.ProcessGroup, inside: dist.ProcessGroup | None) -> None:
    """Raises InvalidArgumentError where the group cannot carry codes, or has some of the ranks of `inside` beside this
    one, but not all."""
    if inside is not None and 1 < len(here := _site(group, inside)) < inside.size():
        missing = sorted(set(dist.get_process_group_ranks(inside)) - here)
        raise InvalidArgumentError(
            f"{who}: process_group has some of the ranks that the model's RingDP keeps in step, but not"
            f" {', '.join(map(str, missing))}: give it all of them, or one"
        )
    if settings.quorum is not None and inside is not None and inside.size() > 1:
        refusals.refuse("quorum", "sites")
    if settings.codec is not None and group.size() > 1 and not reaches_core(group):
        raise InvalidArgumentError(
            f"{who}: compression needs the backend ring for CPU tensors (and TORCH_DISTRIBUTED_DEBUG not DETAIL):"
            " leave compression out, or call ringdp.init()"
        )


def check_scaler(who: str, scaler: object) -> None:
    """Raises InvalidArgumentError."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgumentError(f"{who}: scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def agreed(who: str, checked: Callable[[], Checked], model: torch.nn.Module, group: dist.ProcessGroup) -> Checked:
    """The result of `checked`, where it is equal on all ranks.

    Raises:
        InvalidArgumentError: this rank's cannot be used; the others raise MismatchError with its text.
        MismatchError: another rank's cannot be used, or differ; names the first difference.
    """

    def lines(found: Checked) -> list[str]:
        settings, parameters, _ = found
        described = [f"class: {who}", *settings.lines()]
        for one in parameters:
            part = local_part(one.parameter)
            described.append(f"parameter {one.name}: {str(part.dtype).removeprefix('torch.')} {list(part.shape)}")
        trained = {id(one.parameter) for one in parameters}
        for other in _held(model, group):
            if id(other.tensor) not in trained:
                described += other.lines()
        return described

    return checked_alike(
        checked,
        lines,
        group,
        operation=_COMPARING,
        what=who,
        doing=f"make its {who}",
        words=lambda one, mine, theirs: (
            f"the ranks' {who}s differ: rank {one.rank} has {mine}, rank {one.peer} has {theirs}. Give all ranks the"
            " same model and arguments."
        ),
    )


def frozen(model: torch.nn.Module) -> list[ModelParameter]:
    return [one for one in model_parameters(model) if not one.parameter.requires_grad]


def broadcast(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """All parameters and buffers become those of the group's first rank, but for those that are left alone."""
    if group.size() == 1:
        return
    found = _held(model, group)
    left_alone = [f"{one.kind} {one.name} ({one.why})" for one in found if one.treatment is Treatment.LEFT_ALONE]
    if left_alone and group.rank() == 0:
        _log.warning("each rank keeps its own, which is neither compared nor sent: %s", ", ".join(left_alone))
    with named("rounds: parameters of rank 0"):
        _broadcast([_real(part) for one in found for _, part in one.parts if part.numel()], group)


def _held(model: torch.nn.Module, group: dist.ProcessGroup) -> list[Held]:
    return list(held_by(model, ranks=dist.get_process_group_ranks(group)))


def _broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in tensors:
        by_device.setdefault(one.device, []).append(one)
    for device, here in by_device.items():
        there = device_for(group, device)
        sent = here if there == device else [one.to(there) for one in here]
        dist._broadcast_coalesced(group, sent, _COALESCED_BYTES, 0)  # type: ignore[attr-defined]
        for one, its in zip(here, sent, strict=True):
            if one is not its:
                one.copy_(its)


def average_buffers(model: torch.nn.Module, group: dist.ProcessGroup, what: str) -> None:
    """Those of floating point that a state dict has: their mean; others there: the first rank's. `what`: a name."""
    if group.size() == 1:
        return
    listed = {id(it) for it in model.state_dict(keep_vars=True).values()}
    means: list[Tensor] = []
    first: list[Tensor] = []
    for one in _held(model, group):
        if one.kind != "buffer" or id(one.tensor) not in listed or not one.parts:
            continue
        parts = [_real(part) for _, part in one.parts if part.numel()]
        if one.treatment is Treatment.BY_PARTS:  # the mean of its parts is not its mean
            first += parts
        elif one.tensor.is_floating_point() or one.tensor.is_complex():
            means += [_real(one.tensor)] if one.parts[0][1].dtype is torch.uint8 else parts
        else:
            first += parts

    def together() -> None:
        average(means, group)
        _broadcast(first, group)

    with named(what):
        as_unit(group, what, together, writes=means + first)


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average in place, of floating point. Sums are kept in float64: values equal on all ranks stay the same to the
    bit."""
    mine = [local_part(one) for one in tensors]
    if not mine or group.size() == 1:
        return
    device = device_for(group, mine[0].device)
    together = torch.cat([one.to(device, torch.float64).flatten() for one in mine])
    dist.all_reduce(together, group=group)
    together /= group.size()
    for one, mean in zip(mine, together.split([one.numel() for one in mine]), strict=True):
        one.copy_(mean.view(one.shape))


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer.detach()) if buffer.is_complex() else buffer.detach()
