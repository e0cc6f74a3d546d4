"""RingDP trains as torch's DistributedDataParallel does: one table of cases (tests/train/parity/table.py).

Each case runs with DDP on gloo and with RingDP on ring, and in one process where the maths allows; parameters,
gradients (also which are None), buffers and the optimizer's state are compared after several steps, and the bits of all
ranks with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.train import harness
from tests.train.harness import ring_is_built, run_ranks
from tests.train.parity import run
from tests.train.parity.run import Case
from tests.train.parity.table import CASES, FAMILIES

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="RingDP is compared on the ring backend")

_SHOWN = 12

BY_NAME = {case.name: case for case in CASES}


def in_rank(name: str, folder: str, backend: str, kind: str, options: dict[str, Any]) -> tuple[list[str], str]:
    return run.compare(BY_NAME[name], folder, backend=backend, kind=kind, options=options)


_used: set[int] = set()


@pytest.fixture(autouse=True, scope="module")
def _leave_the_groups() -> Iterator[None]:
    yield
    for world in _used:
        run_ranks(run.leave, world_size=world, backend=None)


def check(case: Case, world: int, *, backend: str = "ring", kind: str = "RingDP", **options: Any) -> list[str]:
    """Where the case differs from its references, and whether the ranks differ from each other."""
    _used.add(world)
    folder = harness.folder(world)
    answers = run_ranks(in_rank, case.name, folder, backend, kind, options, world_size=world, backend=None)
    found = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(answers) for text in texts]
    found = found[:_SHOWN] + [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
    if len({digest for _, digest in answers}) > 1:
        found.append("the ranks do not have the same bits")
    return found


def expect_same(name: str, world: int, **how: Any) -> None:
    found = check(BY_NAME[name], world, **how)
    assert not found, "\n".join(found)


def names(world: int) -> list[str]:
    return [case.name for case in CASES if world in case.worlds]


def sample(step: int, offset: int = 0) -> list[str]:
    """Every so many rows."""
    return names(2)[offset::step]


@pytest.mark.parametrize("name", names(2))
def test_two_ranks(name: str) -> None:
    expect_same(name, 2)


@pytest.mark.parametrize("name", names(1))
def test_one_rank(name: str) -> None:
    expect_same(name, 1)


@pytest.mark.parametrize("name", sample(9))
def test_three_ranks(name: str) -> None:
    expect_same(name, 3)


@pytest.mark.parametrize("name", sample(20, 3))
def test_over_gloo(name: str) -> None:
    expect_same(name, 2, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", names(3))
def test_more_ranks(name: str, world: int) -> None:
    expect_same(name, world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", names(2))
def test_everything_over_gloo(name: str, world: int) -> None:
    """The same bits as DDP on two ranks here too: nothing depends on ring."""
    expect_same(name, world, backend="gloo")


WAYS: dict[str, dict[str, Any]] = {
    "a bucket each": {"bucket_cap_mb": 1e-6},
    "one bucket": {"bucket_cap_mb": 1000},
    "gradients of their own": {"gradient_as_bucket_view": False},
    "gradients as views": {"gradient_as_bucket_view": True},
    "unused looked for": {"find_unused_parameters": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", names(2))
def test_every_way(name: str, way: str) -> None:
    """RingDP's settings change nothing of the result; DDP has the row's."""
    case = BY_NAME[name]
    if case.raises or "bucket_cap_mb_list" in case.options:
        pytest.skip("the row is about its settings")
    expect_same(name, 2, **WAYS[way])


# That the comparison can fail.


def expect_difference(name: str) -> None:
    assert check(BY_NAME[name], 2, backend="own", kind="broken"), "nothing was averaged, and nobody noticed"


COMPARABLE = [case.name for case in CASES if case.raises is None and 2 in case.worlds and (case.ddp or case.alone)]


@pytest.mark.parametrize("name", [next(c.name for c in family if c.name in COMPARABLE) for family in FAMILIES])
def test_a_row_of_each_family_can_fail(name: str) -> None:
    expect_difference(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARABLE)
def test_every_row_can_fail(name: str) -> None:
    expect_difference(name)


def test_what_counts_as_a_difference() -> None:
    value = torch.tensor([1.0, -2.0])
    nearly = torch.nextafter(value, torch.tensor(10.0))
    assert run.differences({"a": value}, {"a": value.clone()}, exact=True, rtol=None) == []
    assert run.differences({"a": value}, {"a": nearly}, exact=False, rtol=None) == []
    for there, here in [
        (value, nearly),
        (value, None),
        (value, value.double()),
        (value, value[:1]),
        (value, value.to_sparse()),
        (torch.tensor([1]), torch.tensor([2])),
        (value * float("nan"), value * float("nan")),
        ((1, 2), (2, 1)),
    ]:
        assert len(run.differences({"a": there}, {"a": here}, exact=True, rtol=None)) == 1
    assert run.differences({"a": value}, {}, exact=False, rtol=None) == ["a: only one has it"]
    assert run.differences({"a": value}, {"a": value * 1.001}, exact=False, rtol=None)
    assert run.differences({"a": value + 0j}, {"a": value + 1e-3j}, exact=False, rtol=None)
