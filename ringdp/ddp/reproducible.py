"""RingDP(reproducible=True): the bits of an element's mean depend on the ranks' gradients of that element alone.

The group's all-reduces add in rank order (``_C.add_in_rank_order``); hooks and compressors that read whole buckets are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ringdp import hooks
from ringdp.compression import Auto, Rules
from ringdp.compression.description import describe
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND, backend_of

# Hooks that treat elements one by one, and add by the group's all-reduces.
ELEMENTWISE_HOOKS = (
    *(default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook),
    *(hooks.allreduce_hook, hooks.fp16_hook, hooks.bf16_hook),
)


def checked(value: Any) -> bool:
    """RingDP's argument ``reproducible``.

    Raises:
        InvalidArgumentError: neither True nor False.
    """
    if isinstance(value, bool):
        return value
    raise InvalidArgumentError(f"RingDP's reproducible must be True or False, not {value!r}")


def add_in_rank_order(group: dist.ProcessGroup, device_type: str) -> None:
    """Let all-reduces of the group add in rank order from now on. All ranks call it between the same two operations.

    Raises:
        InvalidArgumentError: the backend for this kind of device has an order of its own.
    """
    from ringdp import _C

    refuse_backend(group, device_type)
    _C.add_in_rank_order(group)


def refuse_backend(group: dist.ProcessGroup, device_type: str) -> None:
    """Raise InvalidArgumentError where another backend than ring moves tensors on this kind of device."""
    backend = backend_of(group, device_type)
    if backend != BACKEND:
        raise InvalidArgumentError(
            f"reproducible=True needs the backend ring, which adds in rank order; this process group uses {backend} for"
            f" tensors on {device_type}: make a group on ring"
        )


def refuse_rules(rules: Rules) -> None:
    """Raise InvalidArgumentError where the code of an element depends on its bucket, or on what is measured."""
    for compressor in (rules.compression, *(compressor for _, compressor in rules.pairs)):
        if isinstance(compressor, Auto):
            raise InvalidArgumentError(
                'reproducible=True and compression="auto" cannot be combined: "auto" chooses by measured speeds. Name a'
                " compressor"
            )
        if getattr(compressor, "aggregate", "owner") == "rounds" and not getattr(compressor, "per_parameter", False):
            raise InvalidArgumentError(
                f"reproducible=True and {describe(compressor)} cannot be combined: its `average` may mix the parameters"
                " of a bucket. If it does not, set per_parameter = True in the class"
            )


def averages_elements(hook: Callable[..., Any]) -> bool:
    """Whether the hook is known to give all ranks the same mean, of each element by itself."""
    return hook in ELEMENTWISE_HOOKS or bool(getattr(hook, "per_parameter", False))


def refuse_hook(hook: Callable[..., Any]) -> None:
    """Raise InvalidArgumentError where the hook is not known to treat elements one by one."""
    if averages_elements(hook):
        return
    name = getattr(hook, "__qualname__", repr(hook))
    raise InvalidArgumentError(
        f"reproducible=True and the communication hook {name} cannot be combined: it may mix the parameters of a"
        f" bucket. If it does not, set {name}.per_parameter = True"
    )
