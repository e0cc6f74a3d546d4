"""What needs a GPU and no speed, on the device of this folder, which is not there (make test-fake-gpu)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.ddp.wrapper import RingDP
from tests.fault.elastic_jobs import joined
from tests.gpu.test_training_gpu import digest
from tests.train.harness import run_ranks

pytestmark = pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="make test-fake-gpu runs it")

STEPS = 6
KEPT_IN = 2
ENDS_WITHIN_S = 20.0
BUSY_S = 1.0
CYCLES_PER_S = 2_000_000_000


class Branches(nn.Module):
    """Two branches, of which one runs on a stream of its own where there are streams."""

    def __init__(self, side: torch.Stream | None) -> None:
        super().__init__()
        self.side = side
        self.first = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
        self.second = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            return self.last(self.first(x) + self.second(x))
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # type: ignore[arg-type]
            first = self.first(x)
        second = self.second(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return self.last(first + second)


@contextlib.contextmanager
def on_a_stream_of_the_users(place: str) -> Iterator[None]:
    if place == "cpu":
        yield
        return
    side = torch.Stream(device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        yield


def train(place: str, options: dict[str, Any]) -> str:
    """The weights after some steps, and gradients that were kept: one hash of the bits of all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = RingDP(
        Branches(torch.Stream(device="cuda") if place == "cuda" else None).to(place), bucket_cap_mb=0.02, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept: list[Tensor] = []
    with on_a_stream_of_the_users(place):
        for step in range(STEPS):
            numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step % 3 == 1:
                with model.no_sync():
                    model(torch.randn(8, 64, generator=numbers).to(place)).square().mean().backward()
            model(torch.randn(8, 64, generator=numbers).to(place, non_blocking=True)).square().mean().backward()
            if step == KEPT_IN:
                kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
    if place == "cuda":
        torch.cuda.synchronize()
    return digest([*model.parameters(), *kept])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"compression": "int8"},
    {"compression": "int4"},
    {"compression": "topk"},
    {"gradient_as_bucket_view": False},
    {"reproducible": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_has_the_bits_of_the_cpu(options: dict[str, Any]) -> None:
    expected = run_ranks(train, "cpu", options, backend="ring")
    assert run_ranks(train, "cuda", options, backend="ring") == expected


def train_elastic(folder: str, place: str, options: dict[str, Any]) -> str:
    with joined(folder, elastic=True):
        return train(place, options)


@pytest.mark.parametrize("options", [{}, {"compression": "int8"}], ids=str)
def test_an_elastic_job_has_the_bits_of_the_cpu(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its buckets' means go into other memory, which the core reads and writes on the CPU only."""
    for place in ("cpu", "cuda"):
        (tmp_path / place).mkdir()
    expected = run_ranks(train_elastic, str(tmp_path / "cpu"), "cpu", options, backend=None)
    assert run_ranks(train_elastic, str(tmp_path / "cuda"), "cuda", options, backend=None) == expected


def break_in_backward(compression: str | None) -> float:
    """A kernel's assert, once all buckets are launched, shows at the next call of the host, whatever it is."""
    torch.manual_seed(0)
    device = sys.modules["fake_cuda"]
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = RingDP(nn.Sequential(*layers).cuda(), bucket_cap_mb=0.01, compression=compression)
    for _ in range(2):
        model(torch.ones(4, 64, device="cuda")).sum().backward()
    fails = threading.Timer(BUSY_S / 2, device.fail, [True])

    def keep_busy(_: Tensor) -> None:
        torch.cuda._sleep(int(BUSY_S * CYCLES_PER_S))
        fails.start()

    layers[0].weight.register_hook(keep_busy)
    loss = model(torch.ones(4, 64, device="cuda")).sum()
    began = time.monotonic()
    try:
        loss.backward()
    except Exception:
        return time.monotonic() - began
    finally:
        fails.join()
        device.fail(False)  # these processes stay for the next test
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("compression", [None, "int8"])
def test_a_device_that_fails_in_a_later_stage_is_an_error(compression: str | None) -> None:
    for seconds in run_ranks(break_in_backward, compression, backend="ring", timeout_s=2 * ENDS_WITHIN_S):
        assert seconds < ENDS_WITHIN_S
