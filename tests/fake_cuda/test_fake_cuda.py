"""What needs a GPU and no speed, on the device of this folder, which is not there (make test-fake-gpu)."""

from __future__ import annotations

import contextlib
import gc
import math
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
from torch._C._distributed_c10d import GradBucket

from ringdp.ddp.wrapper import RingDP
from tests.fault.elastic_jobs import joined
from tests.gpu.test_training_gpu import NCCL, digest
from tests.train.harness import run_ranks

pytestmark = pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="make test-fake-gpu runs it")

STEPS = 6
KEPT_IN = 2
OVERFLOWS_IN = 4
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


def accumulators(module: Branches) -> list[Any]:
    """Of the first branch's parameters: while they live, those gradients arrive on the branch's stream."""
    with torch.cuda.stream(module.side):  # type: ignore[arg-type]
        views: list[Any] = [parameter.expand_as(parameter) for parameter in module.first.parameters()]
    return [view.grad_fn.next_functions[0][0] for view in views]


def train(place: str, options: dict[str, Any]) -> str:
    """The weights after some steps, and gradients that were kept: one hash of the bits of all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Branches(torch.Stream(device="cuda") if place == "cuda" else None).to(place)
    _nodes = accumulators(module)
    model = RingDP(module, **{"bucket_cap_mb": 0.02, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept: list[Tensor] = []
    with on_a_stream_of_the_users(place):
        for step in range(STEPS):
            numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step % 3 == 1:
                with model.no_sync():
                    model(torch.randn(8, 64, generator=numbers).to(place)).square().mean().backward()
            loss = model(torch.randn(8, 64, generator=numbers).to(place, non_blocking=True)).square().mean()
            (loss * (math.inf if step == OVERFLOWS_IN and dist.get_rank() == 1 else 1)).backward()
            if step == KEPT_IN:
                kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if step != OVERFLOWS_IN:  # what compression left out of the step before is sent in the next one
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
    {"bucket_cap_mb": 25},  # gradients of both streams in one bucket
    {"bucket_cap_mb": 25, "compression": "int8"},
]
# A compressor of operations of torch; and what NCCL cannot, whose order of summation is its own.
OVER = [(options, [NCCL, "ring"]) for options in [*OPTIONS, {"compression": "topk"}]]
OVER.append(({"reproducible": True}, ["ring"]))


@pytest.mark.parametrize("options, backends", OVER, ids=str)
def test_training_has_the_bits_of_the_cpu(options: dict[str, Any], backends: list[str]) -> None:
    expected = run_ranks(train, "cpu", options, backend="ring")
    for backend in backends:
        assert run_ranks(train, "cuda", options, backend=backend) == expected, backend


def step_without_a_wait(compression: str | None) -> None:
    """The host waits for the device nowhere, once the order of the gradients is known."""
    model = RingDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda(), compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(8, 64, device="cuda")
    for step in range(5):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compression", [None, "int8", "int4"])
def test_the_host_does_not_wait_in_a_step_over_nccl(compression: str | None) -> None:
    run_ranks(step_without_a_wait, compression, backend=NCCL)


def last_step_is_late_on_one_rank() -> None:
    """The other has left when this one says which parameters it used, for which no rank waits in that step."""
    model = RingDP(nn.Linear(64, 64).cuda())
    late = [False, False, dist.get_rank() == 1]  # the first exchanges the order of the gradients

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        def end(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            time.sleep(BUSY_S * late[step])
            return future.value()[0]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(end)

    model.register_comm_hook(None, hook)
    for step in range(3):  # noqa: B007
        model(torch.ones(4, 64, device="cuda")).sum().backward()


def test_a_rank_that_ends_first_does_not_fail_the_others() -> None:
    run_ranks(last_step_is_late_on_one_rank, backend="ring")


class Interrupted(Exception):
    """Of the program, in a backward."""


def let_go_in_backward(compression: str | None) -> bool:
    """The wrapper goes while its buckets are under way: what takes their memory next keeps its values."""
    model = RingDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda(), compression=compression)
    for _ in range(2):
        model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()

    def interrupt(_: Tensor) -> None:
        raise Interrupted

    model.module[0].weight.register_hook(interrupt)
    with pytest.raises(Interrupted):
        model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    del model
    gc.collect()
    fresh = [torch.zeros(64 * 64 * count, device="cuda") for count in (1, 1, 1, 1, 2, 2, 4)]
    torch.cuda.synchronize()
    return not any(one.any().item() for one in fresh)


@pytest.mark.parametrize("compression", [None, "int8"])
@pytest.mark.parametrize("backend", ["ring", NCCL])
def test_memory_that_is_let_go_of_in_backward_is_not_written_to(backend: str, compression: str | None) -> None:
    assert run_ranks(let_go_in_backward, compression, backend=backend) == [True, True]


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
