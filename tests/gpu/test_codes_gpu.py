"""Codes and residuals on a GPU: the CPU's bits, with error feedback and after an overflow, and no wait for the device.

Two ranks share the GPU, and only codes cross to the host. What the exchange does on the CPU is in
tests/contract/test_c10d_compressed_all_reduce.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringdp
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.wrapper import RingDP
from tests.train.harness import default_group, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

OVERFLOW_IN = 2
STEPS = 5


def remembered(place: str, compression: str) -> dict[str, Any]:
    """Given gradients, so that only what happens to them on their way differs between devices."""
    device = torch.device(place)
    rank = dist.get_rank()
    shapes = [(300, 70), (127, 41), (1_000,)]
    module = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = module

        def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
            return sum((w * x).sum() for w, x in zip(self.weights, given, strict=True))

    model = RingDP(Model(), compression=compression, bucket_cap_mb=0.02)
    gradients = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        given = [torch.randn(shape, generator=generator) for shape in shapes]
        if step == OVERFLOW_IN and rank == 1:
            given[0][3, 5] = float("inf")
        on_device = [x.to(device) for x in given]
        model.zero_grad()
        loss = model(on_device)
        # The first backward of all ends with the order of the gradients, which is read on the host.
        forbidden = device.type == "cuda" and step > 1
        torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gradients.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    state = model.compression_state_dict()["ranks"][str(rank)]
    return {
        "gradients": gradients,
        "residuals": {name: entry.get("residual") for name, entry in state.items()},
        "finite": model.reducer.overflow.finite(),
        "in_core": all(model.ringdp_features[GradientCompression].attached("test").in_core(i) for i in range(2)),
    }


@pytest.mark.parametrize("compression", ["int8", "int4", "int6", "nf4", "bf16"])
def test_the_bits_of_the_cpu(compression: str) -> None:
    there = run_ranks(remembered, "cuda:0", compression, world_size=2, backend="ring", timeout_s=120.0)
    check_against_the_cpu(there, compression)


def check_against_the_cpu(there: list[dict[str, Any]], compression: str) -> None:
    """What `remembered` has told on each rank with a GPU."""
    here = run_ranks(remembered, "cpu", compression, world_size=2, backend="ring")
    for cpu, gpu in zip(here, there, strict=True):
        assert gpu["in_core"]
        assert gpu["finite"] is not False
        for step in range(STEPS):
            for mine, wanted in zip(gpu["gradients"][step], cpu["gradients"][step], strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
        for name, residual in cpu["residuals"].items():
            if residual is not None:
                assert torch.equal(gpu["residuals"][name].cpu(), residual), name


def guarded() -> list[str]:
    return [one.backend for one in ringdp._C.watch_group(default_group())]


def test_nccl_is_guarded() -> None:
    assert run_ranks(guarded, world_size=1, backend="cpu:ring,cuda:nccl") == [["nccl"]]


def captured() -> str:
    model = RingDP(nn.Linear(4, 4).to("cuda"))
    x = torch.ones(2, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ringdp.errors.InvalidStateError, match="CUDA graph") as caught, torch.cuda.graph(graph):
        model(x)
    return str(caught.value)


def test_a_capture_is_refused() -> None:
    [text] = run_ranks(captured, world_size=1, backend="cpu:ring,cuda:nccl")
    assert "make_graphed_callables" in text
