"""The key-value store on several ranks: equal to RingDP with the same optimizer, same bits and errors on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp import compression
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.kvstore.threshold import Threshold
from ringdp.testing import simulate
from tests.train import kvstore_cases as cases
from tests.train.harness import backends, errors_of, on_ranks, run_ranks

_REFUSED = (
    *("value", "small", "scale", "step", "batch size"),
    *("keys", "urgent", "row numbers", "rows of floats", "rate", "two bits", "no model"),
)
HOWS = ("ringdp", "trainer", "gradients", "attached", "keys")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.ci), 2, pytest.param(3, marks=pytest.mark.ci)])
def test_it_trains_as_ringdp_with_the_same_optimizer(ranks: int, dtype: torch.dtype, optimizer: str) -> None:
    kind, numbers = OPTIMIZERS[optimizer]
    results = run_ranks(cases.train_all, HOWS, kind, numbers, dtype, world_size=ranks, backend="ring")
    for how in HOWS:
        for other in results[1:]:
            assert same(other[how], results[0][how]), f"{how}: the ranks differ"
    for how in HOWS[1:]:
        if ranks <= 2:
            assert same(results[0][how], results[0]["ringdp"]), how
        for x, y in zip(results[0][how], results[0]["ringdp"], strict=True):
            assert (x - y).abs().max() <= (1e-14 if dtype == torch.float64 else 1e-6), how


@pytest.mark.parametrize(
    "spec", ["int8", "int4", "bf16", "topk", "sparse2", {"type": "2bit", "threshold": 0.5}, {"type": "1bit"}]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_codes_are_those_of_a_simulation(ranks: int, spec: Any) -> None:
    compressor = Threshold(bits=int(spec["type"][0])) if isinstance(spec, dict) else compression.get(spec)
    gradients = [[cases.gradient(step, rank) for rank in range(ranks)] for step in range(3)]
    means = simulate(compressor, gradients, name="w").means
    expected, value = [], torch.zeros(70, 50)
    for mean in means:
        value = value.add(mean, alpha=-1.0)
        expected.append(value)
    for result in run_ranks(cases.compressed, spec, 3, world_size=ranks, backend="ring"):
        assert same(result, expected)


def test_two_bits_leave_the_rest_for_the_next_step() -> None:
    simulated = simulate(Threshold(0.5), [[torch.full((40,), 0.3)] * 2 for _ in range(4)])
    assert [float(mean[0]) for mean in simulated.means] == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize(("ranks", "backend"), [(1, "ring"), (3, "ring"), (3, "gloo")])
def test_pushes_are_added_up(ranks: int, backend: str) -> None:
    results = run_ranks(cases.sums, world_size=ranks, backend=backend)
    everyone = [cases.values(50 + rank) for rank in range(ranks)]
    for rank, result in enumerate(results):
        for name, value in cases.values(0).items():
            assert torch.equal(result["begun"][name], value)
            total = torch.stack([2.0 * one[name].double() for one in everyone]).sum(0)
            assert torch.allclose(result["pushed"][name].double(), total, atol=1e-5)
            assert torch.equal(result["pushed"][name], results[0]["pushed"][name])
        assert torch.allclose(result["odd"], torch.stack([one["odd"] for one in everyone]).sum(0), atol=1e-5)
        assert torch.equal(result["number"], torch.full((5,), 2.0 * ranks))
        assert torch.equal(result["rows"], result["odd"][torch.arange(rank + 1) * 3])


@on_ranks((1, 3), backend=backends())
def test_large_keys_are_added_up_wherever_they_lie() -> None:
    for reduce in ("sum", "mean"):
        cases.large_sums(reduce)


def test_an_updater_gets_the_owners_slices() -> None:
    for result in run_ranks(cases.updater, world_size=3, backend="ring"):
        assert torch.equal(result, torch.full((90, 90), 13.0))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ["'w'", "[30, 40]", "[30, 41]"]),
        ("dtype", ["'w'", "float32", "float64"]),
        ("missing", ["no key 'w'", "float32 [30, 40]"]),
        ("optimizer", ["SGD", "Adam"]),
        ("numbers", ["lr=0.1", "lr=0.5"]),
        ("later lr", ["lr=0.2", "lr=0.3"]),
        ("compression", ["compression: none", "Int8"]),
        ("type", ["dist_sync", "dist_device_sync"]),
        ("pushed", ["push 'first'", "push 'w'"]),
        ("priority", ["push"]),
        ("value", ["cannot take 'w' float32 [4]"]),
        ("scale", ["pushpull: scale must be a finite number, not nan"]),
        ("step", ["step: scale must be a finite number, not inf"]),
        ("batch size", ["batch_size must be a finite number above 0, not nan"]),
        ("small", ["pushpull: key 'first'", "cannot take 'first' float32 [4]"]),
        ("keys", ["push: a key is a text or a whole number, or keys are a list, not None"]),
        ("urgent", ["push: a priority is a whole number, not 'high'"]),
        ("row numbers", ["row_sparse_pull: key 'w' [30, 40]: 2 tensors need as many row_ids, not 1"]),
        ("rows of floats", ["row_sparse_pull: key 'w' [30, 40]: row_ids are int32 or int64, not float32"]),
        ("no model", ["attach takes a torch.nn.Module, not list"]),
        ("rate", ["a learning rate must be a finite number from 0 on, not '0.1'"]),
        ("two bits", ["threshold must be a finite number above 0, not 'high'"]),
        ("barrier", ["barrier", "push"]),
        ("updater", ["the updater cannot"]),
    ],
)
def test_ranks_that_differ_all_get_an_error(how: str, words: list[str]) -> None:
    for rank, error in enumerate(errors_of(cases.disagree, how, backend="ring", timeout_s=30)):
        expected: type[Exception] = InvalidArgumentError if how in _REFUSED and rank == 1 else MismatchError
        if how == "updater" and rank == 1:
            expected = OverflowError
        assert type(error) is expected, error
        for word in words:
            assert word in str(error)


def test_a_state_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "optimizer")
    state = run_ranks(cases.saved_state, 3, path, world_size=3, backend="ring")[0]
    expected = run_ranks(cases.go_on, 5, 0, None, world_size=1, backend="ring")[0]
    for ranks in (1, 2):
        for result in run_ranks(cases.go_on, 2, 3, state, world_size=ranks, backend="ring"):
            for name, value in expected["values"].items():
                assert torch.allclose(result["values"][name], value, atol=1e-6)
            assert float(result["optimizer"]["state"]["odd"]["numbers"]["step"]) == 5.0
    for loaded in run_ranks(cases.load_file, path, world_size=2, backend="ring"):
        assert loaded["numbers"]["lr"] == 0.1
        for name, entry in state["optimizer"]["state"].items():
            for field, whole in entry["tensors"].items():
                assert torch.equal(loaded["state"][name]["tensors"][field], whole)


def test_ranks_that_load_different_states_hear_of_it() -> None:
    for error in errors_of(cases.load_differently, backend="ring"):
        assert type(error) is MismatchError
        assert "the loaded state: checksum" in str(error)


def test_each_rank_keeps_its_share_of_the_optimizer() -> None:
    whole = sum(torch.Size(shape).numel() for shape in cases.SHAPES.values())
    for ranks in (1, 4):
        for held, owned in run_ranks(cases.bytes_of_states, world_size=ranks, backend="ring"):
            assert held == 2 * owned
            assert owned <= whole / ranks + 64 * ranks * len(cases.SHAPES)


def test_an_attached_model_accumulates_and_discards() -> None:
    ranks = 2
    results = run_ranks(cases.attached_forms, world_size=ranks, backend="ring")
    model = cases.make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(step: int, factor: float) -> None:
        for rank in range(ranks):
            (model(cases.batch(step, rank, torch.float64)).square().mean() * factor / ranks).backward()

    backward(0, 1.0)
    backward(1, 1.0)
    optimizer.step()
    accumulated = [it.detach().clone() for it in model.parameters()]
    optimizer.zero_grad()
    backward(3, 0.5)
    optimizer.step()
    for result in results:
        assert torch.equal(result["last"][0], torch.ones(5, dtype=torch.float64))  # without gradient
        for part, expected in (("accumulated", accumulated), ("last", list(model.parameters()))):
            for x, y in zip(result[part][1:], expected, strict=True):
                assert (x - y).abs().max() < 1e-14
        assert result["twice"][0] == "InvalidStateError"
        assert "no_sync" in result["twice"][1]


def test_a_model_trains_over_gloo() -> None:
    kind, numbers = OPTIMIZERS["adam"]
    results = run_ranks(
        cases.train_all, ("ringdp", "trainer", "attached"), kind, numbers, torch.float64, world_size=2, backend="gloo"
    )
    for how in ("trainer", "attached"):
        assert same(results[0][how], results[1][how])
        for x, y in zip(results[0][how], results[0]["ringdp"], strict=True):
            assert (x - y).abs().max() < 1e-14
