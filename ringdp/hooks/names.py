"""Which parameters are in a bucket, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import GradBucket

_ATTRIBUTE = "_ringdp_name"


def parameter_names(bucket: GradBucket) -> list[str]:
    """The names of the bucket's parameters as the wrapped module has them, in the order of ``bucket.gradients()``.

    State that outlives a step (residuals, factors) belongs to these names: buckets are laid out anew after the first
    backward. Only for buckets that a `RingDP` gave to its hook.
    """
    return [str(getattr(parameter, _ATTRIBUTE)) for parameter in bucket.parameters()]


def remember_names(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Let `parameter_names` find the names; a parameter that two wrappers share answers with the later one's."""
    for parameter, name in zip(parameters, names, strict=True):
        setattr(parameter, _ATTRIBUTE, name)


def name_of(parameter: torch.Tensor) -> str | None:
    """The parameter's name in the module that a `RingDP` wraps; None for others."""
    name = getattr(parameter, _ATTRIBUTE, None)
    return None if name is None else str(name)
