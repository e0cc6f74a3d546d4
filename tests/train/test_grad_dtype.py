"""Gradients of another type than their parameters (`Tensor.grad_dtype`): averaged in it, whatever else is asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ringdp.ddp.batch_weight import BatchWeight
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from tests.fault.elastic_jobs import joined
from tests.train.harness import on_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and later have it")

BF16, F32 = torch.bfloat16, torch.float32
# Shape, type, type of the gradient; the second is reduced in place as it has 4 MiB.
KINDS = [((40, 3), BF16, F32), ((1 << 20,), BF16, F32), ((7,), BF16, BF16), ((9, 2), F32, BF16), ((5,), F32, F32)]
EXACT: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False},
    {"hook": True},
    {"reduce_dtype": torch.float64},
    {"reproducible": True},
    {"weight": "call"},
    {"find_unused_parameters": True},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape, dtype, _ in KINDS)
        for part, (_, _, gradient) in zip(self.parts, KINDS, strict=True):
            part.grad_dtype = gradient

    def forward(self, factor: float, skipped: int = -1) -> Tensor:
        return torch.stack([(p.float() * factor).sum() for i, p in enumerate(self.parts) if i != skipped]).sum()


def step(model: RingDP, micros: int = 1, skipped: int = -1) -> list[Tensor]:
    """Gradients are 256 on rank 0 and 1 on rank 1, of which bfloat16 has no exact mean."""
    model.zero_grad()
    for micro in range(micros):
        with contextlib.nullcontext() if micro == micros - 1 else model.no_sync():
            if model.ringdp_features[BatchWeight].mode is not None:
                model.set_weight(1)
            model(256.0 if dist.get_rank() == 0 else 1.0, skipped).backward()
    return [part.grad for part in model.parameters() if part.grad is not None]


def of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def check(gradients: list[Tensor], mean: float, *, rtol: float = 0.0) -> None:
    assert [one.dtype for one in gradients] == [gradient for _, _, gradient in KINDS]
    for one in gradients:
        torch.testing.assert_close(
            one.float(), torch.full(one.shape, mean), rtol=2**-7 if one.dtype == BF16 else rtol, atol=0
        )


def averages(options: dict[str, Any]) -> None:
    options = dict(options)
    hooked = options.pop("hook", False)
    model = RingDP(Net(), **options)
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    for _ in range(2):
        check(step(model), 128.5)
    check(step(model, micros=3), 128.5 if "weight" in options else 3 * 128.5)
    if "find_unused_parameters" in options:
        one = step(model, skipped=0 if dist.get_rank() == 1 else -1)
        assert one[0].dtype == F32
        assert (one[0] == 128).all()


@on_ranks()
def test_exact_means() -> None:
    for options in EXACT:
        averages(options)


@on_ranks()
def test_compressed_means() -> None:
    for compression in ("int8", "bf16", "topk"):
        model = RingDP(Net(), compression=compression)
        for _ in range(3):
            gradients = step(model)
            assert [one.dtype for one in gradients] == [gradient for _, _, gradient in KINDS]
            if compression != "topk":
                check(gradients, 128.5, rtol=0.02)


@on_ranks(backend=None)
def test_in_an_elastic_job(tmp_path: Path) -> None:
    with joined(str(tmp_path), elastic=True):
        averages({})


@on_ranks()
def test_set_after_wrapping() -> None:
    net = nn.Linear(8, 4).to(BF16)
    model = RingDP(net)
    for dtype in (BF16, F32, BF16):
        model.zero_grad()
        for part in net.parameters():
            part.grad_dtype = dtype
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 8, dtype=BF16)).sum().backward()
            assert {of(part).dtype for part in net.parameters()} == {dtype}
    with model.no_sync():  # a gradient that was left over when its parameter is frozen
        model.zero_grad()
        net.bias.grad_dtype = F32
        model(torch.full((1, 8), 2.0 + dist.get_rank(), dtype=BF16)).sum().backward()
    net.bias.requires_grad_(False)
    model(torch.ones(1, 8, dtype=BF16)).sum().backward()
    assert of(net.bias).dtype == F32


@on_ranks()
def test_set_in_a_step() -> None:
    net = nn.Linear(8, 4).to(BF16)
    model = RingDP(net)
    loss = model(torch.ones(1, 8, dtype=BF16)).sum()
    for part in net.parameters():
        part.grad_dtype = F32
    with pytest.raises(InvalidStateError) as caught:
        loss.backward()
    assert caught.value.name is not None


@on_ranks()
def test_of_any_type() -> None:
    net = nn.Linear(8, 4)
    net.bias.grad_dtype = None
    with pytest.raises(InvalidArgumentError) as caught:
        RingDP(net)
    assert caught.value.name == "bias"
    net.bias.grad_dtype = F32
    model = RingDP(net)
    model(torch.ones(1, 8)).sum().backward()
    model.zero_grad()
    net.bias.grad_dtype = None
    with pytest.raises(InvalidArgumentError) as caught:
        model(torch.ones(1, 8))
    assert caught.value.name == "bias"


@on_ranks()
def test_of_one_rank() -> None:
    net = nn.Linear(8, 4).to(BF16)
    if dist.get_rank() == 1:
        net.bias.grad_dtype = F32
    with pytest.raises(MismatchError, match="bias"):
        RingDP(net)


@on_ranks(backend="gloo")
def test_sparse_gradients() -> None:
    net = nn.Embedding(10, 3, sparse=True).to(BF16)
    net.weight.grad_dtype = F32
    model = RingDP(net)
    for _ in range(2):
        model.zero_grad()
        (model(torch.tensor([1])) * (256 if dist.get_rank() == 0 else 1)).sum().backward()
        assert of(net.weight).dtype == F32
        assert (of(net.weight).to_dense()[1] == 128.5).all()
