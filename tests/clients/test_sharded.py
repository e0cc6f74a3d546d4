# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, call-overload, misc"
"""Models cut into pieces, on ring as on gloo: FSDP, HSDP, replicate, ZeRO, DTensor, tensor parallelism, pipelining."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from tests.clients.both import on_both
from tests.helpers import need

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402


class Block(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> Any:
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(20, 7))


def batches(count: int, *, shard: int | None = None) -> Any:
    generator = torch.Generator().manual_seed(50 + (dist.get_rank() if shard is None else shard))
    for _ in range(count):
        yield torch.randn(12, 20, generator=generator)


def train(model: Any, optimizer: Any, steps: int = 4, **options: Any) -> None:
    for x in batches(steps, **options):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: Any) -> Any:
    """Not Adam, to which a gradient that is wrong by a factor looks right."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def whole(model: Any) -> list[Any]:
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


# Fully sharded, by both of torch's implementations.


def fsdp1(strategy: str) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            blocks(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        optimizer = sgd(model)
        train(model, optimizer)
        norm = model.clip_grad_norm_(1.0)
        with model.no_sync():
            for x in batches(1):
                model(x).sum().backward()
        train(model, optimizer, 1)
        with FullyShardedDataParallel.summon_full_params(model):
            return [norm, *(p.detach().clone() for p in model.parameters())]


def fsdp1_all() -> dict[str, list[Any]]:
    return {name: fsdp1(name) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")}


def fsdp2(mesh_shape: tuple[int, ...], low: bool, reshard: bool) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    )
    model = blocks()
    for module in model[:2]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = sgd(model)
    train(model, optimizer)
    for x in batches(1):
        model(x).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    optimizer.step()
    return [norm, *whole(model)]


def fsdp2_all(mesh_shape: tuple[int, ...]) -> dict[str, list[Any]]:
    return {
        "plain": fsdp2(mesh_shape, False, True),
        "bf16": fsdp2(mesh_shape, True, True),
        "kept": fsdp2(mesh_shape, False, False),
    }


def replicated() -> list[Any]:
    from torch.distributed._composable.replicate import replicate

    model = blocks()
    replicate(model)
    train(model, sgd(model))
    return whole(model)


def zero() -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(blocks())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    return [*whole(model), *(state[index]["momentum_buffer"] for index in sorted(state))]


def sharded_over_two() -> dict[str, Any]:
    return {"FSDP1": fsdp1_all(), "FSDP2": fsdp2_all((2,)), "replicate": replicated(), "ZeRO": zero()}


def test_sharded_over_two() -> None:
    on_both(sharded_over_two)


def sharded_over_four() -> dict[str, Any]:
    return {"HSDP": fsdp2_all((2, 2))}


def test_sharded_over_four() -> None:
    """Four ranks add in another order than on gloo."""
    ranks = on_both(sharded_over_four, world_size=4, tolerance=1e-3)
    for rank in ranks[1:]:
        for name, values in rank["HSDP"].items():
            assert all(torch.equal(a, b) for a, b in zip(values, ranks[0]["HSDP"][name], strict=True)), name


# DTensor.


def redistributions(mesh_shape: tuple[int, ...]) -> list[Any]:
    """From every placement to every other, sizes that do not divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape)
    every = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=len(mesh_shape)))
    whole = torch.arange(35.0).reshape(5, 7)
    results = []
    for source in every:
        tensor = distribute_tensor(whole, mesh, source)
        for target in every:
            moved = tensor.redistribute(mesh, target)
            assert torch.equal(moved.full_tensor(), whole), (source, target)
            results.append(moved.to_local().clone())
    partial = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()] * len(mesh_shape), run_check=False)
    total = whole * sum(range(1, dist.get_world_size() + 1))
    for target in every:
        moved = partial.redistribute(mesh, target)
        assert torch.equal(moved.full_tensor(), total), target
        results.append(moved.to_local().clone())
    gradient = distribute_tensor(whole.clone().requires_grad_(), mesh, every[-1])
    gradient.redistribute(mesh, every[0]).pow(2).sum().backward()
    results.append(gradient.grad.full_tensor() if gradient.grad is not None else torch.zeros(0))
    product = distribute_tensor(whole, mesh, every[-1]) @ distribute_tensor(whole.t(), mesh, every[0])
    results.append(product.full_tensor())
    return results


def test_dtensor() -> None:
    on_both(redistributions, (2,))
    on_both(redistributions, (2, 2), world_size=4)
    on_both(redistributions, (3,), world_size=3)


# Tensor parallelism.


def tensor_parallel(sequence: bool) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    block = Block(24)
    model = nn.ModuleDict({"norm": nn.LayerNorm(24), "block": block, "head": nn.Linear(24, 12)})
    into = Shard(0) if sequence else Replicate()
    plan: dict[str, Any] = {
        "block.up": ColwiseParallel(input_layouts=Replicate()),
        "block.down": RowwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=into, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["norm"] = SequenceParallel(sequence_dim=0)
    parallelize_module(model, mesh, plan)
    optimizer = sgd(model)
    losses = []
    for x in (torch.randn(8, 24, generator=torch.Generator().manual_seed(step)) for step in range(3)):
        hidden = model["block"](x)
        if sequence:
            local = hidden.chunk(dist.get_world_size())[dist.get_rank()]
            hidden = model["norm"](local)
        with loss_parallel():
            loss = nn.functional.cross_entropy(model["head"](hidden), torch.arange(8) % 12)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().detach() if hasattr(loss, "full_tensor") else loss.detach())
    return [*losses, *whole(model)]


def tensor_parallel_both() -> dict[str, list[Any]]:
    return {"plain": tensor_parallel(False), "sequence": tensor_parallel(True)}


@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.ci)))
def test_tensor_parallel(world_size: int) -> None:
    on_both(tensor_parallel_both, world_size=world_size, tolerance=None if world_size == 2 else 1e-4)


# Pipelines, whose stages send each other activations and gradients.


def pipeline(schedule_name: str) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    layers = [nn.Sequential(Block(), nn.Tanh()) for _ in range(2 * world)]
    kind = getattr(schedules, schedule_name)
    loss = nn.functional.mse_loss
    per_rank = 1 if issubclass(kind, schedules.PipelineScheduleSingle) else 2
    mine = [rank + turn * world for turn in range(per_rank)]
    parts = 2 * world // (per_rank * world)
    modules = [nn.Sequential(*layers[index * parts : (index + 1) * parts]) for index in mine]
    stages = [
        PipelineStage(module, index, per_rank * world, torch.device("cpu"))
        for module, index in zip(modules, mine, strict=True)
    ]
    schedule = kind(stages[0] if per_rank == 1 else stages, n_microbatches=4, loss_fn=loss)
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))
    y = torch.randn(16, 20, generator=torch.Generator().manual_seed(2))
    losses: list[Any] = []
    last = per_rank * world - 1 in mine
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if last else {}))
    return [*[value.detach() for value in losses], *(p.grad.clone() for module in modules for p in module.parameters())]


def pipelines() -> dict[str, list[Any]]:
    return {name: pipeline(name) for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")}


def test_pipelines() -> None:
    """Nothing is summed over ranks: the same bits whatever the number of ranks. The second one sends and receives."""
    on_both(pipelines, world_size=3)
