"""BalancedSampler with RingDP on ranks that are processes: agreement, DataLoader workers, the loss of one process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringdp
from ringdp.data import watched as watched_module
from ringdp.data.order import GlobalBatches
from tests.helpers import logged
from tests.train.harness import backends, default_group, each, on_ranks, ring_is_built, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

SAMPLES, BATCH = 700, 20


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs.square().sum(1, keepdim=True).tanh())


class Net(nn.Module):
    """Remembers how many samples its last forward got."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        self.samples = len(x)
        return self.layers(x)


@contextlib.contextmanager
def steps_take(net: Net, seconds: float) -> Iterator[None]:
    """The sampler hears of so many seconds for each sample, and of 0.1 ms for each step, whatever a step takes here.

    What it measures has to be a time within this block all the same.
    """
    began = time.monotonic()
    measure = watched_module.WatchedSteps.seconds

    def told(watched: Any) -> float | None:
        measured = measure(watched)
        assert measured is None or 0 < measured < time.monotonic() - began
        return None if measured is None else 1e-4 + seconds * net.samples

    with mock.patch.object(watched_module.WatchedSteps, "seconds", told):
        yield


def train(
    epochs: int,
    seconds: list[float],
    options: dict[str, Any],
    loading: dict[str, Any],
    state: Any = None,
    stop: int = -1,
) -> dict[str, Any]:
    """Each step's samples of this rank and their loss, with the state at the end."""
    if loading.get("num_workers"):
        gc.collect()  # a forked worker that collects a gloo group of an earlier test waits for its threads, or crashes
    group = default_group()
    dataset = data()
    sampler = ringdp.data.BalancedSampler(dataset, BATCH, **options)
    net = Net()
    model = ringdp.RingDP(net)
    sampler.watch(model)
    if state is not None:
        sampler.load_state_dict(state["sampler"])
        model.load_state_dict(state["model"])
    loader: Any = DataLoader(dataset, batch_sampler=sampler, **loading)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    taken: list[list[int]] = []
    losses: list[float] = []
    with steps_take(net, seconds[group.rank()]):
        while sampler.epoch < epochs and len(taken) != stop:
            for indices, x, y in loader:
                total = BATCH  # what weight="samples" does: the sum over ranks, and not the mean of means
                loss = (model(x) - y).square().sum() * group.size() / total
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                taken.append(indices.tolist())
                losses.append(float(loss.detach()) / group.size())
                if len(taken) == stop:
                    break
            if sampler.state_dict()["epoch"] >= epochs:
                break
    return {
        "taken": taken,
        "losses": losses,
        "counts": sampler.counts,
        "state": {"sampler": sampler.state_dict(), "model": {k: v.clone() for k, v in model.state_dict().items()}},
    }


WORKERS = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "fork"}


def alone(epochs: int) -> tuple[list[list[int]], list[float]]:
    """One process, without RingDP: the batches and losses."""
    dataset, model, batches = data(), Net(), GlobalBatches(SAMPLES, BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    taken, losses = [], []
    for epoch in range(epochs):
        order = batches.order(epoch)
        for position in range(batches.count):
            indices = batches.batch(order, position)
            _, x, y = dataset[indices]
            loss = (model(x) - y).square().sum() / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken.append(indices)
            losses.append(float(loss.detach()))
    return taken, losses


def together_of(results: list[dict[str, Any]]) -> list[list[int]]:
    """All ranks' samples of each step."""
    return [list(itertools.chain(*parts)) for parts in zip(*(one["taken"] for one in results), strict=True)]


class Small(nn.Module):
    """Raises for a batch that is too large, and has a buffer that each forward makes rank 0's."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layers = Net()
        self.register_buffer("calls", torch.zeros(1))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise MemoryError
        return self.layers(x)


def survives(most: list[int], steps: int) -> tuple[list[list[float]], list[int]]:
    """The gradients of each step, which are those of one process, and the sizes of this rank's batches."""
    group, dataset = default_group(), data()
    sampler = ringdp.data.BalancedSampler(dataset, BATCH, balance="equal")
    model = ringdp.RingDP(Small(most[group.rank()]), weight="samples", reproducible=True)
    sampler.watch(model)
    gradients, sizes = [], []
    for _, (_, x, y) in zip(range(steps), DataLoader(dataset, batch_sampler=sampler), strict=False):
        model.zero_grad()
        try:
            nn.functional.mse_loss(model(x), y).backward()
        except MemoryError:
            sampler.out_of_memory()
            (x1, x2), (y1, y2) = x.split([4, len(x) - 4]), y.split([4, len(x) - 4])
            with model.no_sync():
                nn.functional.mse_loss(model(x1), y1).backward()
            nn.functional.mse_loss(model(x2), y2).backward()
        sizes.append(len(x))
        gradients.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    return gradients, sizes


def test_a_rank_survives_that_it_runs_out_of_memory() -> None:
    results = run_ranks(survives, [20, 7], 20, world_size=2, backend="ring")
    sizes = [one[1] for one in results]
    assert sizes[1][0] == 10
    assert sizes[1][-1] == 5
    assert {a + b for a, b in zip(*sizes, strict=True)} == {BATCH}
    dataset, model = data(), Small(BATCH)
    batches = GlobalBatches(SAMPLES, BATCH)
    for position, (ours, theirs) in enumerate(zip(results[0][0], results[1][0], strict=True)):
        _, x, y = dataset[batches.batch(batches.order(0), position)]
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        wanted = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        assert ours == theirs == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("backend", "loading"), [(b, WORKERS if b == "ring" else {}) for b in backends()], ids=backends()
)
def test_losses_are_those_of_one_process_while_the_split_changes(backend: str, loading: dict[str, Any]) -> None:
    results = run_ranks(train, 2, [0.0004, 0.0001], {}, loading, world_size=2, backend=backend)
    taken, losses = alone(2)
    assert together_of(results) == taken
    together = [sum(parts) for parts in zip(*(one["losses"] for one in results), strict=True)]
    assert together == pytest.approx(losses, rel=1e-12)
    parts = {tuple(map(len, step)) for step in zip(*(one["taken"] for one in results), strict=True)}
    assert (10, 10) in parts
    assert len(parts) > 1
    assert results[0]["counts"] == results[1]["counts"] == (4, 16)  # by 1e-4 + 4e-4 * 4 and 1e-4 + 1e-4 * 16 seconds


def test_a_state_goes_on_at_another_number_of_ranks() -> None:
    before = run_ranks(train, 2, [0.0003, 0.0], {}, WORKERS, None, 30, world_size=2, backend="ring")
    after = run_ranks(train, 2, [0.0, 0.0, 0.0], {}, {}, before[0]["state"], world_size=3, backend="ring")
    taken, losses = alone(2)
    assert together_of(before) + together_of(after) == taken
    together = [sum(p) for run in (before, after) for p in zip(*(one["losses"] for one in run), strict=True)]
    assert together == pytest.approx(losses, rel=1e-12)


OTHER_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, r"seed is 0 on rank \d and 1 on rank \d|seed is 1 on rank \d and 0 on rank \d"),
    ({"global_batch": 20}, "global_batch is"),
    ({"dataset": 102}, "the dataset's length is"),
    ({"limits": ringdp.data.Limits(most=6)}, r"most is \((10, 10|6, 6)\) on rank"),
    ({"balance": [1, 2]}, "balance is"),
    ({"cost": len}, "cost given is"),
    ({"balance": "fast"}, "balance must be 'speed', 'equal'"),
]


def ranks_with_other_arguments_are_told() -> None:
    for options, words in OTHER_ARGUMENTS:
        mine: dict[str, Any] = options if default_group().rank() else {}
        with pytest.raises(ValueError, match=words):
            ringdp.data.BalancedSampler(**({"dataset": 100, "global_batch": 10} | mine))


def the_model_and_the_sampler_have_the_same_ranks() -> None:
    own = [dist.new_group([rank]) for rank in range(2)][default_group().rank()]
    model = ringdp.RingDP(Net(), process_group=own)
    with pytest.raises(ValueError):
        ringdp.data.BalancedSampler(SAMPLES, BATCH).watch(model)
    ringdp.data.BalancedSampler(SAMPLES, BATCH, group=own).watch(model)


@pytest.mark.parametrize("backend", backends())
def test_two_ranks(backend: str) -> None:
    run_ranks(each, ranks_with_other_arguments_are_told, the_model_and_the_sampler_have_the_same_ranks, backend=backend)


@on_ranks(2)
def test_only_a_model_without_weights_is_warned_of() -> None:
    for weight in ("samples", "call", None):
        with logged("ringdp.data") as lines:
            sampler = ringdp.data.BalancedSampler(data(), BATCH, balance="equal")
            sampler.watch(ringdp.RingDP(nn.Linear(3, 1), weight=weight))
        assert len(lines) == (weight is None and default_group().rank() == 0)
