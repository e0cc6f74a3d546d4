"""`python -m ringdp doctor` between hosts: a slow edge, a wall, a rank that does not come."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringdp.config import tuning
from tests.fault.hosts import Lab, Outcome, RankServer, RankSpec, run, why_not

pytestmark = [pytest.mark.ci, pytest.mark.timeout(90), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Three hosts at a switch, each behind 1 Gbit."""
    with Lab(3) as made:
        made.switch("10.91.0.{}/24")
        for host in range(3):
            slow_down(made, host, "1gbit")
        yield made


def slow_down(lab: Lab, host: int, rate: str) -> None:
    """What the host sends; what it receives stays as it is."""
    ip = ["tc", "-n", lab.spaces[host], "qdisc", "replace", "dev", "eth0", "root", "tbf"]
    run(*ip, "rate", rate, "burst", "64k", "latency", "50ms")


def examine(spec: RankSpec, outcome: Outcome) -> None:
    """A rank: the command as a launcher would start it."""
    from ringdp import __main__ as command

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        words = os.environ["DOCTOR_WORDS"].split()
        outcome.value = command.main(["doctor", "--json", "--seconds", "2", *words])
    outcome.text = out.getvalue() or err.getvalue()


def doctor(
    server: RankServer,
    lab: Lab,
    folder: Path,
    words: str = "",
    *,
    ranks: tuple[int, ...] = (0, 1, 2),
    body: str = "examine",
    dies: int = -1,
    **variables: str,
) -> dict[int, tuple[int, dict[str, Any]]]:
    """The exit code and the JSON of the ranks that printed one."""
    specs = [
        RankSpec(
            rank,
            3,
            space=lab.spaces[rank],
            host_name=f"h{rank}",
            variables={
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.91.0.1",
                "MASTER_PORT": "29500",
                "DOCTOR_WORDS": words,
                **variables,
            },
            body=f"tests.fault.test_doctor_hosts:{body}",
        )
        for rank in ranks
    ]
    outcomes = server.run(specs, folder)
    by_rank = dict(zip(ranks, outcomes, strict=True))
    assert by_rank.pop(dies, Outcome(error="died")).error == "died"
    assert {it.error for it in by_rank.values()} == {""}, [it.text for it in outcomes]
    return {rank: (int(it.value), json.loads(it.text)) for rank, it in by_rank.items() if it.text}


def sentences(told: dict[str, Any], verdict: str) -> list[str]:
    return [one["sentence"] for one in told["findings"] if one["verdict"] == verdict]


def test_the_slow_edge_is_named(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    slow_down(lab, 2, "50mbit")
    told = doctor(server, lab, tmp_path, f"--min-bandwidth 500mbit --uplinks {tmp_path}/map.json")
    assert set(told) == {0}  # rank 0 speaks for all
    code, report = told[0]
    assert code == 1
    [sentence] = sentences(report, "problem")
    assert sentence.startswith("the slowest edge between hosts is rank 2 (h2) to rank ")
    assert "at least 500 Mbit/s were asked for" in sentence
    rates = {(it["source"], it["target"]): it["bytes_per_s"] * 8e-6 for it in report["matrix"]["edges"]}
    for (source, _), mbit in rates.items():
        assert 35 < mbit < 65 if source == 2 else 100 < mbit < 1200, rates  # other work takes the cores at times
    *fast, slow = tuning.read(f"{tmp_path}/map.json").limits.items()
    assert [name for name, _ in (*fast, slow)] == ["uplink.h0", "uplink.h1", "uplink.h2"]
    assert 35 < slow[1] * 8e-6 < 65 < min(rate for _, rate in fast) * 8e-6
    [met] = [one for one in report["findings"] if one["check"] == "ring"]
    assert met["verdict"] == "ok"
    assert "ring met in" in met["sentence"]
    assert report["hosts"] == ["h0", "h1", "h2"]


def test_a_wall_is_named_with_what_was_tried(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    """Nobody gets through to rank 1, whose store connection is its own: only ports of the range are closed."""
    lab.drop_incoming(1, "eth0", "29600-29699")
    code, report = doctor(server, lab, tmp_path, RINGDP_PORT_RANGE="29600-29699")[0]
    assert code == 1
    [problem] = sentences(report, "problem")  # rank 0 need not dial
    assert problem.startswith("rank 2 (h2) does not reach rank 1 (h1): 10.91.0.2:296")
    assert "no answer within 3 s" in problem
    assert [it for it in sentences(report, "note") if it.startswith("rank 0 (h0) does not reach rank 1 (h1)")]


def test_who_does_not_come_is_named_and_who_differs(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    told = doctor(server, lab, tmp_path, "--timeout 2", ranks=(0, 2))
    code, report = told[0]
    assert code == 1
    [problem] = sentences(report, "problem")
    assert problem.startswith(
        "rank 1 of 3 did not come to the store within 2 s; those that came: rank 0 on h0, rank 2 on h2"
    )


def test_a_rank_that_cannot_reach_the_store_says_so(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    told = doctor(server, lab, tmp_path, "--timeout 2", ranks=(1,))
    code, report = told[1]
    assert code == 1
    [problem] = sentences(report, "problem")
    assert problem.startswith("rank 1 of 3 cannot reach the job's store: ")
    assert "tcp://10.91.0.1:29500" in problem


def die_after_the_others_came(spec: RankSpec, outcome: Outcome) -> None:
    """Rank 1: it is there, and gone as soon as links are measured."""
    from ringdp.tools.doctor.ranks import session

    if spec.rank == 1:
        session._Session._reach = lambda *_: os._exit(3)  # type: ignore[method-assign]
    examine(spec, outcome)


def test_a_rank_that_dies_in_the_middle_is_named(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    told = doctor(server, lab, tmp_path, "--timeout 2", body="die_after_the_others_came", dies=1)
    code, report = told[0]
    assert code == 1
    [problem] = [it for it in sentences(report, "problem") if "did not" in it]
    assert problem.startswith("rank 1 did not try the others' addresses within 2 s: ")
