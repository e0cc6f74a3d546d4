"""Communication hooks: torch's own, the built-in ones, and Python functions; they see undivided, named buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import parameter_names
from tests.train import models
from tests.train.harness import backends, on_ranks, require_same_bits


def loss(model: nn.Module, step: int) -> Tensor:
    x, y = models.batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def same_as_ddp(register: Any, rtol: float) -> None:
    ours = RingDP(models.build("convolutional"), bucket_cap_mb=0.0005)
    ddp = DistributedDataParallel(models.build("convolutional"))
    for model in (ours, ddp):
        register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


@on_ranks(backend=backends())
def test_torchs_hooks() -> None:
    wrapper = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    for hook, rtol in ((default_hooks.allreduce_hook, 1e-6), (default_hooks.fp16_compress_hook, 1e-3), (wrapper, 1e-3)):
        same_as_ddp(lambda model, hook=hook: model.register_comm_hook(None, hook), rtol)
    for kind, rtol in ((BuiltinCommHookType.ALLREDUCE, 1e-6), (BuiltinCommHookType.FP16_COMPRESS, 1e-3)):
        same_as_ddp(lambda model, kind=kind: model._register_builtin_comm_hook(kind), rtol)


@on_ranks(backend=backends())
def test_noop() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    ours = RingDP(models.build("mlp"))
    ours.register_comm_hook(None, noop_hook)
    loss(ours, 0).backward()
    alone = models.build("mlp")
    loss(alone, 0).backward()
    for one, other in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@on_ranks(backend=backends())
def test_a_chain_of_callbacks() -> None:
    """The hook sums, a callback halves, another one doubles what it got: a new tensor each time."""
    seen: list[tuple[int, bool, list[str], list[tuple[int, ...]]]] = []

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        assert shapes == [tuple(parameter.shape) for parameter in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), parameter_names(bucket), shapes))
        summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda future: future.value()[0] / 4).then(lambda future: future.value() * 2)

    ours = RingDP(models.build("mlp"), bucket_cap_mb=0.001)
    ours.register_comm_hook("state", hook)
    for step in range(2):
        ours.zero_grad()
        loss(ours, step).backward()
    ddp = DistributedDataParallel(models.build("mlp"))
    loss(ddp, 1).backward()
    for one, other in zip(ours.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
    first = [entry for entry in seen if entry[0] == 0]
    assert len(first) == 2
    assert {name for _, _, names, _ in seen for name in names} == {n for n, _ in ours.module.named_parameters()}
    assert sum(last for _, last, _, _ in seen) == 2


@on_ranks(backend=backends())
def test_undivided() -> None:
    buffers: list[Tensor] = []

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffers.append(bucket.gradients()[0].clone())
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    ours = RingDP(nn.Linear(3, 1, bias=False))
    ours.register_comm_hook(None, hook)
    ours(torch.full((1, 3), float(dist.get_rank() + 1))).sum().backward()
    torch.testing.assert_close(buffers[0], torch.full((1, 3), float(dist.get_rank() + 1)))
    torch.testing.assert_close(ours.module.weight.grad, torch.full((1, 3), 1.5))


@on_ranks(backend=backends())
def test_set_buffer_is_respected() -> None:
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        bucket.set_buffer(torch.full_like(bucket.buffer(), 7.0))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ours = RingDP(nn.Linear(3, 1))
    ours.register_comm_hook(None, hook)
    ours(torch.ones(1, 3)).sum().backward()
    assert all(bool((p.grad == 7).all()) for p in ours.parameters() if p.grad is not None)


@on_ranks(backend=backends())
def test_registered_once() -> None:
    ours = RingDP(nn.Linear(3, 1))
    ours.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ours._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(TypeError, match="Communication hook must be callable"):
        ours.register_comm_hook(None, 3)  # type: ignore[arg-type]
    assert ours._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


@on_ranks(backend=backends())
def test_registered_after_a_step() -> None:
    ours = RingDP(models.build("mlp"))
    loss(ours, 0).backward()
    ours.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp = DistributedDataParallel(models.build("mlp"))
    loss(ddp, 0).backward()
    for model in (ours, ddp):
        loss(model, 1).backward()
    for one, other in zip(ours.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


@on_ranks()
def test_power_sgd() -> None:
    """Low rank: not DDP's gradients, but all ranks have the same. On gloo torch's hook aborts: its callbacks issue
    collectives in another order."""
    torch.manual_seed(0)
    ours = RingDP(nn.Sequential(nn.Linear(12, 30), nn.Linear(30, 5)), bucket_cap_mb=0.0005)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1.0
    )
    ours.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        value = loss(ours, 0)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    require_same_bits(ours.parameters())
    assert losses[-1] < losses[0] - 0.05


@on_ranks(backend=backends())
def test_a_hook_that_raises() -> None:
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        raise KeyError("mine")

    ours = RingDP(nn.Linear(3, 1))
    ours.register_comm_hook(None, hook)
    value = ours(torch.ones(1, 3)).sum()
    with pytest.raises(KeyError, match="mine"):
        value.backward()
    with pytest.raises(RuntimeError, match="mine"):
        ours(torch.ones(1, 3))


@on_ranks(backend=backends())
def test_a_callback_that_raises() -> None:
    def fail(future: torch.futures.Future[Tensor]) -> Tensor:
        raise ValueError("in a callback")

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

    ours = RingDP(nn.Linear(3, 1))
    ours.register_comm_hook(None, hook)
    value = ours(torch.ones(1, 3)).sum()
    with pytest.raises(RuntimeError, match="in a callback"):
        value.backward()


@on_ranks(1, backend=backends())
def test_a_hook_in_a_world_of_one() -> None:
    calls: list[int] = []

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    ours = RingDP(models.build("mlp"))
    ours.register_comm_hook(None, hook)
    loss(ours, 0).backward()
    assert calls == [0]
