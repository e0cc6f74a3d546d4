"""ShardedEmbedding: equal to nn.EmbeddingBag(sparse=True) in one process, over uneven and empty batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringdp import _C
from ringdp.errors import InvalidArgumentError, MismatchError, SystemResourceError
from ringdp.nn import Adagrad, Adam, Growing, Normal, ShardedEmbedding
from ringdp.nn.owners import RowOwners
from tests.train import embedding_cases as cases
from tests.train.harness import errors_of, run_ranks


class RowWiseAdagrad:
    """One number for each row; written from its definition."""

    def __init__(self, table: nn.EmbeddingBag, lr: float, eps: float) -> None:
        self.table, self.lr, self.eps = table, lr, eps
        self.sums = torch.zeros(table.num_embeddings, dtype=table.weight.dtype)

    @torch.no_grad()
    def step(self) -> None:
        assert self.table.weight.grad is not None
        gradient = self.table.weight.grad.coalesce()
        for row, values in zip(gradient.indices()[0], gradient.values(), strict=True):
            self.sums[row] += values.square().mean()
            self.table.weight[row] -= self.lr * values / (self.sums[row].sqrt() + self.eps)


def one_process(optimizer: str, mode: str, dtype: torch.dtype, ranks: int) -> Tensor:
    table = nn.EmbeddingBag.from_pretrained(cases.weight(dtype), freeze=False, mode=mode, sparse=True)
    makers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(table.parameters(), lr=0.1),
        "adagrad": lambda: torch.optim.Adagrad(table.parameters(), lr=0.1, eps=1e-8),
        "adam": lambda: torch.optim.SparseAdam(list(table.parameters()), lr=0.1, eps=1e-8),
        "rowwise_adagrad": lambda: RowWiseAdagrad(table, 0.1, 1e-8),
    }
    chosen = makers[optimizer]()
    for step in range(cases.STEPS):
        table.zero_grad()
        for rank in range(ranks):
            ids, offsets = cases.batch(step, rank)
            if len(offsets):
                (cases.loss_of(table(ids, offsets)) / ranks).backward()
        if table.weight.grad is not None:
            chosen.step()
        elif optimizer == "adam":
            raise AssertionError("Adam counts steps: choose batches of which some rank has one")
    return table.weight.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.ci) for ranks in (1, 3, 4))])
def test_it_equals_one_process(ranks: int, dtype: torch.dtype) -> None:
    results = run_ranks(cases.train_all, dtype, world_size=ranks, backend="ring")
    assert sum(rows for _, rows in (one["sgd", "sum", False] for one in results)) == cases.ROWS
    for optimizer, mode, prefetch in results[0]:
        expected = one_process(optimizer, mode, dtype, ranks)
        for result in results:
            found, rows = result[optimizer, mode, prefetch]
            assert rows <= cases.ROWS // ranks + 1
            error = float((found - expected).abs().max())
            assert error <= (1e-12 if dtype == torch.float64 else 1e-6), (optimizer, mode, prefetch, error)
            assert torch.equal(found, results[0][optimizer, mode, False][0]), "prefetch, or the rank, changes the bits"


@pytest.mark.parametrize(("wire", "tolerance"), [("bfloat16", 0.05), ("int8", 0.05)])
def test_fewer_bytes_are_close(wire: str, tolerance: float) -> None:
    expected = one_process("sgd", "sum", torch.float32, 2)
    results = run_ranks(cases.train, "sgd", "sum", torch.float32, True, wire, world_size=2, backend="ring")
    for found, _ in results:
        assert 0 < (found - expected).abs().max() < tolerance


def test_a_row_keeps_its_scale() -> None:
    rows = torch.randn(40, 9) * torch.logspace(-20, 20, 40).unsqueeze(1)
    rows[3] = 0
    restored = torch.empty(40, 9)
    _C.decode_rows(_C.encode_rows(rows, "int8"), restored, "int8")
    assert ((restored - rows).abs() <= rows.abs().amax(1, keepdim=True) / 254 * 1.001).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 10_000_019])
@pytest.mark.parametrize("ranks", [1, 3])
def test_places_are_a_permutation_that_spreads_neighbours(rows: int, ranks: int) -> None:
    owners = RowOwners(rows, 0, ranks)
    ids = torch.arange(min(rows, 3000))
    places = owners.places(ids)
    assert torch.equal(owners.ids(places), ids)
    assert len(places.unique()) == len(ids)
    if len(ids) == 3000:
        assert torch.bincount(places % ranks).max() < 3000 / ranks * 1.2


def test_rows_begin_alike_for_any_number_of_ranks() -> None:
    expected = run_ranks(cases.initial, world_size=1, backend="ring")[0]
    assert 0.48 < expected.std() < 0.52
    for found in run_ranks(cases.initial, world_size=3, backend="ring"):
        assert torch.equal(found, expected)


def test_files_of_three_ranks_load_at_two_and_one(tmp_path: Path) -> None:
    expected = run_ranks(cases.save, str(tmp_path / "table"), world_size=3, backend="ring")[0]
    assert len(list((tmp_path / "table").iterdir())) == 4
    for ranks in (1, 2, 3):
        for found in run_ranks(cases.load, str(tmp_path / "table"), world_size=ranks, backend="ring"):
            assert (found - expected).abs().max() < 1e-12
    for error in errors_of(cases.load, str(tmp_path / "none"), backend="ring"):
        assert type(error) is SystemResourceError


class PlainTable:
    """A growing table in one process, from its definition: an id that occurs often enough gets a row, one that stays
    away for too long loses it."""

    def __init__(self, admit_after: int, evict_after: int) -> None:
        self.limits = admit_after, evict_after
        self.times: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def occur(self, ids: Tensor, step: int) -> None:
        for one in ids.tolist():
            if step - self.seen.get(one, step) > self.limits[1]:
                self.times[one] = 0
            self.times[one] = self.times.get(one, 0) + 1
            self.seen[one] = step

    def has_row(self, one: int, step: int) -> bool:
        known = one in self.seen and step - self.seen[one] <= self.limits[1]
        return known and self.times[one] >= self.limits[0]


def test_a_growing_table_has_the_same_rows_at_any_number_of_ranks(tmp_path: Path) -> None:
    plain, counts = PlainTable(3, 4), []
    for step in range(14):
        plain.occur(torch.cat([cases.growing_batch(step, part)[0] for part in range(4)]), step)
        counts.append(sum(plain.has_row(one, step + 1) for one in plain.seen))
    assert max(counts) > counts[-1] > 0, "choose batches of which some ids are evicted"
    expected = run_ranks(cases.grow, "adam", False, world_size=1, backend="ring")[0]
    held = torch.tensor([plain.has_row(one, 14) for one in expected["ids"].tolist()])
    assert torch.equal(expected["rows"].abs().sum(1) > 0, held)
    for ranks, prefetch, folder in ((1, True, ""), (3, False, ""), (2, True, str(tmp_path / "two"))):
        for found in run_ranks(cases.grow, "adam", prefetch, folder, world_size=ranks, backend="ring"):
            if not prefetch:  # which counts the next batch with the step
                assert found["count"] == expected["count"] == counts
            assert found["count"][-1] == counts[-1]
            assert (found["rows"] - expected["rows"]).abs().max() < 1e-12
    for ranks in (1, 3):
        for found in run_ranks(cases.reload, str(tmp_path / "two"), world_size=ranks, backend="ring"):
            assert found["count"] == counts[7]
            assert found["rows"].abs().sum(1).count_nonzero() == counts[7]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", [f"{cases.ROWS} x {cases.DIM} ", f"{cases.ROWS} x {cases.DIM + 1} "]),
        ("lr", ["lr=0.1", "lr=0.5"]),
        ("id", ["not a row"]),
        ("step", ["gradients of a sharded embedding"]),
        ("kind", ["cannot make the sharded embedding", "mode must be one of"]),
        ("float ids", ["ids must be integers"]),
        ("offsets", ["offsets must ascend"]),
    ],
)
def test_ranks_that_differ_all_get_an_error(how: str, words: list[str]) -> None:
    for rank, error in enumerate(errors_of(cases.refuse, how, backend="ring", timeout_s=30)):
        if how in ("id", "kind", "float ids", "offsets") and rank == 1:
            assert type(error) is InvalidArgumentError
            assert (f"rows 0 to {cases.ROWS - 1}" if how == "id" else words[-1]) in str(error)
            continue
        assert type(error) is MismatchError, error
        for word in words:
            assert word in str(error)


def test_it_learns_beside_ringdp() -> None:
    for before, after in run_ranks(cases.beside_ringdp, world_size=2, backend="ring"):
        assert before > 0.6
        assert after < 0.45


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Normal, {"std": float("nan")}, "Normal: std must be a number from 0 on, not nan"),
        (Normal, {"seed": 0.5}, "Normal: seed must be a whole number, not 0.5"),
        (Adagrad, {"eps": float("nan")}, "Adagrad: eps must be a number from 0 on"),
        (Adagrad, {"rowwise": 1}, "Adagrad: rowwise must be True or False"),
        (Adam, {"betas": (0.9, float("nan"))}, "Adam: betas must be a number from 0 to below 1"),
        (Adam, {"betas": (0.9,)}, "Adam: betas must be two numbers"),
        (Growing, {"admit_after": 0}, "Growing: admit_after must be a whole number from 1 on"),
        (Growing, {"evict_after": 0}, "Growing: evict_after must be"),
        (ShardedEmbedding, {"lr": float("inf")}, "lr must be a number from 0 on, not inf"),
        (ShardedEmbedding, {"optimizer": "lamb"}, "optimizer must be one of sgd, adagrad"),
        (ShardedEmbedding, {"optimizer": Adam}, "optimizer must be one of sgd, adagrad"),
        (ShardedEmbedding, {"weight": 1.0}, "weight must be a tensor, a Normal or None, not 1.0"),
        (ShardedEmbedding, {"weight": torch.zeros(10, 3)}, "weight is [10, 3], not [10, 4]"),
        (ShardedEmbedding, {"num_embeddings": None, "weight": torch.zeros(10, 4)}, "begins without rows"),
        (ShardedEmbedding, {"num_embeddings": "10"}, "num_embeddings must be a number, a Growing or None, not '10'"),
    ],
)
def test_values_that_cannot_be_used_are_refused(kind: Any, given: dict[str, Any], words: str) -> None:
    if kind is ShardedEmbedding:
        given = {"num_embeddings": 10, "embedding_dim": 4, **given}
    with pytest.raises(InvalidArgumentError, match=re.escape(words)):
        kind(**given)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("eps", "ringdp.nn.Adam(eps=…)"),
        ("betas", "optimizer=ringdp.nn.Adam(betas=…)"),
        ("std", "weight=ringdp.nn.Normal(std=…)"),
        ("seed", "weight=ringdp.nn.Normal(seed=…)"),
        ("admit_after", "num_embeddings=ringdp.nn.Growing(admit_after=…)"),
        ("evict_after", "num_embeddings=ringdp.nn.Growing(evict_after=…)"),
    ],
)
def test_an_argument_that_it_had_names_its_place(name: str, place: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{place} has it")):
        ShardedEmbedding(10, 4, **{name: 1})  # type: ignore[arg-type]


def test_a_state_without_the_rows_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"table": ShardedEmbedding(10, 4)})
    assert len(model.state_dict()) == len(model.state_dict()) == 0
    assert [it.getMessage() for it in caplog.records] == [
        "the rows of table are not in state_dict(): save(folder) writes them, on all ranks"
    ]
