"""The memory that is kept for gradients on the CPU (ringdp/csrc/torch/device/gradient_pool.h), seen from Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ringdp import config, values


class GradientMemory(NamedTuple):
    """The state of this process's pool for gradients, from `gradient_memory`.

    Attributes:
        installed: whether large allocations of backwards reach the pool; False before the first RingDP that wants it,
            and where another library has replaced torch's CPU allocator.
        bytes_in_use: of tensors that lie in the pool, each rounded up to 4 KiB.
        bytes_idle: what the pool holds beside that, for the next backward.
    """

    installed: bool
    bytes_in_use: int
    bytes_idle: int


def gradient_memory() -> GradientMemory:
    """What this process's pool for gradients on the CPU holds; see ``gradient_pool`` of `RingDP`. Any thread."""
    from ringdp import _C

    return GradientMemory(*_C.gradient_memory())


def allowed_pool(asked: object) -> bool:
    """Whether the argument ``gradient_pool`` and RINGDP_GRADIENT_POOL both allow the pool.

    Raises:
        InvalidArgumentError: the argument is not a bool, or the variable is neither 0 nor 1.
    """
    return values.flag("RingDP", "gradient_pool", asked) and config.gradient_pool()


def on_cpu(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any gradient of them lies on the CPU."""
    return any(one.device.type == "cpu" for one in parameters)
