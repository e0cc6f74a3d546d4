"""RingDP's mixed_precision: forward and backward in a lower precision, parameters and gradients kept in full.

DistributedDataParallel replaces every parameter's data until its gradient is reduced. Here the module computes with
copies that are part of the graph: a parameter's gradient arrives in full precision, is accumulated in it, and nothing
has to be put back after backward. What is sent between the ranks is in the reduction's precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import distributed

from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.hooks.average import all_reduce_mean


class MixedPrecision(Feature):
    """RingDP's argument ``mixed_precision``.

    Args:
        precision: torch's ``_MixedPrecision``, or None. Without reduce_dtype the reduction has param_dtype.
    """

    def __init__(self, precision: Any) -> None:
        self._precision = precision
        self._sends_as: torch.dtype | None = precision and (precision.reduce_dtype or precision.param_dtype)

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        found = {"mixed_precision": self._precision, "low precision": self._sends_as}
        return {feature: "" for feature, given in found.items() if given is not None}

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        if self._sends_as is not None:
            ddp.reducer.register_comm_hook(None, reduction_hook(ddp, self._sends_as))

    def start(self, ddp: FeaturedDDP) -> None:
        """Cast the module's buffers, and its parameters whenever it is called. Once, when the wrapper has been made:
        torch's constructor is not to know of the argument."""
        precision = self._precision
        if precision is None:
            return
        ddp.mixed_precision = precision
        if precision.buffer_dtype is not None:
            for buffer in ddp.module.buffers():
                if _is_cast(buffer):
                    buffer.data = buffer.to(precision.buffer_dtype)
        if precision.param_dtype is not None:
            for parameter in ddp.module.parameters():
                if _is_cast(parameter):  # DDP's names for the two; here one is empty and the other the parameter itself
                    parameter._mp_param = parameter.new_empty(0, dtype=precision.param_dtype)
                    parameter._fp_param = parameter.data
            _LowPrecisionLayers(precision.param_dtype).attach(ddp.module)


class _LowPrecisionLayers:
    """Forward hooks that let a wrapper's layers compute with copies of their parameters.

    They act on the outermost call of a layer: the wrapper's own, and those that activation checkpointing repeats during
    backward. A layer that is called in any other way computes in full precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._outermost: nn.Module | None = None
        self._kept: list[tuple[nn.Module, str, nn.Parameter]] = []

    def attach(self, module: nn.Module) -> None:
        for layer in module.modules():
            layer.register_forward_pre_hook(self.before)
            layer.register_forward_hook(self.after, always_call=True)

    def before(self, layer: nn.Module, inputs: Any) -> None:
        if self._outermost is not None or not (_called_by_wrapper(layer) or in_backward()):
            return
        self._outermost = layer
        copies: dict[nn.Parameter, Tensor] = {}  # tied weights stay tied
        for part in layer.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or not _is_cast(parameter):
                    continue
                if parameter not in copies:
                    copies[parameter] = parameter.to(self._dtype)
                self._kept.append((part, name, parameter))
                part._parameters[name] = copies[parameter]  # type: ignore[assignment]
            _refresh_flat_weights(part)

    def after(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if layer is not self._outermost:
            return
        for part, name, parameter in self._kept:
            part._parameters[name] = parameter
        for part in layer.modules():
            _refresh_flat_weights(part)
        self._outermost = None
        self._kept = []


def reduction_hook(
    wrapper: distributed.DistributedDataParallel, dtype: torch.dtype
) -> Callable[[object, GradBucket], torch.futures.Future[Tensor]]:
    """The communication hook that averages in that type."""
    wrapper_alive = weakref.ref(wrapper)

    def reduce_in_low_precision(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        alive = wrapper_alive()
        assert alive is not None, "a wrapper's bucket outlived it"
        own = bucket.buffer().dtype
        return all_reduce_mean(bucket.buffer().to(dtype), alive.process_group, lambda mean: mean.to(own))

    return reduce_in_low_precision


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not getattr(tensor, "_ddp_ignored", False)


def _called_by_wrapper(layer: nn.Module) -> bool:
    active = distributed.DistributedDataParallel._active_ddp_module
    return active is not None and active.module is layer


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _refresh_flat_weights(layer: nn.Module) -> None:
    if isinstance(layer, nn.RNNBase):  # it keeps its parameters in a list, too
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
