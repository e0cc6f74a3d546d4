"""The asynchronous key-value store on several ranks: with staleness 0 it has the bits of dist_sync; answers are not
older than they may be; nobody waits for the slowest; memory is bounded; errors name both sides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ringdp.errors import InvalidArgumentError, MismatchError
from tests.helpers import free_port
from tests.train import async_cases as cases
from tests.train.harness import errors_of, on_ranks, run_ranks
from tests.train.kvstore_cases import values

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.ci)])
def test_without_staleness_it_has_the_bits_of_dist_sync(ranks: int, optimizer: str, reduce: str) -> None:
    run_ranks(cases.equal_to_sync, *OPTIMIZERS[optimizer], reduce, world_size=ranks, backend="ring")


@on_ranks(2)
def test_so_has_a_trainer() -> None:
    cases.trainers_are_equal()


@pytest.mark.parametrize("staleness", [0, 4, None])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_plain_training(optimizer: str, staleness: int | None) -> None:
    found, expected = run_ranks(cases.alone, *OPTIMIZERS[optimizer], staleness, world_size=1, backend="ring")[0]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@on_ranks((2, 3))
def test_a_worker_sees_its_own_pushes_and_a_slice_is_whole() -> None:
    cases.own_writes()


@pytest.mark.parametrize("staleness", [1, 4, None])
def test_no_answer_is_older_than_it_may_be(staleness: int | None) -> None:
    steps, slow_s = 12, 0.03
    results = run_ranks(cases.paced, staleness, steps, slow_s, world_size=2, backend="ring")
    (fast_s, ages, held_s), (slowest_s, _, _) = results
    assert slowest_s >= steps * slow_s
    if staleness is None:
        assert held_s < steps * slow_s / 2  # nobody waits
        assert max(ages) > 4
    else:
        assert max(ages) == staleness
        assert fast_s >= (steps - staleness - 1) * slow_s  # but for the staleness the fast one waits


def test_a_slow_owner_slows_its_workers_and_is_named() -> None:
    count = 24  # of 4 MiB for that owner
    (done, waited_s), _ = run_ranks(cases.back_pressure, count, world_size=2, backend="ring")
    assert 1 <= done <= 8  # at most 16 MiB on the way, one push taken, and the link's buffers
    assert waited_s > 0.5


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_push_that_is_not_finite_is_refused_by_name(what: float) -> None:
    for rank, error in enumerate(errors_of(cases.not_a_number, what, backend="ring")):
        assert type(error) is InvalidArgumentError
        for words in ("push: key 'w'", f"of rank {rank}", str(what), "element 513"):
            assert words in str(error)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", ["'w'", "[30, 40]", "[30, 41]"]),
        ("type", ["'v'", "float32", "float64"]),
        ("missing", ["no key 'v'", "float32 [3]"]),
        ("optimizer", ["SGD", "Adam"]),
        ("rate", ["lr=0.1", "lr=0.2"]),
        ("staleness", ["staleness=2", "staleness=3"]),
        ("reduce", ["reduce='sum'", "reduce='mean'"]),
    ],
)
def test_ranks_that_differ_all_get_an_error(how: str, words: list[str]) -> None:
    for error in errors_of(cases.disagree, how, backend="ring", timeout_s=30):
        assert type(error) is MismatchError, error
        for word in words:
            assert word in str(error)


@on_ranks(2)
def test_calls_at_the_wrong_time_are_refused() -> None:
    cases.wrong_calls()


def test_servers_own_everything_and_do_not_work() -> None:
    first, second, pushes = run_ranks(cases.with_servers, 1, world_size=3, backend="ring")
    expected = values(1)
    for step in range(3):
        for name, one in values(10 * step).items():
            expected[name] = expected[name] - (one + values(10 * step + 1)[name])
    assert pushes == 6
    for name, value in expected.items():
        assert torch.allclose(first[name], value, atol=1e-5)
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_save_while_workers_run_loads_at_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    saved = run_ranks(cases.saves, str(tmp_path), world_size=2, backend="ring")[0]
    found = run_ranks(cases.loads, str(tmp_path), saved, world_size=ranks, backend="ring")
    again = run_ranks(cases.loads, str(tmp_path), saved, world_size=2, backend="ring")
    assert [clock for clock, _ in found] == [3] * ranks
    for name, value in again[0][1].items():
        assert torch.allclose(found[0][1][name], value, atol=1e-6)


@on_ranks(2)
def test_states_of_dist_sync_work_here() -> None:
    cases.states("/dev/null")


def test_a_late_update_can_count_less() -> None:
    for values_after in run_ranks(cases.late_updates, world_size=2, backend="ring"):
        assert values_after == [13.0, 13.0]


@pytest.mark.parametrize("wire", ["exact", "int8"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_table_without_staleness_has_the_bits_of_a_synchronous_one(ranks: int, optimizer: str, wire: str) -> None:
    run_ranks(cases.tables_are_equal, optimizer, wire, world_size=ranks, backend="ring")


@pytest.mark.ci  # five programs, each of which imports torch
def test_mxnets_servers_and_scheduler_run_the_same_script(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = root / "tests" / "train" / "mxnet_script.py"
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "PYTHONPATH": str(root),
    }
    processes = {
        f"{role} {number}": subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, **common, "DMLC_ROLE": role} | ({"DMLC_WORKER_ID": number} if role == "worker" else {}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, number in [("scheduler", ""), ("server", "a"), ("server", "b"), ("worker", "0"), ("worker", "1")]
    }
    try:
        said = {name: it.communicate(timeout=120)[1] for name, it in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    for name, process in processes.items():
        assert process.returncode == 0, (name, said[name])
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}  # of workers only
    assert found == {f"trained-{rank}": f"[{rank}, 2, [2.0], [2.0]]" for rank in range(2)}
