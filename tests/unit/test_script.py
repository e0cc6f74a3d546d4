"""ringdp/script.py and ringdp/data/prepared.py: a script for one process on several ranks, sample by sample."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import ringdp
from ringdp.data import BalancedSampler
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from tests.train.harness import errors_of, on_ranks, run_ranks
from tests.unit import doc_pages

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Fewer than the ranks, a multiple of them and of the batch, one more, a prime.
SAMPLES = (1, 2, 24, 25, 37)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


class Subclass(DataLoader[Any]):
    """Takes an argument that DataLoader does not know, as those of PyTorch Geometric do."""

    def __init__(self, dataset: Any, extra: str, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.extra = extra


def samples(loader: DataLoader[Any]) -> list[int]:
    return [int(number) for batch in loader for number in batch.flatten()]


def every_pass() -> list[dict[str, Any]]:
    found = []
    for count in SAMPLES:
        for shuffle in (False, True):
            loader = ringdp.prepare(DataLoader(Numbers(count), batch_size=4, shuffle=shuffle))
            passes = [samples(loader) for _ in range(3)]
            exact = torch.cat([ringdp.gather(batch, loader) for batch in loader]).tolist()
            whole = ringdp.gather(torch.cat(list(loader)), loader).tolist()
            found.append({"passes": passes, "batches": len(loader), "exact": exact, "whole": whole})
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_is_given_and_all_ranks_have_as_many_batches(ranks: int) -> None:
    results = run_ranks(every_pass, world_size=ranks, backend="ring")
    cases = [(count, shuffle) for count in SAMPLES for shuffle in (False, True)]
    for number, (count, shuffle) in enumerate(cases):
        per_rank = [result[number] for result in results]
        assert len({one["batches"] for one in per_rank}) == 1
        for number_of_pass in range(3):
            given = [one["passes"][number_of_pass] for one in per_rank]
            assert {it for part in given for it in part} == set(range(count))
            assert len({len(part) for part in given}) == 1
            assert sum(map(len, given)) - count < ranks
        for one in per_rank:
            for gathered in (one["exact"], one["whole"]):
                assert gathered == list(range(count)) if not shuffle else sorted(gathered) == list(range(count))
        if shuffle and count > 2:  # each pass has an order of its own
            first, second, third = per_rank[0]["passes"]
            assert first != second != third != first


def test_one_process_without_a_group_has_the_same_batches_as_one_rank() -> None:
    alone = every_pass()
    assert not dist.is_initialized()
    assert run_ranks(every_pass, world_size=1, backend="ring") == [alone]
    for number, result in enumerate(alone):
        assert sorted(result["passes"][0]) == list(range(SAMPLES[number // 2]))


@on_ranks(2)
def test_settings_of_the_loader_stay() -> None:
    def together(batch: list[int]) -> Tensor:
        return torch.tensor(batch) + 1000

    given = Subclass(
        Numbers(10), "mine", batch_size=3, shuffle=True, drop_last=True, num_workers=1, collate_fn=together,
        persistent_workers=True, prefetch_factor=3,
    )  # fmt: skip
    loader = ringdp.prepare(given)
    assert isinstance(loader, DataLoader)
    assert (loader.extra, loader.num_workers, loader.prefetch_factor, loader.batch_size) == ("mine", 1, 3, 3)
    assert loader.persistent_workers
    assert loader.collate_fn is together
    assert ringdp.prepare(loader) is loader
    first, second = list(loader), list(loader)
    assert [len(batch) for batch in first] == [3]  # of 5
    assert min(first[0]) >= 1000
    assert not first[0].equal(second[0])
    assert isinstance(given.sampler, RandomSampler)  # the given loader is as it was
    own = ringdp.prepare(DataLoader(Numbers(5), batch_size=None))
    taken = [int(it) for it in own]
    assert taken == [[0, 2, 4], [1, 3, 0]][dist.get_rank()]
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    assert samples(ringdp.prepare(DataLoader(Numbers(5), batch_sampler=batches))) == taken


@on_ranks(2)
def test_a_sampler_for_this_rank_is_kept_and_the_script_may_set_its_epoch() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(20), seed=3)
    loader = ringdp.prepare(DataLoader(Numbers(20), batch_size=5, sampler=sampler))
    assert loader.sampler is sampler
    orders = [samples(loader) for _ in range(2)]
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    assert samples(loader) == orders[0]
    assert samples(loader) == orders[1]
    loader.set_epoch(0)
    assert samples(loader) == orders[0]
    loader.set_epoch(0)
    assert samples(loader) == orders[0]
    balanced = BalancedSampler(20, 7, balance=[1, 3])
    batches = ringdp.prepare(DataLoader(Numbers(20), batch_sampler=balanced))
    passes = [torch.cat([ringdp.gather(batch, batches) for batch in batches]).tolist() for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(20))
    assert passes[0] != passes[1]


class Own(SequentialSampler):
    rank, num_replicas = 0, 2


def refused(kind: str) -> None:
    data = Numbers(8)
    choices: dict[str, dict[str, Any]] = {
        "stream": {"dataset": Stream()},
        "weighted": {"dataset": data, "sampler": WeightedRandomSampler([1.0] * 8, 8)},
        "replacement": {"dataset": data, "sampler": RandomSampler(data, replacement=True)},
        "batches": {"dataset": data, "batch_sampler": [[0, 1], [2]]},
        "elsewhere": {"dataset": data, "sampler": DistributedSampler(data, num_replicas=4, rank=1)},
        "own": {"dataset": data, "sampler": Own(data)},
        "rows": {"dataset": data, "batch_size": 4},
    }
    loader = ringdp.prepare(DataLoader(**choices[kind]))
    for batch in loader:
        ringdp.gather(batch[:1], loader)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stream", "Stream is an IterableDataset.*ringdp.world_size"),
        ("weighted", "WeightedRandomSampler .* is not known.*BalancedSampler"),
        ("replacement", "RandomSampler .* is not known"),
        ("batches", "list .* is not known"),
        ("elsewhere", "DistributedSampler is for rank 1 of 4, and this is rank 0 of 1"),
        ("own", "Own is for rank 0 of 2, and this is rank 0 of 1"),
        ("rows", "the ranks give 1 rows, and the batch has 4 samples"),
    ],
)
def test_what_cannot_be_divided_is_refused_on_one_rank_too(kind: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        refused(kind)


def different(what: str) -> None:
    rank = dist.get_rank()
    ringdp.prepare(
        DataLoader(Numbers(8 + (rank if what == "samples" else 0)), batch_size=2, shuffle=True),
        seed=rank if what == "seed" else 0,
    )


@pytest.mark.parametrize(("what", "values"), [("samples", ("8", "9")), ("seed", ("0", "1"))])
def test_ranks_with_other_data_or_seeds_are_refused_on_all(what: str, values: tuple[str, str]) -> None:
    for rank, error in enumerate(errors_of(different, what, backend="ring")):
        assert isinstance(error, MismatchError)
        mine, theirs = values[rank], values[1 - rank]
        assert f"rank {rank} has {what}: {mine} and rank {1 - rank} {what}: {theirs}." in str(error)


@on_ranks(2)
def test_the_loaders_generator_is_the_seed() -> None:
    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return samples(ringdp.prepare(DataLoader(Numbers(20), batch_size=4, shuffle=True, generator=generator)))

    assert order(1) == order(1) != order(2)


@on_ranks(2)
def test_a_model_is_wrapped_beside_loaders() -> None:
    linear = torch.nn.Linear(2, 1)
    model, loader = ringdp.prepare(linear, DataLoader(Numbers(4)))
    assert isinstance(model, ringdp.RingDP)
    assert model.module is linear
    assert len(loader) == 2
    assert ringdp.prepare(model) is model
    with pytest.raises(InvalidArgumentError, match="not SGD; optimizers and schedules stay as they are"):
        ringdp.prepare(torch.optim.SGD(model.parameters()))


@on_ranks(3, backend=["ring", "gloo"])
def test_rows_of_every_type_come_in_the_order_of_the_ranks() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        rows = torch.full((rank, 2), float(rank), requires_grad=dtype == torch.float32).to(dtype)
        expected = torch.tensor([[1, 1], [2, 2], [2, 2]]).to(dtype)
        found = ringdp.gather(rows)
        assert found.dtype == dtype
        assert not found.requires_grad
        assert found.equal(expected)
    assert ringdp.gather(rank == 1).tolist() == [False, True, False]
    assert ringdp.gather(torch.tensor(1.5)).tolist() == [1.5] * 3
    assert ringdp.gather(torch.empty(0, 3)).shape == (0, 3)
    assert ringdp.gather(torch.arange(6).reshape(2, 3).t()[:1]).tolist() == [[0, 3]] * 3  # strides of its own


def rows_that_differ(kind: str) -> None:
    rank = dist.get_rank()
    by_type = torch.ones(2, dtype=(torch.int32, torch.int64)[rank])
    ringdp.gather({"shape": torch.ones(2, 2 + rank), "type": by_type}[kind])


@pytest.mark.parametrize("kind", ["shape", "type"])
def test_rows_that_do_not_fit_are_refused_on_all(kind: str) -> None:
    for error in errors_of(rows_that_differ, kind, backend="ring"):
        assert isinstance(error, MismatchError)
        assert error.peer == 1
        assert "on rank 0 and of" in str(error)


def test_gather_refuses_what_is_no_row() -> None:
    with pytest.raises(InvalidArgumentError, match="must be a tensor or a number, not list"):
        ringdp.gather([1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"one that ringdp\.prepare returned, not DataLoader"):
        ringdp.gather(torch.ones(1), DataLoader(Numbers(2)))
    loader = ringdp.prepare(DataLoader(Numbers(2)))
    with pytest.raises(InvalidStateError, match="has not given a batch yet"):
        ringdp.gather(torch.ones(1), loader)


def printed(folder: str) -> None:
    path = Path(folder, "order")
    with ringdp.main_first():
        number = len(path.read_text()) if path.exists() else 0
        with path.open("a") as file:
            file.write("0" if dist.get_rank() == 0 else "x")
    assert (number == 0) == (dist.get_rank() == 0)
    with open(Path(folder, f"printed_{dist.get_rank()}"), "w") as out:
        ringdp.print("a", 1, sep="-", file=out)


def test_rank_0_prints_and_goes_first(tmp_path: Path) -> None:
    run_ranks(printed, str(tmp_path), world_size=3, backend="ring")
    assert [Path(tmp_path, f"printed_{rank}").read_text() for rank in range(3)] == ["a-1\n", "", ""]
    assert Path(tmp_path, "order").read_text() == "0xx"


def first_fails() -> None:
    with ringdp.main_first():
        raise ValueError(f"no network on rank {dist.get_rank()}")


def test_a_failure_of_the_first_is_an_error_on_all() -> None:
    zero, one = errors_of(first_fails, backend="ring")
    assert (type(zero), str(zero)) == (ValueError, "no network on rank 0")
    assert isinstance(one, MismatchError)
    assert "rank 0, which went first, raised ValueError: no network on rank 0" in str(one)


def test_without_a_launcher_they_are_pythons_own(capsys: pytest.CaptureFixture[str]) -> None:
    with ringdp.main_first():
        ringdp.print("here")
    assert capsys.readouterr().out == "here\n"
    assert not dist.is_initialized()


def test_before_init_the_launchers_number_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ringdp.print("not seen")
    assert capsys.readouterr().out == ""
    with pytest.raises(InvalidStateError, match=r"call ringdp.init\(\) first"):
        ringdp.prepare(DataLoader(Numbers(2)))


def test_init_returns_the_device() -> None:
    try:
        assert ringdp.init() == ringdp.device() == torch.device("cpu")
    finally:
        ringdp.shutdown()


MOST_CHANGED = 6


def changed_lines() -> list[str]:
    """Of the example for several ranks, against that for one process; first texts and blank lines do not count."""
    texts = [Path(ROOT, "examples", name).read_text() for name in ("one_process.py", "n_processes.py")]
    alone, ranks = ([line for line in text.split('"""', 2)[2].splitlines() if line] for text in texts)
    changed = [line for line in difflib.ndiff(alone, ranks) if line[0] in "-+"]
    assert sum(line[0] == "-" for line in changed) <= sum(line[0] == "+" for line in changed)
    return [line[2:] for line in changed if line[0] == "+"]


def test_a_script_for_one_process_needs_six_changed_lines() -> None:
    changed = changed_lines()
    assert len(changed) <= MOST_CHANGED
    used = set(re.findall(r"ringdp\.(\w+)", " ".join(changed)))
    assert used == {"init", "prepare", "gather", "print", "checkpoint"}


def test_the_page_shows_the_changed_lines() -> None:
    (shown,) = doc_pages.blocks("docs/how-to/from_one_process.md", "diff")
    assert [line[1:] for line in shown.text.splitlines() if line[0] == "+"] == changed_lines()


@pytest.mark.ci
def test_the_changed_script_trains_on_two_ranks(tmp_path: Path) -> None:
    quick = ["--width=4", "--epochs=1", "--lr=0.02"]
    command = [sys.executable, "-m", "ringdp.launch", "--nproc-per-node", "2", str(ROOT / "examples/n_processes.py")]
    done = subprocess.run(
        [*command, *quick], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"epoch 0: loss \d\.\d{4}, accuracy 0\.\d{4}", done.stdout)) == 1
    (saved,) = Path(tmp_path, "resnet").glob("*.pt")
    assert "head.weight" in torch.load(saved, weights_only=True)["shared"]
