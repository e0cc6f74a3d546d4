"""Figures over all ranks: `mean`, for evaluation where every rank has seen other samples, and not equally many."""

from __future__ import annotations

import math
import numbers
import struct
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.diagnosis.records import OWN_NAMES, step_records
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_bytes, alone, device_for, require_member
from ringdp.job.elastic import as_unit

_ROOM = 256  # bytes of a rank's record: its weight, and the description of its value or its error


@overload
def mean(x: float, weight: float | Tensor = 1.0, *, group: dist.ProcessGroup | None = None) -> float: ...
@overload
def mean(x: Tensor, weight: float | Tensor = 1.0, *, group: dist.ProcessGroup | None = None) -> Tensor: ...
def mean(x: float | Tensor, weight: float | Tensor = 1.0, *, group: dist.ProcessGroup | None = None) -> float | Tensor:
    """The mean of ``x`` over all ranks, each counting ``weight`` times: sum(weight * x) / sum(weight).

    ``mean(loss, len(batch))`` is the loss per sample. Every rank of the group has to call it, one with weight 0 too;
    the ``x`` of such a rank is ignored, a NaN too. Sums are kept in float64. All ranks get the same bits.
    Without a process group, in a process that no launcher started, it is the mean over this one.

    Args:
        x: a number, or a dense tensor of any shape, the same on all ranks, on any device. Not changed; no gradient
            flows.
        weight: a number of at least 0, for example of samples, or a tensor with one element.
        group: a process group; the default group if None.

    Returns:
        A float for a number; for a tensor a new one on its device, of its dtype, integers and bool become torch's
        default dtype.

    Raises:
        InvalidArgumentError: no rank has any weight (on all ranks); or this rank's ``x`` or ``weight`` cannot be used.
        MismatchError: another rank's cannot be used, or its ``x`` has another shape; the message has both sides'.
        InvalidStateError: several ranks and no process group, or this process is not in ``group``.
    """
    if group is None and alone("ringdp.metrics.mean()"):
        value, factor = _checked(x, weight)
        return _like(x, _weighted(value, factor) / _positive(factor))
    chosen = require_member(group, "ringdp.metrics.mean")

    def mean_of_all() -> float | Tensor:
        factors = _introduce(x, weight, chosen)
        total = _positive(math.fsum(factors))
        value, factor = _checked(x, weight)
        weighted = _weighted(value, factor).to(device_for(chosen, value.device))
        dist.all_reduce(weighted, group=chosen)
        return _like(x, weighted / total)

    with named("ringdp.metrics.mean"):
        return as_unit(chosen, "ringdp.metrics.mean", mean_of_all)


def log(**values: float | Tensor) -> None:
    """Write these numbers with the metrics of the current step, where metrics are written (``ringrun --metrics-dir``).

    ``log(loss=loss)`` after the step's forward; without metrics it does nothing. A tensor has one element; it is read
    later, so that no step waits for a device.

    Raises:
        InvalidArgumentError: a value is not a number or a tensor of one element, or the metrics have that name already.
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            fits = value.numel() == 1 and not value.is_complex() and not value.is_meta
        else:
            fits = isinstance(value, numbers.Real)
        if not fits:
            raise InvalidArgumentError(
                f"ringdp.metrics.log: {name} must be a number or a tensor with one, not {value!r}"
            )
        if name in OWN_NAMES:
            raise InvalidArgumentError(f"ringdp.metrics.log: {name} is a metric already: choose another name")
    records = step_records()
    if records is not None:
        records.log({name: _kept(value) for name, value in values.items()})


def _kept(value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        value = value.detach()
        return float(value) if value.device.type == "cpu" else value.clone()
    try:
        return float(value)
    except OverflowError:  # of a whole number
        return math.inf if value > 0 else -math.inf


def _introduce(x: float | Tensor, weight: float | Tensor, group: dist.ProcessGroup) -> list[float]:
    """Every rank's weight. Raises on all ranks where one cannot be used or the shapes differ."""
    refusal: InvalidArgumentError | None = None
    try:
        value, factor = _checked(x, weight)
        mine = struct.pack("<?d", True, factor) + f"{list(value.shape)}".encode()[: _ROOM - 9]
    except InvalidArgumentError as error:
        refusal = error
        mine = struct.pack("<?d", False, 0.0) + str(error).encode()[: _ROOM - 9]
    gathered = all_gather_bytes(mine, group, room=_ROOM)
    if refusal is not None:
        raise refusal
    usable = [struct.unpack("<?d", line[:9]) for line in gathered]
    texts = [line[9:].decode(errors="replace") for line in gathered]
    for rank, (fits, _) in enumerate(usable):
        if not fits:
            raise MismatchError(f"rank {rank} called with an invalid argument: {texts[rank]}", peer=rank)
    for rank, shape in enumerate(texts):
        if shape != texts[0]:
            raise MismatchError(
                f"ringdp.metrics.mean: x has shape {texts[0]} on rank 0 and {shape} on rank {rank}: the shapes must"
                " be the same on all ranks",
                peer=rank,
            )
    return [factor for _, factor in usable]


def _checked(x: float | Tensor, weight: float | Tensor) -> tuple[Tensor, float]:
    """``x`` as a float64 tensor and the weight as a number."""
    if isinstance(x, Tensor):
        if x.is_complex() or x.is_quantized or x.layout is not torch.strided or hasattr(x, "full_tensor"):
            kind = type(x).__name__ if hasattr(x, "full_tensor") else f"{x.dtype}, {x.layout}"
            raise InvalidArgumentError(f"ringdp.metrics.mean: x must be a dense tensor of real numbers, not {kind}")
        value = x.detach()
    elif isinstance(x, numbers.Real):
        value = torch.tensor(float(x), dtype=torch.float64, device="cpu")
    else:
        raise InvalidArgumentError(f"ringdp.metrics.mean: x must be a number or a tensor, not {type(x).__name__}")
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise InvalidArgumentError(
                f"ringdp.metrics.mean: weight must be one number, not a tensor of shape {list(weight.shape)} and"
                f" {weight.dtype}"
            )
        weight = weight.item()
    if not isinstance(weight, numbers.Real):
        raise InvalidArgumentError(f"ringdp.metrics.mean: weight must be a number, not {type(weight).__name__}")
    factor = float(weight)
    if not (math.isfinite(factor) and factor >= 0):
        raise InvalidArgumentError(f"ringdp.metrics.mean: weight must be a finite number of at least 0, not {factor}")
    return value, factor


def _weighted(value: Tensor, factor: float) -> Tensor:
    value = value.to(torch.float64)
    return value * factor if factor > 0 else torch.zeros_like(value)


def _positive(total: float) -> float:
    if total > 0:
        return total
    raise InvalidArgumentError(
        "ringdp.metrics.mean: the weights of all ranks add up to 0, so there is nothing to take the mean of: was the"
        " data empty?"
    )


def _like(x: float | Tensor, result: Tensor) -> float | Tensor:
    if not isinstance(x, Tensor):
        return float(result)
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return result.to(x.device, dtype)
