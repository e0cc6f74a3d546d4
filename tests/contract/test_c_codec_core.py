"""Codecs from shared libraries in the compressed all-reduce: the bits of the documented order, words when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringdp.errors import InvalidArgumentError, MismatchError
from tests.c_libraries import build
from tests.contract.core_checks import expect_equal
from tests.contract.core_ranks import World, close_worlds, core, world
from tests.contract.test_compressed_core import Case, any_case, check_drawn, large_case
from tests.helpers import need
from tests.registries import CODECS

need("hypothesis")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402

# What the framework makes of the rest, and codes that are longer than any of ringdp's, many short ones above all.
VARIANTS: dict[str, tuple[str, ...]] = {
    "c_all": (),
    "c_made": ("NO_FEEDBACK", "NO_ADD"),
    "c_header": ("HEADER=1000",),
    "c_header_made": ("HEADER=3", "NO_FEEDBACK", "NO_ADD"),
}


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


@pytest.fixture(scope="module", params=VARIANTS)
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return load(tmp_path_factory.mktemp("c"), request.param, *VARIANTS[request.param])


def load(folder: Path, name: str, *macros: str) -> str:
    loaded: str = core.load_codec(str(build(folder, name, *macros)))
    assert loaded == name
    return loaded


@given(**any_case)
@example(**large_case)
@example(layout="3", faults={}, counts=(1,) * 300, feedback=True, factor=1.0, divisor=None, seed=1)
@settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_sections(codec: str, **drawn: Any) -> None:
    check_drawn(codec, **drawn)


def test_the_same_code_in_c_has_the_same_bits(codec: str) -> None:
    for feedback in (False, True):
        theirs = Case(world(3), codec, (70_000, 300), feedback=feedback, factor=4.0).run()[0]
        ours = Case(world(3), "int8", (70_000, 300), feedback=feedback, factor=4.0).run()[0]
        expect_equal(theirs.means, ours.means, codec)
        for mine, others in zip(theirs.residuals, ours.residuals, strict=True):
            expect_equal(mine, others, codec)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_is_seen_by_all(codec: str, value: float) -> None:
    case = Case(world(3), codec, (5_000, 300), feedback=True)
    case.inputs[2][0][4_321] = value
    got, reports = case.run()
    assert not np.isfinite(got.means[0]).all()
    assert np.isfinite(got.means[1]).all()
    assert [report.finite for report in reports] == [False] * 3
    assert [report.own for report in reports] == [None, None, (0, 4_321)]


def test_built_in_codecs_keep_what_libraries_promise() -> None:
    for name in CODECS:
        assert core.codec_broken_promises(name) == [], name


def test_variants_keep_their_promises(codec: str) -> None:
    assert core.codec_broken_promises(codec) == []


def both(group: Any, codec: str, count: int) -> None:
    """A rank that only sends may end before it hears of what is wrong."""
    group.all_reduce_compressed([np.ones(count, np.float32)], [0], codec)[0].wait()
    group.barrier().wait()


def test_ranks_with_different_libraries_hear_of_both(tmp_path: Path) -> None:
    names = [load(tmp_path, name, f"HEADER={header}") for name, header in (("c_one", 1), ("c_other", 2))]
    ranks = World(2)
    try:

        def body(rank: int, group: Any) -> str:
            with pytest.raises(MismatchError) as raised:
                both(group, names[rank], 5_000)
            return str(raised.value)

        for said in ranks.run(body):
            assert "c_one (sha256 " in said
            assert "c_other (sha256 " in said
    finally:
        ranks.close()


def test_a_function_that_fails_ends_the_operation_on_all_ranks(tmp_path: Path) -> None:
    name = load(tmp_path, "c_fails", "FAILS=-12", "FAILS_FROM=1000")
    ranks = World(3)
    try:

        def body(rank: int, group: Any) -> str:
            with pytest.raises((InvalidArgumentError, ConnectionError)) as raised:
                both(group, name, 50_000)
            return str(raised.value)

        for said in ranks.run(body):
            assert "'c_fails'" in said
            assert "compress returned -12 for " in said
    finally:
        ranks.close()
