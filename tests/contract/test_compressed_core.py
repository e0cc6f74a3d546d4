"""The compressed all-reduce: its bits are those of the documented order, on all ranks, however the bytes travel."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ringdp.errors import InvalidArgumentError, MismatchError
from tests.contract.compressed_reference import Floats, Outcome, all_reduce
from tests.contract.core_checks import SHARED_HOSTS, expect_equal
from tests.contract.core_ranks import World, close_worlds, core, world
from tests.helpers import need
from tests.registries import CODECS

need("hypothesis")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LAYOUTS = {**{str(size): (0,) * size for size in (1, 2, 3, 4, 5, 8)}, **SHARED_HOSTS}
FAULTS: list[dict[str, int]] = [
    {},
    {},
    {"segment_bytes": 64},
    {"segment_bytes": 4_096, "fault_seed": 1},
    {"segment_bytes": 65_472, "fault_seed": 2},
    {"fault_seed": 3},
]
SIZES = (0, 1, 12, 255, 256, 257, 301, 4_097, 40_000, 70_001)
LARGE = (900_001, 3, 1_300_000)  # segments of the longest kind
every_codec = pytest.mark.parametrize("codec", CODECS)
any_case: dict[str, Any] = {
    "layout": st.sampled_from([*LAYOUTS]),
    "faults": st.sampled_from(FAULTS),
    "counts": st.lists(st.sampled_from(SIZES), min_size=1, max_size=7).map(tuple),
    "feedback": st.booleans(),
    "factor": st.sampled_from([1.0, 8.0, 1024.0]),
    "divisor": st.sampled_from([None, 1, 2, 7]),
    "seed": st.integers(0, 99),
}
large_case: dict[str, Any] = {
    "layout": "3",
    "faults": {},
    "counts": LARGE,
    "feedback": True,
    "factor": 8.0,
    "divisor": None,
    "seed": 1,
}


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


@dataclass
class Case:
    """Inputs of all ranks for one all-reduce, drawn from `seed`."""

    ranks: World
    codec: str
    counts: Sequence[int]
    feedback: bool = False
    factor: float = 1.0
    divisor: int | None = None
    seed: int = 0
    inputs: list[list[Floats]] = field(init=False)
    residuals: list[list[Floats]] | None = None

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.owner_offsets = [zlib.crc32(b"parameter %d" % i) for i in range(len(self.counts))]

        def draw(scale: float) -> list[list[Floats]]:
            return [
                [random.normal(0, scale, count).astype(np.float32) for count in self.counts]
                for _ in range(self.ranks.size)
            ]

        self.inputs = draw(1e-2 * self.factor)
        if self.feedback:
            self.residuals = draw(1e-3)

    def expected(self) -> Outcome:
        return all_reduce(
            self.inputs,
            self.owner_offsets,
            self.codec,
            hosts=_numbered(self.ranks.hosts),
            weights=self.ranks.weights,
            divisor=self.divisor or self.ranks.size,
            factor=self.factor,
            residuals=self.residuals,
        )

    def run(self) -> tuple[Outcome, list[Any]]:
        """What the ranks have afterwards, and their reports; they all have the same means."""
        buffers = [[x.copy() for x in each] for each in self.inputs]
        after = [[x.copy() for x in each] for each in self.residuals or []]

        def body(rank: int, group: Any) -> Any:
            work, report = group.all_reduce_compressed(
                buffers[rank],
                self.owner_offsets,
                self.codec,
                residuals=self.residuals[rank] if self.residuals else [],
                new_residuals=after[rank] if self.residuals else [],
                loss_scale=self.factor,
                divisor=self.divisor,
            )
            work.wait()
            return report

        reports = self.ranks.run(body)
        for section in range(len(self.counts)):
            first = buffers[0][section]
            expect_equal([each[section] for each in buffers[1:]], [first] * (self.ranks.size - 1), f"{self}")
        return Outcome(buffers[0], after), reports

    def __str__(self) -> str:
        return f"{self.codec}, sections {self.counts}, feedback {self.feedback}, hosts {self.ranks.hosts}"


def _wait_for_all(work: Any, group: Any) -> None:
    """A rank that only sends may end before it hears of what is wrong."""
    work.wait()
    group.barrier().wait()


def _numbered(hosts: Sequence[int]) -> list[int]:
    return [list(dict.fromkeys(hosts)).index(host) for host in hosts]


def check(case: Case) -> None:
    got, reports = case.run()
    if case.ranks.size == 1:  # nothing to exchange, nothing is lost
        expect_equal(got.means, case.inputs[0], str(case))
        return
    wanted = case.expected()
    expect_equal(got.means, wanted.means, str(case))
    for rank, residuals in enumerate(wanted.residuals):
        expect_equal(got.residuals[rank], residuals, f"residuals of rank {rank}, {case}")
    assert all(report.finite and report.own is None for report in reports)


def check_drawn(codec: str, layout: str, faults: dict[str, int], counts: Sequence[int], **drawn: Any) -> None:
    hosts = LAYOUTS[layout]
    if faults and (len(hosts) > 4 or sum(counts) > 80_000):
        faults = {}  # these take their time
    check(Case(world(len(hosts), hosts, **faults), codec, counts, **drawn))


@given(codec=st.sampled_from(CODECS), **any_case)
@example(codec="int8", **large_case)
@example(codec="int4", **{**large_case, "layout": "3+1"})
@settings(max_examples=90, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_sections(codec: str, **drawn: Any) -> None:
    """Whatever their sizes, the hosts, the segments and a network that delays."""
    check_drawn(codec, **drawn)


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1)], ids=["flat", "two levels"])
def test_what_else_is_in_the_buffer_does_not_show(hosts: tuple[int, ...]) -> None:
    """A parameter's bits are the same in a bucket of its own, and in any order of the others."""
    ranks = world(3, hosts)
    for codec in CODECS:
        together = Case(ranks, codec, (70_001, 300, 5_000), feedback=True)
        means = together.run()[0].means
        for section in range(3):
            alone = Case(ranks, codec, (together.counts[section],), feedback=True)
            alone.owner_offsets = [together.owner_offsets[section]]
            alone.inputs = [[each[section]] for each in together.inputs]
            assert together.residuals is not None
            alone.residuals = [[each[section]] for each in together.residuals]
            expect_equal(alone.run()[0].means, [means[section]], f"{alone} beside {together}")


def test_several_in_flight_beside_exact_ones() -> None:
    ranks = world(4)
    cases = [Case(ranks, codec, (30_000, 7), seed=seed) for seed, codec in enumerate(CODECS * 3)]
    wanted = [case.expected().means for case in cases]
    buffers = [[[x.copy() for x in each] for each in case.inputs] for case in cases]
    exact = [np.full(9_999, rank, np.float32) for rank in range(4)]

    def body(rank: int, group: Any) -> None:
        works = []
        for case, buffer in zip(cases, buffers, strict=True):
            works.append(group.all_reduce_compressed(buffer[rank], case.owner_offsets, case.codec)[0])
            works.append(group.all_reduce(exact[rank], "float32", "MAX"))
        for work in works:
            work.wait()

    ranks.run(body)
    for case, buffer, means in zip(cases, buffers, wanted, strict=True):
        for each in buffer:
            expect_equal(each, means, str(case))
    assert all(np.all(x == 3) for x in exact)


@every_codec
@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1)])
def test_what_is_not_finite_on_one_rank_is_so_on_all(codec: str, hosts: tuple[int, ...]) -> None:
    ranks = world(4, hosts)
    places = ((0, 1, 0, np.nan), (1, 1, 69_999, np.inf), (2, 1, 33_000, -np.inf), (3, 0, 4, -np.nan))
    for guilty, section, element, value in places:
        case = Case(ranks, codec, (5, 70_000), feedback=codec in ("int4", "nf4"), seed=guilty)
        case.inputs[guilty][section][element] = value
        got, reports = case.run()
        assert not np.isfinite(got.means[section][element])
        block = {"int8": 256, "float16": 1, "bfloat16": 1}.get(codec, 64)
        damaged = sum(int(np.count_nonzero(~np.isfinite(x))) for x in got.means)
        assert damaged <= block
        for rank, report in enumerate(reports):
            assert not report.finite
            assert report.own == ((section, element) if rank == guilty else None)


def test_what_only_the_code_cannot_carry_is_reported_too() -> None:
    case = Case(world(2), "float16", (2_000,))
    case.inputs[1][0][:] = 0
    case.inputs[1][0][100] = (
        70_000  # the largest float16 is 65,504; rank 0 owns one of these parts and rank 1 the other
    )
    case.inputs[1][0][1_900] = -70_000
    got, reports = case.run()
    bad = np.flatnonzero(~np.isfinite(got.means[0]))
    assert len(bad) == 1
    assert [report.finite for report in reports] == [False, False]
    assert [report.own for report in reports] == [None, (0, bad[0])]


def test_the_mean_of_one_rank_is_looked_at_too() -> None:
    case = Case(world(1), "int8", (5, 300))
    case.inputs[0][1][7] = np.inf
    _, [report] = case.run()
    assert (report.finite, report.own) == (False, (1, 7))


def test_feedback_makes_up_over_time() -> None:
    """What n steps of the same gradient have moved is n times the gradient, but for the last residual."""
    ranks, steps = world(3), 50
    case = Case(ranks, "int4", (3_000,), feedback=True)
    case.residuals = [[np.zeros(3_000, np.float32)] for _ in range(3)]
    exact = np.mean([each[0] for each in case.inputs], axis=0, dtype=np.float64)
    moved = np.zeros(3_000)
    for _ in range(steps):
        got, _ = case.run()
        case.residuals = got.residuals
        moved += got.means[0]
    once = Case(ranks, "int4", (3_000,)).run()[0].means[0] - exact
    left = moved / steps - exact
    assert np.abs(left).max() < 4 / steps * np.abs(exact).max() + 1e-9
    assert np.linalg.norm(left) < 0.2 * np.linalg.norm(once)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"owner_offsets": [1]}, "with another layout"),
        ({"divisor": 2}, "divisor"),
        ({"buffers": (5_001,)}, r"float32\[5001\], AVG, int8"),
        ({"buffers": (2_500, 2_500), "owner_offsets": [0, 0]}, "with another layout"),
        ({"codec": "int4"}, r"float32\[5000\], AVG, int4"),
    ],
)
def test_ranks_that_mean_different_things_all_hear_of_it(change: dict[str, Any], words: str) -> None:
    ranks = world(3)

    def body(rank: int) -> str:
        group = core.Group(ranks.runtimes[rank], f"another {change}", [0, 1, 2], timeout_ms=10_000)
        options: dict[str, Any] = {"buffers": (5_000,), "owner_offsets": [0], "codec": "int8"} | (
            change if rank == 1 else {}
        )
        options["buffers"] = [np.zeros(count, np.float32) for count in options["buffers"]]
        work = group.all_reduce_compressed(**options)[0]
        with pytest.raises(MismatchError, match=words) as caught:
            _wait_for_all(work, group)
        group.close()
        return str(caught.value)

    for text in ranks.each(body):
        assert "rank 1 (host " in text


def test_who_has_residuals_is_each_rank_s_own_matter() -> None:
    """On the wire they do not show: ranks may begin with error feedback at different times."""
    case = Case(world(2), "int8", (2_000,))
    buffers = [[x.copy() for x in each] for each in case.inputs]
    zeros = [[np.zeros(2_000, np.float32)] for _ in range(2)]

    def body(rank: int, group: Any) -> None:
        more = {"residuals": zeros[0], "new_residuals": zeros[1]} if rank == 1 else {}
        group.all_reduce_compressed(buffers[rank], case.owner_offsets, case.codec, **more)[0].wait()

    case.ranks.run(body)
    for each in buffers:
        expect_equal(each, case.expected().means, str(case))


@every_codec
@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 2, 0, 2, 2, 1)])
def test_bytes_are_what_the_codes_take(codec: str, hosts: tuple[int, ...]) -> None:
    ranks, count = world(len(hosts), hosts), 2_000_000

    def sent() -> list[int]:
        return [runtime.bytes_sent() for runtime in ranks.runtimes]

    x = [[np.zeros(count, np.float32)] for _ in hosts]
    before = sent()
    ranks.run(lambda rank, group: group.all_reduce_compressed(x[rank], [3], codec)[0].wait())
    moved = sum(np.subtract(sent(), before))
    hosts_count, code = len(set(hosts)), core.codec_bytes(codec, count)
    least = 2 * (len(hosts) - 1) * code
    if 1 < hosts_count < len(hosts):
        inside = len(hosts) - hosts_count
        least = 2 * (hosts_count - 1) * code + inside * (4 * count + code)
    assert least <= moved <= 1.01 * least + 2_000 * len(hosts)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such codec": ({"codec": "int9"}, "there is no codec 'int9'; there are float16"),
    "a loss scale of 0": ({"loss_scale": 0.0}, "loss scale"),
    "a negative loss scale": ({"loss_scale": -2.0}, "loss scale"),
    "a loss scale that is not finite": ({"loss_scale": float("inf")}, "loss scale"),
    "a divisor of 0": ({"divisor": 0}, "the divisor is 0"),
    "too few owner offsets": ({"owner_offsets": []}, "as many owner offsets"),
    "one of two residuals": ({"residuals": [np.zeros(9, np.float32)]}, "as many"),
    "a residual of another size": (
        {"residuals": [np.zeros(8, np.float32)], "new_residuals": [np.zeros(9, np.float32)]},
        "another size",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what: str) -> None:
    change, words = REFUSED[what]
    options: dict[str, Any] = {"buffers": [np.zeros(9, np.float32)], "owner_offsets": [0], "codec": "int8"} | change
    group = world(1).groups({})[0]
    with pytest.raises(InvalidArgumentError, match=words):
        group.all_reduce_compressed(**options)
    group.barrier().wait()


def test_a_residual_is_not_overwritten() -> None:
    group, residual = world(1).groups({})[0], np.zeros(9, np.float32)
    with pytest.raises(InvalidArgumentError, match="would overwrite its residual"):
        group.all_reduce_compressed(
            [np.zeros(9, np.float32)], [0], "int8", residuals=[residual], new_residuals=[residual]
        )


@every_codec
def test_codes_of_another_length_are_refused(codec: str) -> None:
    for count in (0, 1, 100, 1_000):
        size = core.codec_bytes(codec, count)
        for wrong in (size + 1, *([size - 1] if size else [])):
            with pytest.raises(InvalidArgumentError, match=f"a code of {wrong} bytes"):
                core.codec_decompress(codec, bytes(wrong), count)
