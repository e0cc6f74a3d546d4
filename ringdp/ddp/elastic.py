"""RingDP in an elastic job (``ringrun --elastic``): operations that it repeats without a lost rank, and features that
it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringdp import config
from ringdp.compression import Auto, Rules
from ringdp.compression.description import describe
from ringdp.ddp.optimizer_in_backward import has_optimizers
from ringdp.ddp.reproducible import ELEMENTWISE_HOOKS
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import as_unit, is_elastic
from ringdp.job.elastic import refuse as refuse


def steps_are_repaired(wrapper: Any) -> bool:
    """Whether the wrapper's group goes on without lost ranks.

    Raises:
        InvalidArgumentError: the job is elastic, and this wrapper's group is not, or has no such group.
    """
    group = wrapper.process_group
    if backend_of(group, wrapper.device_type) == BACKEND and is_elastic(group):
        return True
    if config.elastic() and dist.get_world_size() > 1:
        raise InvalidArgumentError(
            "RINGDP_ELASTIC=1: RingDP needs the default process group on the CPU, made by ringdp.init(): no other"
            " group goes on without a lost rank"
        )
    return False


def refuse_what_cannot_be_repaired(wrapper: Any) -> None:
    """Raise InvalidArgumentError where a step of this wrapper cannot be repeated; the same on all ranks."""
    reasons = {
        "mixed_precision": wrapper._precision is not None,
        "an optimizer that steps during backward": has_optimizers(wrapper._module_parameters),
        "skip_all_reduce_unused_params=True": wrapper.skip_all_reduce_unused_params,
        "delay_all_reduce_named_params": bool(getattr(wrapper, "_delay_all_reduce_params", None)),
        "guard_every (without it parameters are compared within 500 steps)": bool(wrapper._guard_options.every),
        "a module with sparse gradients": any(
            getattr(layer, "sparse", False)
            for layer in wrapper.module.modules()
            if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag)
        ),
        "a module of DTensor parameters": wrapper._sharded is not None,
        "a backward that is compiled as one graph": bool(wrapper._use_python_reducer),
    }
    for what, found in reasons.items():
        if found:
            refuse(what)


def refuse_hook(group: dist.ProcessGroup, state: object, hook: Callable[..., Any]) -> None:
    """Raise InvalidArgumentError but for hooks whose one operation on the group can be called again."""
    name = getattr(hook, "__qualname__", repr(hook))
    if not any(hook is known for known in ELEMENTWISE_HOOKS):
        known = ", ".join(dict.fromkeys(one.__qualname__ for one in ELEMENTWISE_HOOKS))
        refuse(f"the communication hook {name}, which may keep state or overwrite a bucket,", but=known)
    if state is not None and state is not group:
        refuse(f"the communication hook {name} over another group than the model's")


def refuse_rules(rules: Rules) -> None:
    """Raise InvalidArgumentError where a compressor is not one of the core's codecs."""
    for compressor in (rules.compression, *(compressor for _, compressor in rules.pairs)):
        if compressor is not None and not isinstance(compressor, Auto) and getattr(compressor, "native", None) is None:
            what = f"compression by {describe(compressor)}, which runs in Python,"
            refuse(what, but="the core's codecs, as int8 and int4")


def broadcast_in_unit(group: dist.ProcessGroup, what: str, tensors: list[torch.Tensor], broadcast: Any) -> None:
    """`broadcast()` writes rank 0's values into these; made again, the new rank 0 sends those that it had before."""
    before = [tensor.detach().clone() for tensor in tensors] if is_elastic(group) else []
    first = True

    def body() -> None:
        nonlocal first
        if not first:
            with torch.no_grad():
                for tensor, kept in zip(tensors, before, strict=True):
                    tensor.copy_(kept)
        first = False
        broadcast()

    as_unit(group, what, body)
