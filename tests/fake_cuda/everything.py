"""Runs a test that was written for the CPU on the device, the fake one or a real one (RINGDP_TEST_DEVICE=cuda): what it
makes without naming a device is made there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

PLACE = "cuda"
FILLS = re.compile("(uniform|normal|bernoulli|random|exponential)_$")  # with random numbers
READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__reduce_ex__}


def moved(value: Any, place: str) -> Any:
    """The same with each tensor at that place, except numbers, which kernels take from the CPU as well."""
    if isinstance(value, Tensor):
        if value.device.type == place or value.device.type == "meta" or (place == PLACE and value.dim() == 0):
            return value
        return value.detach().to(place).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: moved(one, place) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(one, place) for one in value)
    return value


def places(value: Any) -> set[str]:
    if isinstance(value, Tensor):
        return {value.device.type} if value.dim() else set()
    if isinstance(value, (list, tuple)):
        return {place for one in value for place in places(one)}
    return set()


class OnTheDevice(TorchFunctionMode):
    """Random numbers are drawn on the CPU, so that they are those of the same test without the device."""

    def __torch_function__(
        self, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            wants_gradient = kwargs.pop("requires_grad", False)
            return func(*args, **kwargs).to(PLACE).requires_grad_(wants_gradient)
        filled = args[0] if args else kwargs.get("tensor")
        if FILLS.search(func.__name__) and isinstance(filled, Tensor) and filled.is_cuda:
            numbers = filled.detach().cpu()
            func(numbers, *args[1:], **{name: value for name, value in kwargs.items() if name != "tensor"})
            with torch.no_grad():
                return filled.copy_(numbers)
        if func in READS:
            return func(moved(args[0], "cpu"), *args[1:], **kwargs)
        if func is not Tensor.copy_ and places(args) == {"cpu", PLACE}:
            args = moved(args, PLACE)
        return func(*args, **kwargs)


def on_the_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        torch.backends.cudnn.allow_tf32 = False  # comparisons are made for float32, in one order
        torch.backends.cudnn.deterministic = True
        with OnTheDevice():
            result = function(*moved(args, PLACE), **moved(kwargs, PLACE))
        torch.cuda.synchronize()
        return moved(result, "cpu")

    return run
