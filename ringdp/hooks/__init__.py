"""Communication hooks, one file each, for RingDP and for torch's DDP.

torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) work with `RingDP.register_comm_hook` unchanged.
"""

from typing import TYPE_CHECKING, Any

from ringdp.hooks.allreduce import allreduce_hook
from ringdp.hooks.cast import bf16_hook, fp16_hook
from ringdp.hooks.compressed import CompressedHook, ddp_hook
from ringdp.hooks.names import parameter_names
from ringdp.hooks.noop import noop_hook

if TYPE_CHECKING:
    from ringdp.hooks.local_sgd import LocalSGD, post_local_sgd

__all__ = [
    "CompressedHook",
    "LocalSGD",
    "allreduce_hook",
    "bf16_hook",
    "ddp_hook",
    "fp16_hook",
    "noop_hook",
    "parameter_names",
    "post_local_sgd",
]


def __getattr__(name: str) -> Any:
    """torch's model averaging is loaded at its first use."""
    if name not in ("LocalSGD", "post_local_sgd"):
        raise AttributeError(f"module 'ringdp.hooks' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("ringdp.hooks.local_sgd"), name)
