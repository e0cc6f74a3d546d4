# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, index, assignment"
"""torch's DistributedDataParallel on ring: what it trains, and every communication hook it ships, as on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.both import on_both
from tests.helpers import need
from tests.train.harness import run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def small_model() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def wrapped(**options: Any) -> Any:
    """Several buckets: 0.01 MB is one large layer."""
    return DistributedDataParallel(small_model(), bucket_cap_mb=0.01, **options)


def batches(count: int) -> Any:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)


def train(model: Any, optimizer: Any, steps: int = 4) -> list[Any]:
    """The parameters after a few steps; without an optimizer the hook has one."""
    for x, y in batches(steps):
        nn.functional.cross_entropy(model(x), y).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def with_hook(hook: Callable[..., Any], state: Any = None) -> list[Any]:
    model = wrapped()
    model.register_comm_hook(state, hook)
    return train(model, sgd(model))


# Every hook that runs on gloo: its name here, and how it is registered. Two do not: the quantization hooks read a
# future's value as NCCL lays it out, and _apply_optimizer_in_backward needs an accelerator.


def post_local() -> list[Any]:
    model = wrapped()
    subgroup = dist.new_group([dist.get_rank()])
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return train(model, sgd(model))


def optimizer_in_hook() -> list[Any]:
    model = wrapped()
    model._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    return train(model, None)


def builtin(kind: str) -> list[Any]:
    model = wrapped()
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    return train(model, sgd(model))


HOOKS: dict[str, Callable[[], list[Any]]] = {
    "allreduce": lambda: with_hook(default_hooks.allreduce_hook),
    "allreduce of a group": lambda: with_hook(default_hooks.allreduce_hook, dist.group.WORLD),
    "fp16": lambda: with_hook(default_hooks.fp16_compress_hook),
    # By another name: DDP refuses the hook's own without CUDA and NCCL 2.10.
    "bf16": lambda: with_hook(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    "fp16 wrapper": lambda: with_hook(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": lambda: with_hook(
        lambda state, bucket: default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)
    ),
    "noop": lambda: with_hook(debugging_hooks.noop_hook),
    "post-local SGD": post_local,
    "optimizer in the hook": optimizer_in_hook,
    "built-in ALLREDUCE": lambda: builtin("ALLREDUCE"),
    "built-in FP16_COMPRESS": lambda: builtin("FP16_COMPRESS"),
}
DIFFERENT_ON_EACH_RANK = {"noop", "post-local SGD"}


def every_hook() -> dict[str, list[Any]]:
    return {name: hook() for name, hook in HOOKS.items()}


def test_every_hook() -> None:
    """To the bit: with two ranks a sum has one order."""
    ring = run_ranks(every_hook, world_size=2, backend="ring")
    gloo = run_ranks(every_hook, world_size=2, backend="gloo")
    start = [p.detach() for p in small_model().parameters()]
    for name in HOOKS:
        for rank in range(2):
            mine, theirs = ring[rank][name], gloo[rank][name]
            for one, other, before in zip(mine, theirs, start, strict=True):
                assert torch.equal(one, other), name
                assert not torch.equal(one, before), f"{name} trained nothing"
            if name not in DIFFERENT_ON_EACH_RANK:
                assert all(torch.equal(a, b) for a, b in zip(mine, ring[0][name], strict=True)), name


def zero_in_hook() -> list[list[Any]]:
    """ZeroRedundancyOptimizer, whose steps and broadcasts run in the hook's callbacks; a plain optimizer's result."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, plain = wrapped(gradient_as_bucket_view=True), wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer, shard_buckets=True)
    model.register_comm_hook(None, hook)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches(7)):
        model.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step < 2:
            continue  # while DDP finds its buckets, this optimizer does nothing
        reference.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        reference.step()
    return [[p.detach().clone() for p in it.parameters()] for it in (model, plain)]


def test_zero_in_the_hook() -> None:
    """On gloo torch refuses this, because it may hang there."""
    for mine, plain in run_ranks(zero_in_hook, world_size=3, backend="ring"):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)


# What else DDP does with a process group.


def sparse_gradients() -> list[Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.EmbeddingBag(30, 12, sparse=True), nn.Linear(12, 5))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(30, (8, 3), generator=generator)).pow(2).sum().backward()
        assert model.module[0].weight.grad.is_sparse
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


class Branching(nn.Module):
    """Ranks use different layers, and one layer is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.head = nn.Linear(20, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers[dist.get_rank()](x))


def unused_parameters() -> list[Any]:
    torch.manual_seed(7)
    model = DistributedDataParallel(Branching(), find_unused_parameters=True, bucket_cap_mb=0.001)
    values = train(model, sgd(model))
    assert model.module.layers[3].weight.grad is None
    return values


def static_graph() -> list[Any]:
    model = wrapped(static_graph=True, gradient_as_bucket_view=True)
    optimizer = sgd(model)
    train(model, optimizer)
    with model.no_sync():
        for x, _ in batches(2):
            model(x).sum().backward()
    return train(model, optimizer)


def uneven_inputs() -> list[Any]:
    model = wrapped()
    optimizer = sgd(model)
    with model.join():
        for x, y in batches(3 + 2 * dist.get_rank()):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def buffers() -> list[Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))
    model = DistributedDataParallel(model)
    values = train(model, sgd(model))
    return [*values, *(b.clone() for b in model.buffers())]


def complex_and_mixed() -> list[Any]:
    torch.manual_seed(7)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(20, 8)
            self.wide = nn.Linear(8, 8, dtype=torch.float64)
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.brain = nn.Linear(16, 5, dtype=torch.bfloat16)

        def forward(self, x: Any) -> Any:
            hidden = torch.view_as_real(self.wide(self.narrow(x).double()).float() * self.phase).flatten(1)
            return self.brain(hidden.bfloat16()).float()

    model = DistributedDataParallel(Mixed())
    return train(model, sgd(model))


CASES: dict[str, Callable[[], list[Any]]] = {
    "sparse gradients": sparse_gradients,
    "unused parameters": unused_parameters,
    "static graph": static_graph,
    "uneven inputs": uneven_inputs,
    "buffers": buffers,
    "complex and mixed types": complex_and_mixed,
}


def every_case() -> dict[str, list[Any]]:
    return {name: case() for name, case in CASES.items()}


@pytest.mark.parametrize("world_size", (2, 3))
def test_ddp(world_size: int) -> None:
    on_both(every_case, world_size=world_size, tolerance=None if world_size == 2 else 2e-2)
