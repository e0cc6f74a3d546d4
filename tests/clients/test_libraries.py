# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, call-overload, misc, assignment"
"""What sits on a process group besides wrappers: checkpoints, averaging, statistics, objects, compiled code."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.clients.both import assert_same, on_both
from tests.helpers import need
from tests.train.harness import run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.nightly


def small_model() -> Any:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 4))


def batches(count: int) -> Any:
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(6, 10, generator=generator)


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for x in batches(steps):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


# torch.distributed.checkpoint.


def sharded(seed: int) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def saved_and_loaded(folder: str) -> list[Any]:
    """A sharded model and its optimizer, written in the foreground and in the background, read into fresh ones."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = sharded(1)
    train(model, optimizer)

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": 3, "rank": [dist.get_rank()]}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(model, optimizer), checkpoint_id=f"{folder}/now")
        # A group of its own: its collectives run beside the training's, in no order that ranks agree on.
        own = dist.new_group()
        writing = dcp.async_save(state(model, optimizer), checkpoint_id=f"{folder}/later", process_group=own)
        train(model, optimizer)  # goes on while it is written
        writing.result()
        results = []
        for name in ("now", "later"):
            fresh, its_optimizer = sharded(2)
            loaded = state(fresh, its_optimizer)
            loaded["step"] = 0
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
            set_state_dict(fresh, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            assert loaded["step"] == 3
            results += [p.full_tensor().detach() for p in fresh.parameters()]
            results += [its_optimizer.state[p]["exp_avg"].full_tensor() for p in fresh.parameters()]
    dist.barrier()
    return results


def loaded_elsewhere(folder: str) -> list[Any]:
    """What two ranks wrote, read by another number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, _ = sharded(3)
    weights = {"model": get_model_state_dict(model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(weights, checkpoint_id=f"{folder}/now")
    return [p.full_tensor().detach() for p in model.parameters()]


def test_checkpoints(tmp_path: Path) -> None:
    ring = run_ranks(saved_and_loaded, str(tmp_path / "ring"), backend="ring")
    gloo = run_ranks(saved_and_loaded, str(tmp_path / "gloo"), backend="gloo")
    assert_same(ring, gloo, None, "as on gloo")
    half = len(ring[0]) // 2
    assert_same(ring[0][:half], ring[0][half:], None, "foreground and background")
    other = run_ranks(loaded_elsewhere, str(tmp_path / "ring"), world_size=3, backend="ring")
    assert_same(other[2], ring[0][:4], None, "on three ranks")


# Averaging from time to time.


def post_local() -> list[Any]:
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
    from torch.distributed.optim import PostLocalSGDOptimizer

    results = []
    world = dist.get_world_size()
    periods = OrderedDict([(2, 2), (4, 4)] if world == 4 else [(2, 2)])
    for averager in (
        averagers.PeriodicModelAverager(period=2, warmup_steps=2),
        hierarchical_model_averager.HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=1),
    ):
        model = small_model()
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        train(model, optimizer, 7)
        results += [p.detach().clone() for p in model.parameters()]
    return results


@pytest.mark.parametrize("world_size", (2, 4))
def test_post_local_sgd(world_size: int) -> None:
    on_both(post_local, world_size=world_size, tolerance=None if world_size == 2 else 1e-5)


# SyncBatchNorm: its module takes tensors of accelerators only, its function's collectives are these.


def batch_statistics() -> list[Any]:
    """The two collectives of torch.nn.modules._functions.SyncBatchNorm, on its numbers, against one large batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [4 + 3 * r for r in range(world)]
    everything = torch.randn(sum(sizes), 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = everything.split(sizes)[rank]

    dims = (0, 2)
    mean, invstd = mine.mean(dims), 1 / (mine.var(dims, unbiased=False) + 1e-5).sqrt()
    count = torch.full((1,), float(mine.numel() // 6), dtype=mine.dtype)
    combined = torch.cat([mean, invstd, count])
    gathered = torch.empty(world * combined.numel(), dtype=mine.dtype)
    dist.all_gather_into_tensor(gathered, combined)
    listed = [torch.empty_like(combined) for _ in range(world)]
    dist.all_gather(listed, combined)  # the other way its function has
    assert torch.equal(torch.cat(listed), gathered)
    means, invstds, counts = gathered.view(world, -1).split([6, 6, 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = ((1 / invstds**2 - 1e-5 + means**2) * counts).sum(0) / total - mean**2
    torch.testing.assert_close(mean, everything.mean(dims))
    torch.testing.assert_close(variance, everything.var(dims, unbiased=False))
    sums = torch.cat([mine.sum(dims), (mine * mine).sum(dims)])
    dist.all_reduce(sums, dist.ReduceOp.SUM)
    torch.testing.assert_close(sums[:6], everything.sum(dims))
    return [gathered, mean, variance]


def test_sync_batch_norm() -> None:
    on_both(batch_statistics, world_size=3)


# torchmetrics.


def metrics() -> list[Any]:
    import torchmetrics

    rank, world = dist.get_rank(), dist.get_world_size()
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=4)
    matrix = torchmetrics.classification.MulticlassConfusionMatrix(num_classes=4)
    mean, lists = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        scores, labels = torch.randn(9, 4, generator=generator), torch.randint(4, (9,), generator=generator)
        accuracy.update(scores, labels)
        matrix.update(scores, labels)
        mean.update(scores)
        lists.update(scores[: rank + 1, 0])  # another length on each rank
    results = [accuracy.compute(), matrix.compute(), mean.compute(), lists.compute()]
    assert results[1].sum() == 27 * world
    assert len(results[3]) == 3 * sum(range(1, world + 1))
    return results


def test_torchmetrics() -> None:
    need("torchmetrics")
    ranks = on_both(metrics, world_size=3, tolerance=1e-6)
    for rank in ranks[1:]:
        assert_same(rank, ranks[0], None, "the ranks agree")


# Objects.


def objects() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (1000 * rank), "none": None, "tensor": torch.arange(rank + 1.0)}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    assert [it["rank"] for it in gathered] == list(range(world))
    shared: list[Any] = [mine, (rank, "a")] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    collected: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, collected, dst=0)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [{"for": r, "big": "y" * 5000 * r} for r in range(world)] if rank == 0 else None)
    assert part[0]["for"] == rank
    following, before = (rank + 1) % world, (rank - 1) % world
    passed: list[Any] = [None, None]
    if rank % 2 == 0:
        dist.send_object_list([mine, rank], dst=following)
        dist.recv_object_list(passed, src=before)
    else:
        dist.recv_object_list(passed, src=before)
        dist.send_object_list([mine, rank], dst=following)
    assert passed[1] == before
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        dist.all_gather_object(gathered, lambda: 0)
    dist.barrier()
    return [gathered, shared, collected, part, passed]


def test_objects() -> None:
    on_both(objects, world_size=4)


# TORCH_DISTRIBUTED_DEBUG=DETAIL, which torch reads when it is imported or told to.


def in_detail(backend: str, folder: str) -> list[Any]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if backend == "ring":
            import ringdp  # noqa: F401
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store-{backend}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=30),
        )
        if backend == "ring":  # torch 2.13's DDP dies of SIGSEGV on gloo, in its logger
            model = nn.parallel.DistributedDataParallel(small_model())
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        group = dist.new_group()
        x = torch.full((5,), float(rank + 1))
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, async_op=True).wait()
        out = torch.zeros(world * 5)
        dist.all_gather_into_tensor(out, x)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, rank)
        received = torch.zeros(2)
        if rank == 0:
            dist.send(torch.ones(2), dst=1)
        elif rank == 1:
            dist.recv(received, src=0)
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"(?s)Detected mismatch between collectives on ranks.*TensorShape"):
            dist.all_reduce(torch.ones(2 + rank))
        return [x, out, gathered, received]
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)


def test_debugging_in_detail(tmp_path: Path) -> None:
    results = {
        backend: run_ranks(in_detail, backend, str(tmp_path), backend=None, timeout_s=60)
        for backend in ("ring", "gloo")
    }
    assert_same(results["ring"], results["gloo"], None, "as on gloo")


# Functional collectives, alone and in compiled code.


def functional() -> list[Any]:
    import torch.distributed._functional_collectives as collectives

    world = list(range(dist.get_world_size()))
    rank = dist.get_rank()

    def step(x: Any) -> Any:
        y = collectives.all_reduce(x, "sum", world)
        z = collectives.all_gather_tensor(y * 2, 0, world)
        w = collectives.reduce_scatter_tensor(z, "avg", 0, world)
        v = collectives.all_to_all_single(w.repeat(len(world)), None, None, world)
        return v + collectives.broadcast(x, 1, world).sum()

    x = torch.arange(6.0) + rank
    plain = step(x)
    compiled = torch.compile(step, backend="eager", fullgraph=True)(x)
    assert torch.equal(plain, compiled)
    model = nn.parallel.DistributedDataParallel(small_model())
    run = torch.compile(copy.deepcopy(model), backend="eager")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(run, torch.optim.SGD(run.parameters(), lr=0.1))
    torch._dynamo.reset()
    for one, other in zip(model.parameters(), run.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    return [plain, *(p.detach().clone() for p in run.parameters())]


def test_functional_collectives_and_compiled_code() -> None:
    on_both(functional, timeout_s=90)
