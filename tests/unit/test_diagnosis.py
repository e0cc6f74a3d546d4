"""The pure parts of the report: the split of a step, the verdict, the clocks, what ranks tell each other."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ringdp.__main__ import main
from ringdp.diagnosis.clocks import Clocks
from ringdp.diagnosis.rank_facts import Facts
from ringdp.diagnosis.remedies import Sent, predicted_s, remedy_for_communication
from ringdp.diagnosis.split import split
from ringdp.diagnosis.verdict import Verdict, judge
from ringdp.diagnosis.window import FIELDS, Stamps, Window

STEPS = 20
TWO_LINES = 2 * 128  # of a console: no line of the log is longer, apart from hosts' names
MS = 1e-3
SENT = Sent(bytes=40 << 20, coded_bytes=40 << 20, buckets=4, on_its_way_s=0.1, per_host=(1, 1, 1))


def window(
    own: list[dict[str, float]],
    *,
    communication: float = 1 * MS,
    facts: list[dict[str, Any]] | None = None,
    seed: int = 0,
) -> Window:
    """Steps of ranks that compute for so long in each phase, give or take 3 %, and leave each step together."""
    chance = random.Random(seed)
    ranks = len(own)
    rows = torch.zeros(ranks, STEPS, len(FIELDS), dtype=torch.float64)
    for step in range(STEPS):
        for rank, phases in enumerate(own):
            for name, seconds in phases.items():
                rows[rank, step, FIELDS.index(name)] = seconds * chance.uniform(0.97, 1.03)
        computing = rows[:, step, :4].sum(-1)
        rows[:, step, FIELDS.index("exposed")] = computing.max() - computing + communication
        rows[:, step, FIELDS.index("on_its_way")] = communication + 10 * MS
    period = float(rows[:, :, :6].sum() / ranks)
    stamps: list[dict[str, Any]] = [
        {"period_s": period, "cpu_s": 0.9 * period, "host": f"h{rank}"} for rank in range(ranks)
    ]
    for one, more in zip(stamps, facts or [{}] * ranks, strict=True):
        one.update(
            {
                name: value * period if name.endswith("_s") and "link" not in name else value
                for name, value in more.items()
            }
        )
    return Window(40, rows, tuple(Facts(**one) for one in stamps), (Stamps(0, 0, 0),) * ranks)


def usual(**slower: float) -> dict[str, float]:
    return {"between": 1 * MS, "forward": 10 * MS, "backward": 20 * MS, "after": 2 * MS} | slower


def verdict(made: Window) -> Verdict:
    found = judge(made, split(made), lambda: SENT)
    first = "ringdp: step 12345: 100 % of a step of 99.9 ms is not computing. "
    assert len(first + found.text) <= TWO_LINES, f"{len(first + found.text)}: {found.text}"
    assert len("ringdp: Remedy: ." + found.remedy) <= TWO_LINES, found.remedy
    return found


QUOTA, CORE, SLEEPS = {"throttled_s": 0.6, "quota_cores": 0.5}, {"ready_s": 0.6}, {"cpu_s": 0.1}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "slower, facts, phase, cause, words",
    [
        ({"forward": 200 * MS}, SLEEPS, "forward", "sleep", "its forward takes"),
        ({"backward": 100 * MS}, {"cpu_s": 1.0}, "backward", "work", "it computes all that time"),
        ({"between": 50 * MS}, SLEEPS, "between", "data", "DataLoader"),
        ({"after": 50 * MS}, SLEEPS, "after", "sleep", "its optimizer takes"),
        (
            {"forward": 25 * MS, "backward": 50 * MS},
            QUOTA,
            "backward",
            "quota",
            "throttled 60% of the time: its quota is 0.5 CPUs",
        ),
        ({"forward": 25 * MS, "backward": 50 * MS}, CORE, "backward", "core", "other threads had the core"),
        ({"forward": 60 * MS, "backward": 90 * MS}, {"page_waits": 20_000}, "backward", "memory", "memory.max"),
        # It waited for a core a little, which does not explain the rest.
        ({"forward": 200 * MS}, {"cpu_s": 0.1, "ready_s": 0.12}, "forward", "sleep", "waits or sleeps"),
    ],
)
def test_a_slow_rank_is_named_with_its_phase_and_cause(
    ranks: int, slower: dict[str, float], facts: dict[str, float], phase: str, cause: str, words: str
) -> None:
    slow = ranks - 1
    own = [usual()] * slow + [usual(**slower)]
    found = verdict(window(own, facts=[{}] * slow + [facts]))
    assert (found.kind, found.rank, found.phase, found.cause) == ("rank", slow, phase, cause), found
    assert words in str(found)
    assert f"host h{slow}" in found.text
    assert found.remedy


def test_a_rank_that_is_slow_now_and_then_is_named_and_one_slow_step_is_nobodys_fault() -> None:
    made = window([usual()] * 3)
    exposed, between = FIELDS.index("exposed"), FIELDS.index("between")
    for step in (3, 9, 15):
        made.rows[1, step, between] += 0.4
        made.rows[[0, 2], step, exposed] += 0.4
    assert (verdict(made).kind, verdict(made).rank) == ("rank", 1)
    once = window([usual()] * 3)
    once.rows[1, 7, between] += 0.4
    once.rows[[0, 2], 7, exposed] += 0.4
    assert verdict(once).kind != "rank"


@pytest.mark.parametrize(("phase", "words"), [("between", "a checkpoint"), ("backward", "garbage collection")])
@pytest.mark.parametrize("longer_s", [0.4, 0.035])
def test_bursts_of_one_rank_are_named_as_such(phase: str, words: str, longer_s: float) -> None:
    made = window([usual()] * 3)
    exposed = FIELDS.index("exposed")
    for step in (3, 8, 13, 18):
        made.rows[1, step, FIELDS.index(phase)] += longer_s
        made.rows[[0, 2], step, exposed] += longer_s
    found = verdict(made)
    assert (found.kind, found.rank, found.phase, found.cause) == ("rank", 1, phase, "bursts"), found
    assert "Rank 1 (host h1) is slow in bursts: in every 5th step" in found.text
    assert words in str(found)
    assert "num_workers" not in str(found)


def test_bursts_at_no_regular_steps_are_counted() -> None:
    made = window([usual()] * 2)
    for step in (3, 4, 13, 18):
        made.rows[1, step, FIELDS.index("between")] += 0.4
        made.rows[0, step, FIELDS.index("exposed")] += 0.4
    assert "in 4 of 20 steps the time between steps takes 400 ms longer" in verdict(made).text


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_loaders_that_starve_all_ranks_are_named(chance: float) -> None:
    made = window([usual(between=1.0)] * 2, communication=2 * MS)
    draw = random.Random(3)
    for step in range(STEPS):  # each rank's own loader is late now and then
        late = torch.tensor([chance * draw.uniform(0, 0.8) for _ in range(2)])
        made.rows[:, step, FIELDS.index("between")] += late
        made.rows[:, step, FIELDS.index("exposed")] += late.max() - late
    found = verdict(made)
    assert found.kind == "between", found
    assert "of a step passes between steps on all ranks: data loading, evaluation or logging." in found.text
    assert "num_workers" in found.remedy


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_take_turns_are_not_blamed(ranks: int) -> None:
    for seed in range(50):
        made = window([usual()] * ranks, seed=seed)
        chance = random.Random(seed)
        for step in range(STEPS):
            late = torch.tensor([chance.expovariate(1 / (20 * MS)) for _ in range(ranks)])
            made.rows[:, step, FIELDS.index("forward")] += late
            made.rows[:, step, FIELDS.index("exposed")] += late.max() - late
        assert verdict(made).kind in ("uneven", "none"), (seed, verdict(made))


def test_a_phase_that_was_hit_while_other_threads_had_the_core_is_not_blamed() -> None:
    """A busy machine takes the core from one rank more than from the other, in whatever phase it is."""
    for seed in range(20):
        made = window([usual()] * 2, seed=seed, facts=[{"ready_s": 0.28}, {"ready_s": 0.2}])
        chance = random.Random(seed)
        for step in range(STEPS):
            late = torch.tensor([0.0, chance.uniform(5 * MS, 7 * MS)])
            made.rows[:, step, FIELDS.index("between")] += late
            made.rows[:, step, FIELDS.index("off_core")] += late
            made.rows[:, step, FIELDS.index("exposed")] += late.max() - late
        assert verdict(made).kind not in ("rank", "link"), (seed, verdict(made))
    made.rows[:, :, FIELDS.index("off_core")] = 0  # it had its core, and spent the time there
    assert (verdict(made).kind, verdict(made).cause) == ("rank", "data")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "longer, slower, facts, cause",
    [
        (1.35, {"forward": 13.5 * MS, "backward": 27 * MS, "after": 2.7 * MS}, {"cpu_s": 1.0}, "speed"),
        (1.03, {"forward": 13.5 * MS, "backward": 27 * MS, "after": 2.7 * MS}, {"cpu_s": 1.0}, "work"),
        (1.35, {"backward": 80 * MS}, {"cpu_s": 1.0}, "work"),  # the core explains a part of it
        (1.35, {"forward": 100 * MS}, SLEEPS, "sleep"),
    ],
)
def test_a_slow_core_is_told_from_more_work(
    ranks: int, longer: float, slower: dict[str, float], facts: dict[str, float], cause: str
) -> None:
    made = window([usual(**slower)] + [usual()] * (ranks - 1), facts=[facts] + [{}] * (ranks - 1))
    made.rows[:, :, FIELDS.index("probe")] = 1e-6
    made.rows[0, :, FIELDS.index("probe")] *= longer
    found = verdict(made)
    assert (found.kind, found.rank, found.cause) == ("rank", 0, cause), found
    assert ("computes at 74% of the others' speed" in found.text) == (cause == "speed")


@pytest.mark.parametrize(
    "kept, cause, words", [("throttled_s", "quota", "0.5 CPUs"), ("off_core", "core", "top shows")]
)
def test_a_quota_or_a_busy_core_is_named_though_all_ranks_have_it(kept: str, cause: str, words: str) -> None:
    facts = [{"throttled_s": 0.48, "quota_cores": 0.5}] * 3 if kept == "throttled_s" else None
    made = window([usual()] * 3, facts=facts)
    if kept == "off_core":
        made.rows[:, :, FIELDS.index("off_core")] = 15 * MS
    found = verdict(made)
    assert (found.kind, found.cause) == ("host", cause)
    assert found.cost > 0.4
    assert "rank 2 for 4" in found.text
    assert words in str(found)


def test_of_ranks_that_all_lack_cores_the_slowest_is_not_blamed_alone() -> None:
    own = [usual(), usual(forward=20 * MS)]
    made = window(own, facts=[{"ready_s": 0.66}, {"ready_s": 0.78}])
    made.rows[:, :, FIELDS.index("off_core")] = 20 * MS
    found = verdict(made)
    assert (found.kind, found.cause) == ("host", "core"), found
    assert "rank 0 for" in found.text
    assert "rank 1 for" in found.text
    made = window(own, facts=[{"ready_s": 0.05}, {"ready_s": 0.4}])
    assert (verdict(made).kind, verdict(made).rank) == ("rank", 1)


def link(to: int, rate: float, busy_s: float) -> dict[str, Any]:
    return {"link_to": to, "link_bytes": rate * busy_s, "link_busy_s": busy_s, "link_bytes_per_s": rate}


def test_a_slow_link_is_named_with_both_ends() -> None:
    facts = [link(1, 120e6, 0.2), link(2, 12e6, 1.9), link(3, 118e6, 0.2), link(0, 119e6, 0.2)]
    found = verdict(window([usual()] * 4, communication=100 * MS, facts=facts))
    assert (found.kind, found.rank, found.peer) == ("link", 1, 2)
    assert "12 MB/s, the others' 119 MB/s" in found.text
    assert "host h1" in found.text
    assert "host h2" in found.text
    # A host's card is slow in both directions.
    facts = [link(1, 12e6, 1.9), link(2, 12.1e6, 1.9), link(3, 118e6, 0.2), link(0, 119e6, 0.2)]
    found = verdict(window([usual()] * 4, communication=100 * MS, facts=facts))
    assert found.kind == "link"
    assert "All slow links end at rank 1 (host h1)" in found.text


def test_links_of_one_speed_are_not_blamed_but_communication_is() -> None:
    facts = [link(1, 118e6, 1.5), link(2, 120e6, 1.4), link(0, 90e6, 1.6)]
    found = verdict(window([usual()] * 3, communication=100 * MS, facts=facts))
    assert (found.kind, found.rank) == ("communication", None)
    assert "compression='int8'" in found.remedy


def test_within_a_host_nothing_is_advised_that_makes_the_cores_do_more() -> None:
    found = verdict(window([usual()] * 3, communication=100 * MS))  # no rank has a link over a network
    assert found.kind == "communication"
    assert "int8" not in found.remedy


@pytest.mark.parametrize("thread", ["ready_s", "threads_ready_s"])
def test_communication_that_waits_for_cores_is_not_put_down_to_the_network(thread: str) -> None:
    facts = [
        link(1, 118e6, 1.5) | {thread: 0.6},
        link(2, 120e6, 1.4) | {thread: 0.55},
        link(0, 90e6, 1.6) | {thread: 0.6},
    ]
    found = verdict(window([usual()] * 3, communication=100 * MS, facts=facts))
    assert (found.kind, found.cause) == ("host", "core"), found
    assert "int8" not in str(found)


def test_a_busy_machine_is_not_a_lock() -> None:
    """A rank that waits for a core now and then, in threads of its own, or when its sleep is over."""
    for busy in ({"ready_s": 0.25}, {"threads_ready_s": 0.3}):
        facts = [{"cpu_s": 0.35} | busy, {"cpu_s": 0.4}]
        found = verdict(window([usual(forward=60 * MS), usual()], facts=facts))
        assert (found.kind, found.cause) == ("rank", "core"), found
        assert "a lock" not in str(found)


def test_a_burst_that_a_buffer_took_is_not_the_speed_of_a_link() -> None:
    """What was once said: 117 MB/s, the others' 591 MB/s, of links of one speed."""
    facts = [link(to, 117e6, 0.5) for to in (1, 2, 3, 0)]
    for burst in facts[1:]:
        burst["link_bytes_per_s"] = 591e6
    assert verdict(window([usual()] * 4, communication=100 * MS, facts=facts)).kind == "communication"
    # Short messages: what they carried says little, and the kernel saw more.
    facts = [link(to, 117e6, 0.02) for to in (1, 2, 3, 0)]
    facts[0] |= {"link_bytes": 0.5e6, "link_busy_s": 0.02}
    assert verdict(window([usual()] * 4, communication=100 * MS, facts=facts)).kind != "link"


def test_a_slow_link_that_carries_little_is_not_blamed() -> None:
    facts = [link(1, 118e6, 1.5), link(2, 120e6, 1.4), link(0, 5e6, 0.1)]
    assert verdict(window([usual()] * 3, communication=100 * MS, facts=facts)).kind == "communication"


def test_the_parts_of_a_step_add_up() -> None:
    made = window([usual(), usual(forward=50 * MS), usual(backward=90 * MS)], communication=5 * MS)
    parts = split(made)
    total = parts.own.sum(1) + parts.peer_wait + parts.communication
    torch.testing.assert_close(total, parts.step)
    assert parts.slowest.tolist()[:2] == [2, 2]
    assert float(parts.peer_wait[2]) == pytest.approx(0, abs=1e-9)
    assert float(parts.communication.max()) == pytest.approx(5 * MS, rel=1e-6)


def test_the_model_predicts_what_was_measured_and_less_for_fewer_bytes() -> None:
    assert predicted_s(SENT, SENT.bytes, SENT.buckets) == pytest.approx(SENT.on_its_way_s, rel=0.01)
    assert predicted_s(SENT, SENT.bytes / 4, SENT.buckets) < 0.3 * SENT.on_its_way_s


@pytest.mark.parametrize(
    "sent, words",
    [
        (SENT, "compression='int8'"),
        (Sent(40 << 20, 10 << 20, 4, 0.1, (1, 1, 1)), "no_sync"),
        (Sent(40_000, 40_000, 400, 0.1, (1, 1, 1)), "larger buckets"),
        (Sent(40 << 20, 40 << 20, 1, 0.1, (1, 1, 1)), "smaller buckets"),
    ],
)
def test_remedies_fit_the_case(sent: Sent, words: str) -> None:
    made = window([usual()] * 3, communication=100 * MS)
    assert words in remedy_for_communication(split(made), sent)


@pytest.mark.parametrize("apart_s", [0.0, 3.25, -7200.5])
def test_clocks_are_found_within_the_error_that_is_told(apart_s: float) -> None:
    chance, clocks = random.Random(1), Clocks()
    clock = [0.0, apart_s]
    facts = [Facts(kernel=1), Facts(kernel=2)]
    for exchange in range(10):
        begin = 100.0 + exchange
        issued = [begin + chance.uniform(0, 2 * MS) for _ in clock]
        ended = [max(issued) + chance.uniform(50e-6, 300e-6) for _ in clock]
        stamps = [
            Stamps(*(int(1e9 * (time + apart)) for time in (start, end, end)))
            for start, end, apart in zip(issued, ended, clock, strict=True)
        ]
        clocks.receive(stamps, facts)
    offset = clocks.offsets()[1]
    assert offset.seconds is not None
    assert abs(offset.seconds - apart_s) <= offset.error_s
    assert offset.error_s < 1.2 * MS


def test_ranks_of_one_kernel_share_a_clock_and_before_an_exchange_nothing_is_known() -> None:
    clocks = Clocks()
    assert clocks.offsets() == []
    clocks.receive(
        [Stamps(0, 0, 5), Stamps(0, 0, 6), Stamps(0, 0, 7)], [Facts(kernel=3), Facts(kernel=3), Facts(kernel=4)]
    )
    assert [one.error_s for one in clocks.offsets()] == [0.0, 0.0, float("inf")]
    assert clocks.offsets()[2].seconds is None


def test_facts_come_back_as_they_were_sent() -> None:
    facts = Facts(1.5, 1.25, 0.5, 0.75, 0.25, 7, 1 << 33, 2**64 - 1, 3, 1e9, 2.5, 1e-4, 1e8, 0.5, "a-host.example")
    assert Facts.unpacked(facts.packed() + bytes(20)) == facts
    assert Facts.unpacked(bytes(256)) == Facts(link_to=0)


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_its_cgroup_and_of_those_around_it_is_read_in_both_versions(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringdp.diagnosis import rank_facts

    process, groups = tmp_path / "proc", tmp_path / "cgroup"
    own = groups / ("cpu" if version == 1 else "") / "kubepods/pod7"
    own.mkdir(parents=True)
    (process / "self").mkdir(parents=True)
    (process / "self/cgroup").write_text(
        "4:memory:/elsewhere\n1:cpu:/kubepods/pod7\n0::/\n" if version == 1 else "0::/kubepods/pod7\n"
    )
    stat = "throttled_time" if version == 1 else "throttled_usec"
    unit = 1e9 if version == 1 else 1e6

    def throttle(group: Path, seconds: float, cores: float) -> None:
        (group / "cpu.stat").write_text(f"nr_periods 9\nnr_throttled 4\n{stat} {int(seconds * unit)}\n")
        if version == 1:
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
            (group / "cpu.cfs_period_us").write_text("100000")
        else:
            (group / "cpu.max").write_text(f"{int(cores * 100_000) if cores > 0 else 'max'} 100000\n")

    throttle(own, 1.0, -1e-5)
    throttle(own.parent, 2.0, 0.5)
    monkeypatch.setattr(rank_facts, "_PROC", process)
    monkeypatch.setattr(rank_facts, "_CGROUPS", groups)
    counters = rank_facts.FactCounters()
    time.sleep(0.01)
    throttle(own, 1.5, -1e-5)
    throttle(own.parent, 2.5, 0.5)
    stamps = counters.since_last({})
    assert stamps.quota_cores == 0.5
    assert stamps.throttled_s == stamps.period_s  # more than one thread of the group was stopped


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "is not a timeline of a rank"),
        ('{"ringdp": null}', "is not a timeline of a rank"),
        ('{"ringdp": {"rank": 0}, "events": []}', "is not a timeline of a rank"),
    ],
)
def test_a_file_that_is_not_a_timeline_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    (tmp_path / "rank_00000.json").write_text(content)
    assert main(["timeline", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 1
    assert f"rank_00000.json {words}" in capsys.readouterr().err


def test_a_trace_that_is_not_torchs_and_a_folder_without_ranks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["-o", str(tmp_path / "out.json")]
    assert main(["timeline", str(tmp_path), *output]) == 1
    assert f"no file of a rank (rank_*.json, *.rank_*) lies in {tmp_path}" in capsys.readouterr().err
    about = {"rank": 0, "host": "h", "left_out": 0, "to_epoch_ns": 0, "offset_ns": None, "error_ns": None}
    (tmp_path / "rank_00000.json").write_text(json.dumps({"ringdp": about, "events": []}))
    (tmp_path / "profile.json").write_text("[]")
    assert main(["timeline", str(tmp_path), *output, "--profile", str(tmp_path / "profile.json")]) == 1
    assert "profile.json is not a trace of torch.profiler" in capsys.readouterr().err
