"""RingDP(weight=…): any split of a batch over ranks and micro-batches gives the gradients of one process."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _MixedPrecision

import ringdp
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from tests.train import models
from tests.train.harness import RankFailed, backends, on_ranks, run_ranks

Split = Sequence[Sequence[int]]  # by rank: the sizes of its micro-batches

SPLITS: dict[int, list[Split]] = {
    1: [[[24]], [[5, 19]], [[0, 7, 9, 8]]],
    2: [[[6], [2]], [[12], [12]], [[1], [23]], [[0], [8]], [[16, 3, 1], [4]], [[3, 0, 5], [0, 0]], [[4, 4], [4, 4]]],
    3: [[[1], [2], [3]], [[5, 1], [7], [2, 2, 2]], [[8], [0], [3]]],
}


def data(samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(samples, 12, dtype=dtype), torch.randn(samples, 5, dtype=dtype)


def mean_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)  # of no samples: NaN, and so are the gradients


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def reference(name: str, samples: int, dtype: torch.dtype) -> list[Tensor]:
    model = models.build(name).to(dtype)
    mean_loss(model, *data(samples, dtype)).backward()
    return grads(model)


def micro_batches(split: Split, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Those of this rank; True for the last."""
    x, y = data(sum(map(sum, split)), dtype)
    rank = dist.get_rank()
    first = sum(map(sum, split[:rank]))
    for number, size in enumerate(split[rank]):
        yield x[first : first + size], y[first : first + size], number + 1 == len(split[rank])
        first += size


def backward(model: RingDP, split: Split, dtype: torch.dtype, scale: float = 1.0) -> None:
    for x, y, last in micro_batches(split, dtype):
        with contextlib.nullcontext() if last else model.no_sync():
            (mean_loss(model, x, y) * scale).backward()


def close(model: RingDP, expected: list[Tensor], tolerance: float, scale: float = 1.0) -> None:
    for ours, theirs in zip(grads(model), expected, strict=True):
        if theirs.numel():
            error = (ours / scale - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)
            assert error <= tolerance, float(error)


def any_split(splits: list[Split], dtype: torch.dtype, name: str, options: dict[str, Any]) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    model = RingDP(models.build(name).to(dtype), weight="samples", **options)
    for split in splits:
        expected = reference(name, sum(map(sum, split)), dtype)
        for zero in (True, False):  # .grad None, and .grad there, which keeps its memory
            model.zero_grad(set_to_none=zero)
            backward(model, split, dtype)
            close(model, expected, tolerance)


@on_ranks((1, 2, 3))
def test_any_split_equals_one_process() -> None:
    """Those of the table, and some that are drawn."""
    pick, ranks = random.Random(5), dist.get_world_size()
    drawn = [
        [[pick.choice([0, 1, 2, 5, 11]) for _ in range(pick.randint(1, 4))] for _ in range(ranks)] for _ in range(10)
    ]
    any_split([split for split in drawn if sum(map(sum, split))], torch.float64, "mlp", {"bucket_cap_mb": 0.001})
    for dtype in (torch.float64, torch.float32):
        any_split(SPLITS[ranks], dtype, "mlp", {})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied", {"bucket_cap_mb": 0.0005}),
        ("reentrant", {"gradient_as_bucket_view": False}),
        ("mlp", {"find_unused_parameters": True, "reduce_dtype": torch.float64}),
        ("mlp", {"static_graph": True}),
        ("mlp", {"mixed_precision": _MixedPrecision(reduce_dtype=torch.float64)}),
    ],
)
@on_ranks(backend=backends())
def test_with_options_of_the_wrapper(name: str, options: dict[str, Any]) -> None:
    any_split(SPLITS[2] if "static_graph" not in options else [[[6], [2]], [[1], [7]]], torch.float64, name, options)


@on_ranks((1, 3))
def test_equal_weights_give_the_bits_of_a_mean_over_ranks() -> None:
    for weight in (1, 0.1, 24):
        plain, weighed = RingDP(models.build("mlp")), RingDP(models.build("mlp"), weight="call")
        for step in range(3):
            for model in (plain, weighed):
                if model is weighed:
                    model.set_weight(weight)
                x, y = models.batch(step, dist.get_rank())
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            for ours, theirs in zip(grads(weighed), grads(plain), strict=True):
                assert torch.equal(ours, theirs)


def large_gradients(split: Split, tolerance: float, options: dict[str, Any], hooked: bool) -> None:
    """Gradients of 4 MiB and more are reduced where autograd left them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.ReLU(), nn.Linear(1100, 5))
    mean_loss(net, *data(sum(map(sum, split)), torch.float32)).backward()
    expected = grads(net)
    net.zero_grad()
    model = RingDP(net, weight="samples", **options)
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        model.zero_grad()
        backward(model, split, torch.float32)
        close(model, expected, tolerance)


@pytest.mark.parametrize(
    ("tolerance", "options", "hooked"),
    [
        (1e-5, {}, False),
        (1e-5, {}, True),
        (2e-2, {"compression": "int8"}, False),
        (1e-5, {"find_unused_parameters": True}, False),
        (1e-5, {"reproducible": True}, False),
    ],
    ids=["exact", "hook", "int8", "unused", "reproducible"],
)
@on_ranks((2, 3))
def test_large_gradients(tolerance: float, options: dict[str, Any], hooked: bool) -> None:
    splits: dict[int, list[Split]] = {2: [[[3, 1], [4]], [[0], [8]]], 3: [[[2], [1, 0], [3]]]}
    for split in splits[dist.get_world_size()]:
        large_gradients(split, tolerance, options, hooked)


@on_ranks(backend="gloo")
def test_large_gradients_over_another_backend() -> None:
    large_gradients([[3, 1], [0]], 1e-5, {}, False)


class TwoParts(nn.Module):
    """The second part is used where the input is long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1_100_000)), nn.Parameter(torch.ones(1_200_000))

    def forward(self, x: Tensor) -> Tensor:
        return self.first.mean() * x.mean() + (self.second.mean() * x.sum() if len(x) > 2 else 0.0)


@pytest.mark.parametrize("divide_by_initial", [True, False])
@on_ranks(3)
def test_large_gradients_while_ranks_join(divide_by_initial: bool) -> None:
    """Large parameters that one rank uses, while ranks run out of input."""
    sizes = [[3, 1, 4], [2], [1, 2]]
    model = RingDP(TwoParts(), weight="samples", find_unused_parameters=True)
    with Join([model], divide_by_initial_world_size=divide_by_initial):
        for step, size in enumerate(sizes[dist.get_rank()]):
            model.zero_grad()
            model(torch.full((size,), float(size))).backward()
            there = [one[step] for one in sizes if step < len(one)]
            first = sum(one * one for one in there) / sum(there) / 1_100_000
            second = sum(one * one * one for one in there if one > 2) / sum(there) / 1_200_000
            for parameter, wanted in ((model.module.first, first), (model.module.second, second)):
                grad = torch.zeros(1) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(grad, torch.full_like(grad, wanted), rtol=1e-5, atol=0)


class Dot(nn.Module):
    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros_like(like))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(3)
def test_the_bits_of_large_gradients(dtype: torch.dtype) -> None:
    """The gradient, multiplied by this rank's share, and then averaged."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1_300_001, dtype=dtype, generator=torch.Generator().manual_seed(rank))
    weights = [rank + 1.0 for rank in range(n)]
    expected = x * (n * weights[rank] / sum(weights))
    dist.all_reduce(expected, dist.ReduceOp.AVG)
    model = RingDP(Dot(x), weight="call")
    for _ in range(2):
        model.zero_grad()
        model.set_weight(weights[rank])
        model(x).backward()
        assert torch.equal(grads(model)[0], expected)


class Bag(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 6, sparse=sparse)
        self.out = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.out(self.rows(ids))
        return output


@on_ranks()
def test_sparse_gradients() -> None:
    ids, y = torch.arange(12) * 3 % 40, torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    alone = Bag(sparse=True)
    nn.functional.mse_loss(alone(ids), y).backward()
    torch.manual_seed(3)
    model = RingDP(Bag(sparse=True), weight="samples")
    mine = slice(0, 9) if dist.get_rank() == 0 else slice(9, 12)
    nn.functional.mse_loss(model(ids[mine]), y[mine]).backward()
    for ours, theirs in zip(grads(model), grads(alone), strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-5, atol=1e-7)


@on_ranks(backend=backends())
def test_a_communication_hook_gets_weighed_gradients() -> None:
    split: Split = [[6, 1], [2]]
    model = RingDP(models.build("mlp").double(), weight="samples")
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    backward(model, split, torch.float64)
    close(model, reference("mlp", sum(map(sum, split)), torch.float64), 1e-12)


@pytest.mark.parametrize("divide_by_initial", [True, False])
@on_ranks(backend=backends())
def test_join(divide_by_initial: bool) -> None:
    """Rank 1 has one batch of 2, rank 0 three of 3, 4 and 5."""
    sizes = [[3, 4, 5], [2]]
    model = RingDP(models.build("mlp").double(), weight="samples", bucket_cap_mb=0.001)
    seen = []
    with Join([model], divide_by_initial_world_size=divide_by_initial):
        for step, size in enumerate(sizes[dist.get_rank()]):
            x, y = data(20, torch.float64)
            first = 0 if dist.get_rank() == 0 else sizes[0][step]
            model.zero_grad()
            mean_loss(model, x[first : first + size], y[first : first + size]).backward()
            seen.append(grads(model))
    for step, mean in enumerate(seen):
        x, y = data(20, torch.float64)
        alone = models.build("mlp").double()
        total = sizes[0][step] + (sizes[1][step] if step < len(sizes[1]) else 0)
        mean_loss(alone, x[:total], y[:total]).backward()
        for ours, theirs in zip(mean, grads(alone), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@on_ranks()
def test_amp_with_an_overflow() -> None:
    """A step with an overflow on one rank is skipped on both; the next one is exact. Half of the steps accumulate."""
    model = RingDP(models.build("mlp"), weight="samples")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ringdp.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, split in enumerate([[[6], [2]], [[1, 2], [5]], [[3], [4, 1]]]):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        for x, y, last in micro_batches(split, torch.float32):
            with contextlib.nullcontext() if last else model.no_sync():
                loss = mean_loss(model, x, y)
                if step == 1 and dist.get_rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(moved) == (step != 1), step
        assert any(moved) == (step != 1), step
        if step == 0:
            close(model, reference("mlp", 8, torch.float32), 1e-5)


@pytest.mark.parametrize("compression", ["int8", "int4", "topk"])
@on_ranks()
def test_compression(compression: str) -> None:
    """The sum of what arrived follows the sum of the exact gradients: error feedback is as good as with equal ranks."""
    exact, model = (RingDP(big(), weight="samples", compression=c) for c in (None, compression))
    total = [torch.zeros_like(p) for p in model.parameters()]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    largest = 0.0
    for step in range(20):
        for wrapper, into in ((model, total), (exact, wanted)):
            torch.manual_seed(100 * step + dist.get_rank())
            size = [9, 2, 5][(step + dist.get_rank()) % 3]
            wrapper.zero_grad()
            mean_loss(wrapper, torch.randn(size, 12), torch.randn(size, 5)).backward()
            for part, gradient in zip(into, grads(wrapper), strict=True):
                part += gradient
        largest = max(largest, max(float(g.abs().max()) for g in grads(exact)))
    bound = {"int8": 0.05, "int4": 0.5, "topk": 12.0}[compression] * largest
    for ours, theirs in zip(total, wanted, strict=True):
        assert (ours - theirs).abs().max() <= bound
    flat = torch.cat([g.flatten() for g in grads(model)])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


def big() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 200), nn.Tanh(), nn.Linear(200, 40), nn.Tanh(), nn.Linear(40, 5))


@on_ranks(4)
def test_tensor_parallel_parameters() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    replica = mesh.get_local_rank("replicate")
    split = [[4, 1], [7]]
    net = models.build("mlp").double()
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(net, mesh["tensor"], {"2": style})
    model = RingDP(net, device_mesh=mesh["replicate"], weight="samples")
    x, y = data(12, torch.float64)
    first = 5 * replica
    for number, size in enumerate(split[replica]):
        last = number + 1 == len(split[replica])
        with contextlib.nullcontext() if last else model.no_sync():
            mean_loss(model, x[first : first + size], y[first : first + size]).backward()
        first += size
    expected = reference("mlp", 12, torch.float64)
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert gradient.placements == (Shard(0),)
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)


@on_ranks()
def test_a_parameter_that_is_frozen_in_the_middle() -> None:
    """The last layer is frozen while it has gradients of a micro-batch: they are averaged by samples, too."""
    model = RingDP(models.build("mlp").double(), weight="samples")
    size = [3, 1][dist.get_rank()]
    x, y = data(4, torch.float64)
    mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 4)
    with model.no_sync():
        mean_loss(model, x[mine], y[mine]).backward()
    list(model.parameters())[-1].requires_grad_(False)
    model.set_weight(size)
    mean_loss(model, x[mine], y[mine]).backward()
    for ours, theirs in zip(grads(model), reference("mlp", 4, torch.float64), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@on_ranks()
def test_discarded_micro_batches_do_not_count() -> None:
    """Gradients of micro-batches that zero_grad has removed do not count in the weights of the next ones."""
    model = RingDP(models.build("mlp").double(), weight="samples")
    expected = reference("mlp", 8, torch.float64)
    for set_to_none in (True, False):
        with model.no_sync():
            mean_loss(model, *data(5 if dist.get_rank() == 0 else 9, torch.float64)).backward()
        model.zero_grad(set_to_none=set_to_none)
        backward(model, [[2, 4], [2]], torch.float64)
        close(model, expected, 1e-12)
        model.zero_grad()


@on_ranks((1, 2))
def test_all_batches_are_empty() -> None:
    model = RingDP(models.build("mlp"), weight="samples", bucket_cap_mb=0.001)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            mean_loss(model, torch.zeros(0, 12), torch.zeros(0, 5)).backward()
            assert all(not gradient.any() for gradient in grads(model))
            assert len(grads(model)) == len(list(model.parameters()))
    assert [str(one.message).count("weigh nothing") for one in told].count(1) == 1


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf")])
@on_ranks(3, backend=backends())
def test_an_invalid_weight_is_an_error_on_all_ranks(weight: float) -> None:
    model = RingDP(models.build("mlp"), weight="call")
    bad = dist.get_world_size() - 1
    x, y = data(4, torch.float32)
    model.set_weight(weight if dist.get_rank() == bad else 4)
    if dist.get_rank() == bad:
        with pytest.raises(InvalidArgumentError, match=f"not {weight:g}"):
            model(x)
    else:
        loss = mean_loss(model, x, y)
        with pytest.raises(MismatchError) as caught:
            loss.backward()
        assert caught.value.peer == bad
    model.set_weight(4)
    with pytest.raises(Exception, match="weight of a batch must be"):  # the ranks no longer agree: nobody goes on
        model(x)


@on_ranks(1)
def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        RingDP(models.build("mlp"), weight="tokens")
    plain = RingDP(models.build("mlp"))
    with pytest.raises(InvalidStateError):
        plain.set_weight(3)
    model = RingDP(models.build("mlp"), weight="call")
    with pytest.raises(InvalidStateError):
        model(torch.zeros(2, 12))
    for wrong in ("many", torch.zeros(2), None):
        with pytest.raises(InvalidArgumentError):
            model.set_weight(wrong)  # type: ignore[arg-type]
    model.set_weight(torch.tensor(2))
    model(torch.zeros(2, 12))
    with torch.no_grad():
        model(torch.zeros(2, 12))  # evaluation needs none
    other = RingDP(models.build("mlp"), weight="samples")
    with pytest.raises(InvalidStateError, match="went through no output of RingDP's forward"):
        other.module(torch.zeros(2, 12)).sum().backward()
    counting = RingDP(models.build("mlp"), weight="samples")
    with pytest.raises(InvalidArgumentError):
        counting(torch.tensor(1.0))


def different_modes() -> None:
    RingDP(models.build("mlp"), weight="samples" if dist.get_rank() else None)


def test_ranks_that_weigh_differently_are_told() -> None:
    with pytest.raises(RankFailed, match="RingDP's weight is the default on rank 0 and samples on rank 1"):
        run_ranks(different_modes, backend="ring")


@on_ranks()
def test_two_forwards_in_one_backward() -> None:
    """Two forwards in one backward count once; two of different weight are an error."""
    model = RingDP(models.build("mlp").double(), weight="samples")
    size = [6, 2][dist.get_rank()]
    x, y = data(8, torch.float64)
    mine = slice(0, 6) if dist.get_rank() == 0 else slice(6, 8)
    expected = [2 * g for g in reference("mlp", 8, torch.float64)]
    (mean_loss(model, x[mine], y[mine]) + mean_loss(model, x[mine], y[mine])).backward()
    close(model, expected, 1e-12)
    model.zero_grad()
    with model.no_sync():
        loss = mean_loss(model, x[mine], y[mine])
        model.set_weight(size + 1)
        other = mean_loss(model, x[mine], y[mine])
        with pytest.raises(InvalidArgumentError, match="two forwards of different weight"):
            (loss + other).backward()


@on_ranks(backend=backends())
def test_a_backward_that_averages_on_demand() -> None:
    """Pipeline schedules: all forwards first, then the backwards, the last of which is told to average."""
    model = RingDP(models.build("mlp").double(), weight="samples")
    split = [[5, 1], [2]]
    with model.no_sync():
        outputs = [(model(x), y, last) for x, y, last in micro_batches(split, torch.float64)]
        for output, y, last in outputs:
            if last:
                model.reducer.prepare_for_backward([output])
            nn.functional.mse_loss(output, y).backward()
    close(model, reference("mlp", 8, torch.float64), 1e-12)


@pytest.mark.ci
@on_ranks()
def test_compiled_model() -> None:
    model: Any = torch.compile(RingDP(models.build("mlp").double(), weight="samples"), backend="aot_eager")
    for split in ([[6], [2]], [[3, 1], [4]]):
        model.zero_grad()
        backward(model, split, torch.float64)
        close(model, reference("mlp", 8, torch.float64), 1e-12)
