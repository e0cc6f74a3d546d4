"""What the tests of compressing hooks share: a model with parameters of all kinds, compressors, what a rank returns."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.compression import (
    DGC,
    EF21,
    ErrorFeedback,
    Info,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    SignSGD,
    Sparse2,
    TopK,
)
from ringdp.compression.description import describe


def build(seed: int = 0) -> nn.Module:
    """Parameters of 5,000 and 2,400 elements, one of 320 (exact), biases; buckets of 4 KiB hold several."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 24), nn.LayerNorm(24), nn.Linear(24, 10))


def loss_of(model: nn.Module, step: int, rank: int, *, overflow: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 50, generator=generator), torch.randint(0, 10, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x), y)
    return loss * torch.inf if overflow else loss


def digest(tensors: Any) -> str:
    """Of their bits; NaN is NaN, whichever bits it has."""
    it = hashlib.sha256()
    for tensor in tensors:
        it.update(tensor.detach().nan_to_num(nan=1e38).contiguous().numpy().tobytes())
    return it.hexdigest()


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.004)


def average_exactly(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    summed = {name: it.clone() for name, it in gradients.items()}
    for it in summed.values():
        dist.all_reduce(it)
    return {name: it / dist.get_world_size() for name, it in summed.items()}


def compressor_id(compressor: Any) -> str:
    """For a parameter of a test: without addresses, so that processes side by side collect the same tests."""
    return compressor if isinstance(compressor, str) else describe(compressor)


class Steps:
    """A user's own, without a word more than needed: 8 bits with one scale, which cannot carry NaN."""

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        scale = (x.abs().max() / 127).clamp_min(1e-38).reshape(1)
        return (x / scale).round().to(torch.int8), scale

    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        return payload[0].float() * payload[1]


class Gathered(Steps):
    aggregate = "gather"


class Large:
    """Elements above twice the mean: payloads differ in size. With error feedback."""

    fixed_size = False
    error_feedback = True

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        index = (x.abs() > 2 * x.abs().mean()).nonzero().view(-1)
        return index.int(), x[index]

    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        return torch.zeros(info.numel).index_put((payload[0].long(),), payload[1])


class LargeGathered(Large):
    aggregate = "gather"


class Folded:
    """Linear: pairs of elements by their sum; the payloads of ranks add up."""

    aggregate = "sum"
    error_feedback = True

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return (torch.nn.functional.pad(x, (0, x.numel() % 2)).view(-1, 2).sum(1),)

    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        return (payload[0] / 2).repeat_interleave(2)[: info.numel]


class Rounded:
    """Linear, and exact in any order: whole numbers, which cannot carry NaN."""

    aggregate = "sum"

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return ((x * 2**20).round().to(torch.int32),)

    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        return payload[0].float() / 2**20


class Random:
    """Stochastic rounding by the private generator, signs turned by the shared one; counts its calls."""

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        info.state["calls"] = info.state.get("calls", 0) + 1
        scale = (x.abs().max() / 100).clamp_min(1e-38).reshape(1)
        dither = torch.rand(x.shape, generator=info.private_generator)
        return (x / scale * self.signs(info) + dither).floor().to(torch.int8), scale

    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        return payload[0].float() * payload[1] * self.signs(info)

    @staticmethod
    def signs(info: Info) -> Tensor:
        return torch.randint(0, 2, (info.numel,), generator=info.generator) * 2.0 - 1


COMPRESSORS: dict[str, Any] = {
    "int8": Int8(),
    "int8 fed back": Int8(error_feedback=True),
    "int4": Int4(),
    "int4 EF21": Int4(error_feedback=EF21()),
    "int8 block 100": Int8(block=100),
    "int8 rotated": Int8(rotate=True, error_feedback=True),
    "steps": Steps(),
    "gathered": Gathered(),
    "large": Large(),
    "large gathered": LargeGathered(),
    "folded": Folded(),
    "rounded": Rounded(),
    "random": Random(),
    "sign": Sign(),
    "random k": RandomK(0.1),
    "low rank": PowerSGD(2),
    "votes": SignSGD(),
    "top k": TopK(0.05),
    "sparse2": Sparse2(0.05, error_feedback=ErrorFeedback(0.9)),
    "top k with momentum": TopK(0.1, error_feedback=DGC(0.9, clip=10.0)),
}
ROUNDED_BY_THE_BACKEND = ("folded", "random k", "low rank")  # sums of floats, in whatever order


class Shrinking(Steps):
    """Breaks its promise."""

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        codes, scale = super().compress(x, info)
        return codes[: -1 if bool(x.any()) else None], scale


class Raising(Steps):
    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        if bool(x.any()):
            raise ZeroDivisionError("nothing to divide by")
        return super().compress(x, info)


class Swelling(Large):
    """Gives a hundred times what it was asked for."""

    error_feedback = False

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return super().compress(x.repeat(100) if bool(x.any()) else x, info)
