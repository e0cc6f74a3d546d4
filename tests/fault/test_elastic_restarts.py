"""Elastic jobs on several nodes that are lost as a whole: their launchers start all ranks again, in agreement."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.fault.launch_jobs import Job, script, wait_until
from tests.helpers import free_port
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

# In attempt a, rank r does what WORDS[a][r] says: a number is the step before which it dies, 0 before it has met the
# others; "w" waits for the file go in its fifth step, "x" too, and dies before the seventh.
TRAIN = """
    import os, pathlib, signal, sys, time
    import torch
    import ringdp

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    words = [*sys.argv[1:], "----"]
    word = words[min(attempt, len(words) - 1)][rank]
    dies = int(word) if word.isdigit() else -1

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    if dies == 0:
        die()
    ringdp.init(device="cpu")
    met = pathlib.Path(f"../met-{attempt}-{rank}")
    met.with_name(f"new-{rank}").write_text(str(os.getpid()))
    met.with_name(f"new-{rank}").rename(met)
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(8):
        if step == 4 and word in ("w", "x"):
            pathlib.Path(f"../waits-{attempt}-{rank}").touch()
        while step == 4 and word in ("w", "x") and not pathlib.Path("../go").exists():
            time.sleep(0.02)
        if step == 6 and word == "x":
            die()
        if step == dies:
            die()
        model(torch.full((4, 10), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = float(model.module.weight.detach().sum()).hex()
    print(f"attempt {attempt} rank {rank} of {ringdp.world_size()}: {weight}", flush=True)
"""


Start = Callable[..., list[Job]]


@pytest.fixture
def start(tmp_path: Path, jobs: list[Job]) -> Start:
    def start_nodes(
        words: Sequence[str], *flags: str, nodes: int = 2, ranks: int = 2, backend: str = "static", port: int = 0
    ) -> list[Job]:
        path, port = script(tmp_path, TRAIN), port or free_port()
        for node in range(nodes):
            (own := tmp_path / f"node{node}").mkdir()
            where = ["--elastic", "--nnodes", str(nodes), "-n", str(ranks), "--local-addr", "127.0.0.1", *flags]
            if backend == "static":
                where += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            else:
                where += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            jobs.append(Job(own, *where, "--console", "all", path, *words))
        return jobs[-nodes:]

    return start_nodes


def end(nodes: Sequence[Job]) -> list[int]:
    codes = []
    for node in nodes:
        try:
            codes.append(node.wait(60))
        except AssertionError:
            raise AssertionError("\n".join(one.err for one in nodes)) from None
    assert len(set(codes)) == 1, "\n".join(one.err for one in nodes)
    return codes


def told(nodes: Sequence[Job]) -> list[str]:
    """The attempt and world of each rank that has ended well, and the weights, of which there must be one story."""
    lines = [line for node in nodes for line in re.findall(r"attempt \d rank \d of \d: \S+", node.out)]
    assert len({line.rpartition(" ")[2] for line in lines}) <= 1, lines
    return sorted(line.rpartition(":")[0] for line in lines)


def kill(node: Job) -> None:
    """With all its processes, as when its host is gone."""
    pids = [node.process.pid, *node.processes()]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them tells anybody
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_job_that_is_lost_as_a_whole_is_started_again(start: Start, backend: str) -> None:
    """Its last ranks die later on one node than on the other."""
    nodes = start(["2255"], "--max-restarts", "2", backend=backend)
    assert end(nodes) == [0, 0]
    assert told(nodes) == [f"attempt 1 rank {rank} of 4" for rank in range(4)]
    for node in nodes:
        assert len(re.findall(r"ringrun: starting again: ranks \d-\d of 4, restart 1 of 2\n", node.err)) == 1, node.err
        assert re.search(r"ringrun: attempt 0: rank \d on host \S+ was killed by SIGKILL", node.err), node.err
        assert re.search(r"ringrun: finished after .* and 8 steps since the restart", node.err), node.err


def test_at_most_so_often_and_one_exit_code(start: Start) -> None:
    nodes = start(["22", "33", "2-"], "--max-restarts", "1", ranks=1)
    assert end(nodes) == [1, 1]
    assert told(nodes) == []
    for node in nodes:
        assert re.search(r"FAILED after .* and 1 restart: rank \d on host \S+ was killed", node.err), node.err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_dies_before_all_have_met_starts_all_again(start: Start, ranks: int) -> None:
    nodes = start(["---0"[-2 * ranks :]], "--max-restarts", "1", ranks=ranks)
    assert end(nodes) == [0, 0]
    assert told(nodes) == [f"attempt 1 rank {rank} of {2 * ranks}" for rank in range(2 * ranks)]


def test_another_job_of_the_same_address_is_refused(tmp_path: Path, jobs: list[Job], start: Start) -> None:
    """Its failure is not that of the first job's node, and starts nothing again."""
    port = free_port()
    nodes = start(["ww"], "--max-restarts", "1", ranks=1, port=port)
    wait_until(lambda: len(list(tmp_path.glob("waits-0-*"))) == 2, "the ranks")
    (other := tmp_path / "other").mkdir()
    where = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    jobs.append(Job(other, "--elastic", *where, "--max-restarts", "1", "-n", "1", tmp_path / "script.py", "--"))
    assert end(jobs[-1:]) == [1]
    words = r"ringrun: FAILED after .*: an elastic job runs at this rendezvous, and node 1 of it has a launcher already"
    assert re.search(words, jobs[-1].err), jobs[-1].err
    (tmp_path / "go").touch()
    assert end(nodes) == [0, 0]
    assert told(nodes) == [f"attempt 0 rank {rank} of 2" for rank in range(2)]


def test_ranks_lost_on_one_node_alone_start_nothing_again(start: Start) -> None:
    nodes = start(["--33"], "--max-restarts", "1")
    assert end(nodes) == [0, 0]
    assert told(nodes) == [f"attempt 0 rank {rank} of 2" for rank in range(2)]


@pytest.mark.ci
@pytest.mark.parametrize("lowest", [False, True])
def test_a_host_that_is_gone_is_not_waited_for(tmp_path: Path, start: Start, lowest: bool) -> None:
    """Also that of the launcher which kept the ranks' store, where the launchers have met at another one."""
    meeting = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    words = ["wxx" if lowest else "xxw"]
    nodes = start(words, "--max-restarts", "3", nodes=3, ranks=1, backend="c10d", port=meeting.port)
    wait_until(lambda: len(list(tmp_path.glob("met-0-*"))) == 3, "the ranks")
    by_rank = {int(re.findall(r"rank (\d) of 3", node.err)[0]): node for node in nodes}
    kill(by_rank.pop(0 if lowest else 2))
    began = time.monotonic()
    (tmp_path / "go").touch()
    assert end(list(by_rank.values())) == [0, 0]
    assert time.monotonic() - began < 20
    assert told(list(by_rank.values())) == [f"attempt 1 rank {rank} of 2" for rank in range(2)]
    for node in by_rank.values():
        without = (
            rf"ringrun: starting again without node {0 if lowest else 2} \(\S+\): no beat of its launcher for 10 s"
        )
        assert len(re.findall(without, node.err)) == 1, node.err
        assert re.search(r"ringrun: starting again: rank \d of 2, restart 1 of 3", node.err), node.err


def test_a_launcher_that_was_stopped_by_its_user_is_not_waited_for(tmp_path: Path, start: Start) -> None:
    nodes = start(["xw"], "--max-restarts", "1", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("waits-0-*"))) == 2, "the ranks")
    nodes[1].process.send_signal(signal.SIGTERM)
    assert end(nodes[1:]) == [143]
    (tmp_path / "go").touch()
    began = time.monotonic()
    assert end(nodes[:1]) == [0]
    assert time.monotonic() - began < 9
    assert re.search(r"starting again without node 1 \(\S+\): its launcher has ended\n", nodes[0].err), nodes[0].err
    assert told(nodes[:1]) == ["attempt 1 rank 0 of 1"]


@pytest.mark.ci
def test_one_that_is_left_alone_starts_again_alone(tmp_path: Path, start: Start) -> None:
    """Also a second time."""
    nodes = start(["xw", "3", "5"], "--max-restarts", "3", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("met-0-*"))) == 2, "the ranks")
    kill(nodes[1])
    (tmp_path / "go").touch()
    assert end(nodes[:1]) == [0]
    assert told(nodes[:1]) == ["attempt 3 rank 0 of 1"]


@pytest.mark.ci
def test_a_launcher_that_was_stopped_ends_when_the_others_have_started_again(tmp_path: Path, start: Start) -> None:
    """It may not go on beside them: its rank, which has not noticed, is ended."""
    nodes = start(["xw", "w"], "--max-restarts", "3", ranks=1)
    wait_until(lambda: len(list(tmp_path.glob("waits-0-*"))) == 2, "the ranks")
    stopped = [nodes[1].process.pid, *nodes[1].processes()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(int((tmp_path / "met-0-0").read_text()), signal.SIGKILL)
    wait_until((tmp_path / "met-1-0").exists, "the other start", 20)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert end(nodes[1:]) == [1]
    assert "started their ranks again without this one" in nodes[1].err
    (tmp_path / "go").touch()
    assert end(nodes[:1]) == [0]
