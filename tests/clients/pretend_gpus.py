"""Tests that ask for one GPU per rank, run on CPU tensors: what they check of DDP has nothing to do with the GPU.

Most of PyTorch's DDP tests move their modules to ``cuda(rank)`` and are skipped where there are fewer GPUs than ranks.
Here every device that they name is the CPU, ``device_ids`` is dropped, and the decorators that skip let them run. What
really needs a GPU (streams, events, SyncBatchNorm's kernels) fails for DDP, too, and is then not compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Every torch function that is told a GPU (a number, a name, a device) uses the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and args and _is_gpu(args[0]):
            return _CPU
        if func is torch.Tensor.get_device:
            return -1
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], _CPU, *args[2:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def _is_gpu(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int


def pretend_gpus() -> None:
    """For the rest of this process and those that it forks, on the calling thread."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_distributed, common_utils

    from ringdp.ddp.wrapper import RingDP

    _OnCpu().__enter__()
    common_distributed.TIMEOUT_OVERRIDE.clear()  # minutes for tests that fail by hanging
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, _taking_arguments)
    common_distributed.skip_if_no_gpu = _unchanged
    common_utils.skip_but_pass_in_sandcastle_if = _skip_for_other_reasons(common_utils.skip_but_pass_in_sandcastle_if)
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.device = lambda *args: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 8
    nn.Module.cuda = lambda self, *args: self  # type: ignore[method-assign]
    nn.Module.to = _without_gpu(nn.Module.to)  # type: ignore[method-assign]
    for kind in (DistributedDataParallel, RingDP):
        kind.__init__ = _without_device_ids(kind.__init__)  # type: ignore[method-assign]


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _taking_arguments(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    return _unchanged


def _skip_for_other_reasons(skip_if: Callable[..., Any]) -> Callable[..., Any]:
    def skip(condition: bool, reason: str) -> Any:
        return _unchanged if "CUDA" in reason or "GPU" in reason else skip_if(condition, reason)

    return skip


def _without_gpu(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(_CPU if _is_gpu(one) else one for one in args)
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        out: nn.Module = move(module, *args, **kwargs)
        return out

    return moved


def _without_device_ids(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def constructed(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        construct(self, module, *(None for _ in args[:2]), *args[2:], **kwargs)

    return constructed
