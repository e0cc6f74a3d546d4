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
from tests.train.harness import backends, on_ranks

STEPS = 20
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
    rtol, atol = (1e-2, 1e-2) if name == "mixed_types" else (1e-5, 1e-7)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def check(name: str, optimizer: str) -> None:
    wrapped = RingDP(models.build(name), bucket_cap_mb=SMALL_BUCKETS_MB)
    ours = train(wrapped, optimizer)
    compare(ours, train(DistributedDataParallel(models.build(name)), optimizer), name)
    if name in ("mlp", "tied", "reentrant", "non_reentrant"):
        compare(ours, train(models.build(name), optimizer, joined=True), name)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [p.double().abs().sum().item() for p in ours])
    assert all(other == everybody[0] for other in everybody), "the ranks' parameters differ"
    assert wrapped.stats().steps == STEPS
    assert wrapped.stats().buckets > 1
    assert wrapped.reducer.plan.rebuilt()


@pytest.mark.parametrize("name", list(models.MODELS))
@on_ranks(backend=backends())
def test_same_parameters_as_ddp_and_as_one_process(name: str) -> None:
    for optimizer in ("sgd", "adamw"):
        check(name, optimizer)


@on_ranks(3, backend=backends()[-1])
def test_three_ranks() -> None:
    check("mlp", "sgd")
