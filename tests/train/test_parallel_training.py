"""RingDP trains as torch's DDP does, and as one process on the joined batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.harness import backends, run_ranks

STEPS = 50
SMALL_BUCKETS_MB = 0.0002  # several buckets in models this small


def train(model: nn.Module, optimizer_name: str, *, joined: bool = False) -> list[Tensor]:
    optimizer = models.OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(STEPS):
        if joined:
            x, y = models.joined_batch(step, dist.get_world_size())
        else:
            x, y = models.batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare(ours: list[Tensor], theirs: list[Tensor], name: str) -> None:
    half = name == "mixed_types"
    for one, other in zip(ours, theirs, strict=True):
        if half:
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def against_ddp(name: str, optimizer: str) -> dict[str, Any]:
    ddp = train(DistributedDataParallel(models.build(name)), optimizer)
    wrapped = RingDP(models.build(name), bucket_cap_mb=SMALL_BUCKETS_MB)
    ours = train(wrapped, optimizer)
    compare(ours, ddp, name)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [p.double().abs().sum().item() for p in ours])
    assert all(other == everybody[0] for other in everybody), "the ranks' parameters differ"
    return {"buckets": wrapped.stats().buckets, "steps": wrapped.stats().steps, "rebuilt": wrapped.reducer.rebuilt()}


def against_one_process(name: str, optimizer: str) -> None:
    ours = train(RingDP(models.build(name), bucket_cap_mb=SMALL_BUCKETS_MB), optimizer)
    alone = train(models.build(name), optimizer, joined=True)
    compare(ours, alone, name)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", list(models.MODELS))
def test_same_parameters_as_ddp(name: str, optimizer: str, backend: str) -> None:
    results = run_ranks(against_ddp, name, optimizer, backend=backend)
    assert all(result["steps"] == STEPS and result["rebuilt"] for result in results)
    assert results[0]["buckets"] > 1


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["mlp", "tied", "reentrant", "non_reentrant"])
def test_same_parameters_as_one_process(name: str, optimizer: str, backend: str) -> None:
    run_ranks(against_one_process, name, optimizer, backend=backend)


def three_ranks() -> None:
    against_one_process("mlp", "sgd")


@pytest.mark.parametrize("backend", backends()[-1:])
def test_three_ranks(backend: str) -> None:
    run_ranks(three_ranks, world_size=3, backend=backend)
