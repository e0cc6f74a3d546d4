"""A path that passes small packets and loses large ones: what the ranks say when they meet, and in a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.hosts import Lab, Outcome, RankServer, RankSpec, run, why_not
from tests.fault.launch_jobs import wait_until

HERE = "tests.fault.test_large_packets"
MTU = 600
PORT = 29555

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


# What runs on the ranks.


def reduce_until_it_fails(spec: RankSpec, outcome: Outcome) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    folder = Path(spec.variables["FOLDER"])
    ones = torch.zeros(50_000)
    for step in range(1_000_000):
        dist.all_reduce(ones)
        if step == 10:
            (folder / f"runs-{spec.rank}").touch()
        time.sleep(0.001)


def join(spec: RankSpec, outcome: Outcome) -> None:
    import ringdp

    ringdp.init(rank=spec.rank, world_size=spec.world, init_method=spec.method)
    outcome.seconds = time.monotonic() - outcome.at


# The tests.


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        made.switch("10.1.0.{}/24")
        yield made


def specs(lab: Lab, folder: Path, *, method: str = "", body: str = "tests.fault.hosts:meet_and_add") -> list[RankSpec]:
    return [
        RankSpec(
            rank,
            len(lab.spaces),
            space=space,
            host_name=f"h{rank}",
            variables={"FOLDER": str(folder)},
            method=method or f"file://{folder}/store",
            body=body,
        )
        for rank, space in enumerate(lab.spaces)
    ]


def expect_words(outcomes: list[Outcome], error: str, *words: str) -> None:
    for it in outcomes:
        assert it.error == error, it
        for word in ("does not pass large packets", "tcp_mtu_probing=1", *words):
            assert word in it.text, it.text


def test_when_the_ranks_meet(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.narrow(2, MTU)
    outcomes = server.run(specs(lab, tmp_path), tmp_path)
    expect_words(outcomes, "HandshakeError", "rank 2 (host h2", "10.1.0.3:", "a packet with 1448 bytes did not arrive")
    assert max(it.seconds for it in outcomes) < 10.0
    stories = {it.text[it.text.index("rank 2 (host h2") :] for it in outcomes}
    assert len(stories) == 1  # word for word
    assert "it looks the same with rank" in stories.pop()  # with both others, so the leg of rank 2 is the one


@pytest.mark.slow
def test_the_advice_helps(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    for space in lab.spaces:
        run("ip", "netns", "exec", space, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_mtu_probing")
    lab.narrow(2, 1200)  # what passes is found at 1,024 bytes (net.ipv4.tcp_base_mss), after some six seconds each way
    outcomes = server.run(specs(lab, tmp_path), tmp_path)
    assert [it.text for it in outcomes] == ["", "", ""]


def test_when_torchs_store_is_reached_that_way(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.narrow(2, MTU)
    outcomes = server.run(specs(lab, tmp_path, method=f"tcp://10.1.0.1:{PORT}", body=f"{HERE}:join"), tmp_path)
    expect_words(outcomes, "HandshakeError", "rank 2 (host h2", f"the job's store at 10.1.0.1:{PORT}")
    assert max(it.seconds for it in outcomes) < 10.0


@pytest.mark.parametrize("at_the_host", [pytest.param(True, marks=pytest.mark.slow), False])
def test_in_the_middle_of_a_run(server: RankServer, lab: Lab, tmp_path: Path, at_the_host: bool) -> None:
    server.start(specs(lab, tmp_path, body=f"{HERE}:reduce_until_it_fails"), tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == 3, "all ranks to be under way")
    begin = time.monotonic()
    lab.narrow(2, MTU, at_the_host=at_the_host)
    outcomes = server.finish()
    expect_words(outcomes, "PeerLostError", "rank 2 (host h2", " bytes has arrived for ", "(tcp 10.1.0.")
    assert max(it.at for it in outcomes) - begin < 15.0
