"""torch.nn.SyncBatchNorm for CPU tensors: batch statistics over all ranks.

torch's own layer refuses them, for want of the CUDA kernels it is built on. `RingDP` replaces the forward of the layers
it finds by the one here; all else (evaluation, other devices, no process group) stays torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ringdp.compression.parameters import clean_name
from ringdp.job.backend import named

_HALF = (torch.float16, torch.bfloat16)


class SyncBatchNorm(nn.SyncBatchNorm):
    """As `torch.nn.SyncBatchNorm`, for tensors on the CPU too.

    Ranks may have batches of different sizes, also empty ones: every element counts the same. All ranks compute the
    same running statistics to the bit. Gradients can be differentiated once.

    Raises:
        ValueError: as torch: fewer than two dimensions, no channel, one element per channel over all ranks.
    """

    ringdp_name = ""  # the layer's path in the wrapped module, for messages

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` [N, C, …] over N and what follows C, on all ranks together while training."""
        if not self.training or input.device.type != "cpu" or not dist.is_initialized():
            return super().forward(input)
        group = self.process_group or dist.group.WORLD
        if dist.get_world_size(group) == 1:
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return _Normalise.apply(
            input, self.weight, self.bias, *running, self._momentum(), self.eps, group, self._called()
        )

    def _momentum(self) -> float:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum

    def _called(self) -> str:
        return f"batch norm {self.ringdp_name}".rstrip()


def synchronise_on_cpu(module: nn.Module) -> None:
    """Let the layers of `module` that are torch's SyncBatchNorm work on the CPU: they become `SyncBatchNorm` in place.

    Users' subclasses of torch's layer stay what they are.
    """
    for name, layer in module.named_modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm
        if type(layer) is SyncBatchNorm:
            layer.ringdp_name = clean_name(name)


class _Normalise(torch.autograd.Function):
    """Normalisation by the statistics of all ranks (Ioffe and Szegedy 2015, section 3, with the batch of all ranks)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        group: dist.ProcessGroup,
        name: str,
    ) -> Tensor:
        count, mean, var = _statistics_of_all(input, group, name)
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got 1 over all ranks ({name})")
        if running_mean is not None and running_var is not None and count > 0:
            running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(var, alpha=momentum * count / (count - 1))
        ctx.save_for_backward(input, weight, mean, var)
        ctx.settings = (count, eps, group, name)
        return _scaled(input, mean, var, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var = ctx.saved_tensors
        count, eps, group, name = ctx.settings
        gradient = gradient.to(mean.dtype)
        normal = _scaled(input.to(mean.dtype), mean, var, None, None, eps)
        channels = mean.numel()
        dims = _all_but_channels(input)
        sums = torch.cat([gradient.sum(dims), (gradient * normal).sum(dims)])
        for_bias, for_weight = sums.clone().split(channels)  # this rank's: the wrapper averages them
        for_input = None
        if ctx.needs_input_grad[0]:
            with named(f"{name}, backward"):
                dist.all_reduce(sums, group=group)
            shape = [1, channels] + [1] * (input.dim() - 2)
            mean_gradient, mean_product = (sums / max(count, 1)).split(channels)
            scale = torch.rsqrt(var + eps)
            if weight is not None:
                scale = scale * weight
            for_input = normal.mul_(-mean_product.view(shape)).add_(gradient).sub_(mean_gradient.view(shape))
            for_input = for_input.mul_(scale.view(shape)).to(input.dtype)
        wanted = ctx.needs_input_grad
        return (
            for_input,
            for_weight.to(weight.dtype) if wanted[1] else None,
            for_bias.to(weight.dtype if weight is not None else mean.dtype) if wanted[2] else None,
            *[None] * 6,
        )


def _statistics_of_all(input: Tensor, group: dist.ProcessGroup, name: str) -> tuple[int, Tensor, Tensor]:
    """Elements per channel, mean [C] and biased variance [C] over all ranks; float32, or float64 for such inputs.

    Ranks exchange count, mean and sum of squared deviations, which add up without cancellation (Chan, Golub and LeVeque
    1979, "Updating formulae and a pairwise algorithm for computing sample variances").
    """
    channels = input.shape[1]
    wide = torch.float32 if input.dtype in _HALF else input.dtype
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device="cpu")
    if input.numel() > 0:
        dims = _all_but_channels(input)
        var, mean = torch.var_mean(input.to(wide), dims, correction=0)
        count = input.numel() // channels
        mine[0] = count
        mine[1 : channels + 1] = mean
        mine[channels + 1 :] = var.double() * count
    ranks = dist.get_world_size(group)
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    with named(name):
        dist.all_gather(gathered, mine, group=group)
    table = torch.stack(gathered)
    counts, means, squares = table[:, :1], table[:, 1 : channels + 1], table[:, channels + 1 :]
    total = counts.sum()
    divisor = total.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    var = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / divisor
    return int(total), mean.to(wide), var.to(wide)


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _scaled(input: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if input.numel() == 0:
        return torch.empty_like(input)
    if weight is not None and weight.dtype != mean.dtype:  # a module in half precision: statistics are in float32
        weight = weight.to(mean.dtype)
    if bias is not None and bias.dtype != mean.dtype:
        bias = bias.to(mean.dtype)
    return torch.batch_norm(input, weight, bias, mean, var, False, 0.0, eps, False)
