"""The features of `ringdp.refusals` that a module, a communication hook or rules bring along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ringdp import hooks
from ringdp.compression import Auto
from ringdp.compression.description import describe
from ringdp.compression.rules import Rules
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.optimizer_in_backward import has_optimizers

# Hooks that treat elements one by one, and add by the group's all-reduces.
ELEMENTWISE_HOOKS = (
    *(default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook),
    *(hooks.allreduce_hook, hooks.fp16_hook, hooks.bf16_hook),
)


_POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"  # loading it takes time


def averages_elements(hook: Callable[..., Any]) -> bool:
    """Whether the hook is known to give all ranks the same mean, of each element by itself."""
    return hook in ELEMENTWISE_HOOKS or bool(getattr(hook, "per_parameter", False))


def is_repeatable(hook: Callable[..., Any]) -> bool:
    """Whether a step that is made again may call it again: it keeps nothing, or nothing but its state."""
    known = hook in ELEMENTWISE_HOOKS or getattr(hook, "__module__", "") == _POWER_SGD
    return known or bool(getattr(hook, "repeatable", False))


class OfTorch(Feature):
    """What the module, torch's arguments, a registered hook and optimizers that step during backward bring along.

    Attributes:
        hook: the name of the communication hook that the user registered.
    """

    hook = ""

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        found = {
            "delayed all-reduce": bool(ddp._delay_all_reduce_params),
            "optimizer in backward": has_optimizers(ddp._module_parameters),
            "compiled backward": bool(ddp._use_python_reducer),
        }
        features = dict.fromkeys((feature for feature, is_found in found.items() if is_found), "")
        return features | ({"any hook": self.hook} if self.hook else {})


def of_hook(hook: Callable[..., Any], state: object, group: dist.ProcessGroup) -> dict[str, str]:
    name = getattr(hook, "__qualname__", repr(hook))
    features = {"any hook": name}
    if not averages_elements(hook):
        features["mixing hook"] = name
    if not is_repeatable(hook):
        features["unrepeatable"] = name
    if _group_of(state) not in (None, group):
        features["group"] = f"of {name}"
    return features


def _group_of(state: object) -> object:
    if isinstance(state, hooks.CompressedHook):
        return state.group
    return state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)


def of_rules(rules: Rules) -> dict[str, str]:
    features = {"compression": ""} if rules.compress else {}
    for compressor in rules.compressors:
        if isinstance(compressor, Auto):
            features["auto"] = ""
        elif compressor is not None:
            if not getattr(compressor, "repeatable", True):
                features["unrepeatable"] = describe(compressor)
            if getattr(compressor, "aggregate", "owner") == "rounds" and not getattr(
                compressor, "per_parameter", False
            ):
                features["rounds compressor"] = describe(compressor)
    return features
