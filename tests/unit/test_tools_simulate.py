"""`python -m ringdp simulate`: what the arguments describe, what it says, and laws of the times it finds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ringdp import _C
from ringdp.__main__ import main
from ringdp.config import tuning
from ringdp.config.tuning import Tuning
from ringdp.errors import InvalidArgumentError
from ringdp.tools.simulate import command, outcome, starting, tune
from ringdp.tools.simulate.place import Place, SimulatedHost, alike, at_sites, extended, measured, slowed

GBIT = 125e6
BUILT_IN = Tuning()


def place(hosts: int, per_host: int = 1, bytes_per_s: float = GBIT, round_trip_s: float = 50e-6) -> Place:
    return Place(hosts=tuple(alike(hosts, per_host, bytes_per_s)), round_trip_s=round_trip_s, cores=per_host)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_tables_choice_and_the_best_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--hosts", "4", "--per-host", "2", "--link", "1gbit", "--size", "64k,8m")
    assert code == 0
    assert shown.startswith("all-reduce of float32, 8 ranks on 4 hosts (2 on each), simulated")
    assert "links of 1 Gbit/s, round trips of 50 µs" in shown
    for name in ("tree", "fold", "pairwise", "ring", "two_level"):
        assert f"\n{name} " in shown
    assert shown.count("the table's choice\n") == 2
    assert "What limits two_level: of " in shown
    assert "sending over the hosts' links" in shown


def test_the_json_has_the_parts_of_the_critical_path(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--hosts", "3", "--size", "1m", "--compressed", "int8", "--json")
    found = json.loads(shown)
    assert (code, found["ringdp_simulate"]) == (0, outcome.FORMAT)
    (size,) = found["sizes"]
    rows = {row["algorithm"]: row for row in size["outcomes"]}
    assert size["best"] == size["outcomes"][0]["algorithm"]
    assert rows["compressed int8"]["link_bytes"] < 0.3 * rows["ring"]["link_bytes"]
    for row in rows.values():
        assert sum(row["path"].values()) == pytest.approx(row["seconds"])
        assert set(row["path"]) == set(outcome.PARTS)
        assert row["limits"]


def test_a_ring_and_two_levels_take_what_their_links_need() -> None:
    """Where bandwidth limits, times are those of the bytes that must cross: within 3 %, never below."""
    size = 64 << 20
    for algorithm, per_host, sent in (("ring", 1, 2 * 7 / 8), ("two_level", 2, 2 * 7 / 8), ("pairwise", 1, 2 * 7 / 8)):
        found = outcome.simulate(place(8, per_host), size, algorithm)
        least = sent * size * 1.05 / GBIT
        assert found.seconds is not None
        assert least < found.seconds < 1.03 * least, algorithm
        assert found.path["uplinks"] + found.path["downlinks"] > 0.95 * found.seconds


def test_latency_limits_a_long_ring_and_one_host_stands_for_all() -> None:
    where = place(10_000, bytes_per_s=100 * GBIT, round_trip_s=10e-6)
    found = outcome.simulate(where, 25 << 20, "ring")
    assert found.seconds is not None
    assert found.alike_hosts == 10_000
    assert found.messages == 2 * 9_999 + 1  # and a grant
    assert found.seconds > 2 * 9_999 * 5e-6
    assert "cost of messages" in outcome.limits(where, found)


def test_a_slow_host_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hosts", "8", "--link", "1gbit", "--size", "16m", "--algorithm", "ring")
    even = json.loads(run(capsys, *words, "--json")[1])
    code, shown, _ = run(capsys, *words, "--slow", "host5:0.5")
    assert code == 0
    assert "the link of host5 is busy for" in shown
    slow = json.loads(run(capsys, *words, "--slow", "host5:0.5", "--json")[1])
    times = [it["sizes"][0]["outcomes"][0]["seconds"] for it in (even, slow)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)


@pytest.mark.parametrize("per_host", [1, 2])
def test_with_a_map_of_unequal_links_a_slow_host_sends_its_data_once(
    per_host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 8 << 20
    words = ("--hosts", "4", "--per-host", str(per_host), "--link", "1gbit", "--slow", "host3:0.1", "--size", str(size))
    path = tmp_path / "tuning.json"
    tuning.write_uplinks(str(path), {"host0": GBIT, "host3": GBIT / 10}, "a map of some")

    def times() -> tuple[float, float]:
        """Of the table's choice and of codes, over what the slow link needs for the data once."""
        (found,) = json.loads(run(capsys, *words, "--compressed", "int8", "--json")[1])["sizes"]
        rows = {row["algorithm"]: row["seconds"] for row in found["outcomes"]}
        link, codes = GBIT / 10 / 1.05, _C.codec_bytes("int8", size // 4)
        return rows[found["chosen"]] * link / size, rows["compressed int8"] * link / codes

    without = times()
    assert all(1.5 <= it < 1.62 for it in without)
    monkeypatch.setenv("RINGDP_TUNING", str(path))
    assert all(1.0 <= it < 1.15 for it in times())


def test_sites_share_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hosts", "8", "--sites", "2", "--between", "100mbit,50ms", "--size", "4m")
    code, shown, _ = run(capsys, *words)
    assert code == 0
    assert "2 sites, each with a line of 100 Mbit/s, 50 ms to the others" in shown
    assert "the sites' lines" in shown
    assert [host.site for host in at_sites(alike(5, 1, GBIT), 2)] == [0, 0, 0, 1, 1]
    assert outcome.is_far(command.described(_arguments(*words), BUILT_IN), BUILT_IN)
    assert not outcome.is_far(place(2), BUILT_IN)


def test_the_same_input_gives_the_same_result(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hosts", "5", "--per-host", "3", "--size", "300000", "--compressed", "int8", "--json")
    assert run(capsys, *words) == run(capsys, *words)


def test_measured_links_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps(_of_doctor({(0, 2): 1e8, (2, 0): 9e7, (1, 2): 1.1e8, (2, 1): 5e7})))
    hosts, round_trip_s = measured(path)
    assert hosts == [SimulatedHost(2, 1.1e8, 9e7, "node1"), SimulatedHost(1, 9e7, 1.1e8, "node2")]
    assert round_trip_s == 2e-4
    code, shown, _ = run(capsys, "--links", str(path), "--size", "1m")
    assert code == 0
    assert "3 ranks on 2 hosts (1 or 2 on each)" in shown
    code, shown, _ = run(capsys, "--links", str(path), "--hosts", "6", "--size", "1m")
    assert "ranks on 6 hosts" in shown
    assert [host.name for host in extended(hosts, 4)] == ["node1", "node2", "more0", "more1"]


def _of_doctor(rates: dict[tuple[int, int], float]) -> dict[str, Any]:
    edges = [
        {"source": source, "target": target, "reached": True, "bytes_per_s": rate, "latency_s": 2e-4}
        for (source, target), rate in rates.items()
    ]
    edges.append({"source": 0, "target": 1, "reached": True, "bytes_per_s": 5e9, "latency_s": 1e-5})
    matrix = {"hosts": ["node1", "node1", "node2"], "host_of": [0, 0, 1], "edges": edges}
    return {"ringdp_doctor": 1, "matrix": matrix}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--size", "25x"], "'25x' is not a size"),
        (["--size", "12"], "a size must be a multiple of 8 bytes"),
        (["--link", "fast"], "'fast' is not a rate"),
        (["--latency", "10"], "'10' is not a time"),
        (["--hosts", "0"], "'0' is not a number of 1 or more"),
        (["--algorithm", "magic"], "'magic' is not one of halving, tree, fold,"),
        (["--slow", "host1"], "'host1' is not HOST:SHARE"),
        (["--slow", "host7:0.5"], "the hosts are host0 to host1"),
        (["--sites", "2"], "--sites and --between go together"),
        (["--sites", "3", "--between", "1gbit,5ms"], "--sites must be 1 to 2"),
        (["--between", "1gbit"], "'1gbit' is not RATE,TIME"),
        (["--links", "nowhere.json"], "nowhere.json: No such file"),
        (["--links", "x", "--link", "1gbit"], "leave out --per-host, --link and --latency"),
        (["--compressed", "int8", "--dtype", "bfloat16"], "--compressed is for float32"),
        (["--compressed", "zip", "--size", "4k"], "there is no codec 'zip'"),
        (["--hosts", "200000"], "the most that are simulated"),
    ],
)
def test_a_command_line_that_cannot_be_used(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["simulate", *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code in (1, 2)
    assert complaint in capsys.readouterr().err


def test_files_that_are_not_doctors(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text, complaint in (
        ("no", "is not JSON"),
        ("[]", "is not what"),
        (json.dumps({"ringdp_doctor": 1, "hosts": ["a"]}), "has no measured links between hosts"),
        (json.dumps(_of_doctor({(0, 2): 1e8})), "has no measured link of node1"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match=complaint):
            measured(path)


TABLE_SLACK = 1.15
"""How much slower than the best one the choice of a table may be that was made for the place."""


@pytest.mark.parametrize(("hosts", "per_host"), [(16, 1), (64, 1), (1000, 1), (32, 8)])
def test_a_table_for_the_place_chooses_the_best_that_it_can(hosts: int, per_host: int, tmp_path: Path) -> None:
    where = place(hosts, per_host, bytes_per_s=10 * GBIT)
    path = tmp_path / "tuning.json"
    tune.write(path, where, tune.limits(where, BUILT_IN), "simulated")
    made = tuning.read(str(path))
    large = "two_level" if per_host > 1 else "ring"
    names = ["fold", "pairwise", "halving", large] if where.ranks <= 16 else ["tree", "halving", large]
    for size in tune.SIZES[::2]:
        seconds = {name: outcome.simulate(where, size, name).seconds or 0.0 for name in names}
        chosen = outcome.choice(where, size, "float32", made)
        assert seconds[chosen] <= TABLE_SLACK * min(seconds.values()), (size, chosen, seconds)


@pytest.mark.parametrize(
    ("hosts", "per_host", "slack"),
    [(6, 1, 1.8), (8, 2, 2.6), (32, 1, 1.25), (250, 1, 1.25), (32, 8, 1.25), (250, 8, 1.25)],
)
def test_the_built_in_table_is_near_the_best_at_any_rate(hosts: int, per_host: int, slack: float) -> None:
    """It does not know the links. Up to 16 ranks a fold or pairs are best, which depends on rate and latency."""
    large = "two_level" if per_host > 1 else "ring"
    small = ["fold", "pairwise"] if hosts * per_host <= 16 else ["tree"]
    for bytes_per_s, round_trip_s in ((1 * GBIT, 100e-6), (10 * GBIT, 10e-6), (100 * GBIT, 100e-6)):
        where = place(hosts, per_host, bytes_per_s=bytes_per_s, round_trip_s=round_trip_s)
        for size in (4 << 10, 64 << 10, 1 << 20):
            seconds = {name: outcome.simulate(where, size, name).seconds or 0.0 for name in (*small, "halving", large)}
            chosen = outcome.choice(where, size, "float32", BUILT_IN)
            assert seconds[chosen] <= slack * min(seconds.values()), (bytes_per_s, round_trip_s, size, chosen, seconds)


def test_the_command_writes_a_table_for_its_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hosts", "6", "--link", "100gbit", "--latency", "100us", "--size", "16k")
    assert "pairwise " in next(it for it in run(capsys, *words)[1].splitlines() if "the table's choice" in it)
    code, shown, said = run(capsys, *words, "--tune", str(tmp_path / "tuning.json"))
    assert code == 0
    assert "set RINGDP_TUNING to it on every rank" in said
    assert "fold " in next(it for it in shown.splitlines() if "the table's choice" in it)
    names = {"fold_sent_bytes", "pairwise_bytes", "halving_rank_bytes"}
    assert tuning.read(str(tmp_path / "tuning.json")).limits.keys() == {f"one_rank_per_host.{name}" for name in names}


def test_too_many_messages_are_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hosts", "1000", "--slow", "host3:0.5", "--size", "1m", "--algorithm", "ring", "--most-messages", "1m")
    code, shown, _ = run(capsys, *words)
    assert code == 1
    assert "ring was not simulated: ring of 1000 ranks sends about" in shown


def test_a_slow_link_is_a_share_of_its_rate() -> None:
    hosts = slowed(alike(3, 1, 100.0), {"host1": 0.25})
    assert [host.up_bytes_per_s for host in hosts] == [100.0, 25.0, 100.0]
    assert [host.down_bytes_per_s for host in hosts] == [100.0, 25.0, 100.0]


def test_memory_and_cores_are_shared() -> None:
    inside = place(1, 8)
    even = outcome.simulate(inside, 8 << 20, "ring").seconds
    few = outcome.simulate(dataclasses.replace(inside, cores=2), 8 << 20, "ring").seconds
    slow = outcome.simulate(dataclasses.replace(inside, memory_bytes_per_s=4e9), 8 << 20, "ring")
    assert even is not None
    assert few is not None
    assert slow.seconds is not None
    assert 3.9 * even < few < 4.1 * even
    assert slow.seconds > 2 * even
    assert slow.path["memory"] > 0.4 * slow.seconds


def _arguments(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_parsers(parser.add_subparsers())
    return parser.parse_args(["simulate", *words])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("start", ("until all are connected, and know it", "reads of the store, one after", "connections of a rank")),
        ("agreement", ("until all raise it", "messages of a rank", "until an elastic job's survivors have agreed")),
        ("commit", ("until the last rank knows that all have committed", "messages, one after another")),
    ],
)
def test_the_start_and_what_ranks_agree_on(
    what: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, _ = run(capsys, "--hosts", "8", "--per-host", "4", "--what", what)
    assert code == 0
    assert shown.startswith("32 ranks on 8 hosts, simulated\nround trips of 50 µs")
    assert all(word in shown for word in words), shown
    code, shown, _ = run(capsys, "--hosts", "8", "--per-host", "4", "--what", what, "--json")
    assert (code, set(json.loads(shown))) == (0, {"ringdp_simulate", "place", what})
    assert run(capsys, "--what", what, "--tune", "file")[0] == 2


def test_laws_of_the_start() -> None:
    def found(ranks: int, requests_per_s: float = starting.STORE_REQUESTS_PER_S) -> Any:
        where = place(ranks)
        return starting.start(where, starting.costs(where, requests_per_s), 16).numbers

    few, many = found(32), found(2000)
    assert many["mean_requests"] < 4 * few["mean_requests"]
    assert many["requests"] < 200
    assert many["rounds"] == 10  # eight, 64, 512 and 4,096 ranks, and the block of all; twice
    assert found(2000, 4500)["records_s"] > 2 * many["records_s"]


def test_an_elastic_job_of_thousands_is_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "--hosts", "2000", "--what", "agreement")
    assert code == 0
    assert "an elastic job" in shown
    assert "1024 ranks are the most" in shown
