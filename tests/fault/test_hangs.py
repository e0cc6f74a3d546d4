"""Jobs that hang or fail: a stalled rank's stack reaches those that wait, dumps are written, the verdict is right."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringdp import __main__ as commands
from ringdp.config.console_log import WIDTH
from ringdp.tools.hang import dump
from ringdp.tools.hang.dump_files import Job, read_job
from ringdp.tools.hang.verdict import Verdict, judge
from tests import forked
from tests.fault import launch_jobs
from tests.fault.launch_jobs import wait_until
from tests.train import harness

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")

PROGRAM = Path(__file__).with_name("hang_program.py")


class Ranks:
    """The ranks of a job; their dumps lie in `dumps`."""

    def __init__(self, folder: Path, way: str, world: int, environ: dict[str, str]) -> None:
        self.folder, self.dumps, self.world = folder, folder / "dumps", world
        variables = {"RINGDP_STALL_NOTICE": "0.3", "RINGDP_DUMP_DIR": str(self.dumps), **environ}
        variables = {**{k: v for k, v in os.environ.items() if not k.startswith("RINGDP_")}, **variables}
        self.processes = []
        for rank in range(world):
            with open(folder / f"log_{rank}", "wb") as log:
                self.processes.append(
                    forked.Forked(
                        "tests.fault.hang_program:main", rank, world, way, str(folder), environ=variables, output=log
                    )
                )

    def log(self, rank: int) -> str:
        return (self.folder / f"log_{rank}").read_text(errors="replace")

    def read(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.dumps / name).read_text()
        return ""

    def ready(self) -> None:
        paths = [self.folder / f"ready_{rank}" for rank in range(self.world)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in paths), "all ranks wait")

    def go_on(self) -> list[int]:
        (self.folder / "go").touch()
        return [process.wait(30) for process in self.processes]

    def dump(self, most_s: float = 5.0) -> Job:
        """What `python -m ringdp dump DIR` brings, of all ranks."""
        assert commands.main(["dump", str(self.dumps), "--wait", str(most_s)]) == 0
        wait_until(
            lambda: all(dump.stacks for dump in read_job([self.dumps]).dumps.values()), "the stacks of all ranks"
        )
        return read_job([self.dumps])

    def verdict(self) -> Verdict:
        """Of dumps by which the ranks have stood still for a while."""
        found: list[Verdict] = []

        def judged() -> bool:
            found.append(judge(self.dump()))
            return bool(found[-1].guilty)

        wait_until(judged, "a verdict")
        return found[-1]

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(way, world, VARIABLE=value): a job, which ends with the test."""
    jobs: list[Ranks] = []

    def begin(way: str, world: int = 2, **environ: str) -> Ranks:
        jobs.append(Ranks(tmp_path, way, world, environ))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def verdict(job: Job) -> Verdict:
    return judge(job)


ci = pytest.mark.ci


@pytest.mark.parametrize("way", ["sleep", pytest.param("lock", marks=ci), "c_code", pytest.param("python", marks=ci)])
def test_a_rank_that_is_stuck(start: Start, way: str) -> None:
    ranks = start(way)
    wait_until(lambda: f"in stuck_in_{way}" in ranks.read("stalls_rank0.log"), "the stack of rank 1 in rank 0's log")
    stalls = ranks.read("stalls_rank0.log")
    assert "has waited" in stalls
    assert "The threads of rank 1 (host" in stalls
    assert "C++ stack of the main thread" in stalls
    wait_until(lambda: "has waited" in ranks.log(0), "the notice")
    notice = [line for line in ranks.log(0).splitlines() if line.startswith("ringdp: ")]
    assert "has waited" in notice[0]
    assert notice[1].startswith("ringdp: for rank 1 (host ")
    assert re.search(rf"its script is at hang_program.py:\d+ in stuck_in_{way}", " ".join(notice))
    assert all(len(line) <= WIDTH for line in notice)
    if way == "c_code":
        assert "(C code holds Python's lock)" in stalls
    found = ranks.verdict()
    assert found.guilty == (1,)
    assert found.paragraph.startswith("Rank 1 never called all_reduce #2 (float32[1000], SUM) of group")
    words = {"sleep": "sleeps at", "lock": "waits for a lock at", "c_code": "in C code that holds", "python": "is at"}
    assert words[way] in found.paragraph
    assert f"in stuck_in_{way}" in found.paragraph
    assert f"in stuck_in_{way}" in found.stacks[1]
    assert "(called at hang_program.py:" in found.paragraph
    assert [process.poll() for process in ranks.processes] == [None, None]  # both go on


@pytest.mark.ci  # it has to last longer than the timeout
def test_an_idle_store_is_no_hang(start: Start) -> None:
    limit_s = 2.0
    ranks = start("idle_store", RINGDP_STALL_NOTICE="0.1", LIMIT_S=str(limit_s))
    ranks.ready()
    time.sleep(1.5 * limit_s)
    job = ranks.dump()
    found = verdict(job)
    assert (found.guilty, found.stacks) == ((), {}), found.paragraph
    assert len(job.dumps) == 2
    assert [it.title for one in job.dumps.values() for it in one.operations if not it.ended_well] == []
    assert ranks.go_on() == [0, 0], ranks.log(0) + ranks.log(1)
    for rank in range(2):
        assert "has waited" not in ranks.log(rank) + ranks.read(f"stalls_rank{rank}.log")


@pytest.mark.parametrize(
    ("way", "world"), [("crossed_again", 2), *(pytest.param("crossed", world, marks=ci) for world in (2, 3))]
)
def test_two_groups_in_other_orders_are_an_error_at_the_first_notice(start: Start, way: str, world: int) -> None:
    ranks = start(way, world, RINGDP_STALL_NOTICE="1.2")  # explain blames nobody for what waits less than a second
    assert [process.wait(20) for process in ranks.processes] == [1] * world
    number = 2 if way.endswith("again") else 1
    for rank in range(world):
        error = next(line for line in ranks.log(rank).splitlines() if "MismatchError" in line)
        assert "deadlock of two groups: rank 0 (host" in error
        assert f"waits in all_reduce #{number} (float32[1000], SUM) of group '1' for rank" in error
        assert f"waits in all_reduce #{number} (float32[1000], SUM) of group '2' for rank 0" in error
    found = verdict(read_job([ranks.dumps]))
    assert found.paragraph.startswith("Deadlock of 2 groups that are taken in other orders: rank ")


def test_a_consolidated_state_on_one_rank_is_an_error(start: Start) -> None:
    ranks = start("consolidated")
    assert [process.wait(20) for process in ranks.processes] == [1, 1]
    assert all("MismatchError" in ranks.log(rank) for rank in (0, 1))


@pytest.mark.parametrize("way", ["by_a_thread", *(pytest.param(it, marks=ci) for it in ("by_a_timer", "by_a_handle"))])
def test_a_call_that_comes_later_from_elsewhere_is_no_deadlock(start: Start, way: str) -> None:
    ranks = start(way)
    assert [process.wait(20) for process in ranks.processes] == [0, 0], ranks.log(0) + ranks.log(1)
    assert "has waited" in ranks.log(0)


def test_a_group_that_several_threads_call_is_named_in_the_error(start: Start) -> None:
    ranks = start("two_threads")
    assert [process.wait(20) for process in ranks.processes] == [1, 1]
    for rank in (0, 1):
        error = next(line for line in ranks.log(rank).splitlines() if "MismatchError" in line)
        assert re.search(
            r"several threads of rank \d call this group: the main thread \(last #\d\) and thread \d+", error
        )


def test_a_rank_in_a_collective_of_another_group(start: Start) -> None:
    ranks = start("other_group", 3, RINGDP_STALL_NOTICE="1.2")
    assert [process.wait(20) for process in ranks.processes] == [1, 1, 1]
    assert all("MismatchError: deadlock of two groups: rank" in ranks.log(rank) for rank in range(3))
    found = verdict(read_job([ranks.dumps]))
    assert "rank 1 waits in barrier #1 of group" in found.paragraph
    assert "for rank 2, which has not called it" in found.paragraph


def test_a_timeout_leaves_dumps_of_both_sides(start: Start) -> None:
    ranks = start("sleep", LIMIT_S="1")
    wait_until(lambda: len(list(ranks.dumps.glob("dump_rank*.json"))) >= 2, "the dumps of both ranks")
    wait_until(lambda: "RingTimeoutError" in ranks.log(0), "the error")
    job = read_job([ranks.dumps])
    assert job.dumps[0].failures[0].kind == "RingTimeoutError"
    assert job.dumps[1].reason == "failure: RingTimeoutError"
    found = verdict(job)
    assert found.guilty == (1,)
    assert "Rank 1 never called all_reduce #2" in found.paragraph


def test_a_disagreement_and_a_death_leave_dumps(start: Start) -> None:
    ranks = start("shapes", 3)
    for process in ranks.processes:
        assert process.wait(30) == 1
    found = verdict(read_job([ranks.dumps]))
    # Another rank may hear of the failure before it has called the operation: then it is one against one.
    assert 1 in found.guilty
    assert len(found.guilty) == (1 if "ranks 0 and 2 called" in found.paragraph else 2)
    assert re.search(r"The sizes differ \((7, 1000|1000, 7)\)\.", found.paragraph)


def test_a_death_leaves_dumps_of_the_others(start: Start) -> None:
    ranks = start("dies", 3)
    assert [process.wait(30) for process in ranks.processes] == [1, -signal.SIGKILL, 1]
    job = read_job([ranks.dumps])
    assert job.absent == [1]
    found = verdict(job)
    assert found.guilty == (1,)
    assert found.paragraph.startswith("Rank 1 was lost first")
    assert "It left no dump" in found.paragraph


def test_a_signal_brings_dumps_bounded_in_number_and_the_job_goes_on(start: Start) -> None:
    ranks = start("waits")
    ranks.ready()
    for count in range(1, 12):
        ranks.processes[0].send_signal(signal.SIGUSR1)
        wait_until((ranks.dumps / f"dump_rank0_{count}.json").exists, f"dump {count}")
    names = sorted(int(path.stem.rpartition("_")[2]) for path in ranks.dumps.glob("dump_rank0_*.json"))
    assert names == list(range(4, 12))
    assert not list(ranks.dumps.glob("dump_rank1_*"))
    dump = json.loads((ranks.dumps / "dump_rank0_11.json").read_text())
    assert dump["reason"] == "signal"
    assert dump["operations"][0]["state"] == "done"
    assert ranks.go_on() == [0, 0]
    assert "ended well" in ranks.log(0)


def test_a_handler_of_the_scripts_stays(start: Start) -> None:
    ranks = start("own_handler", RINGDP_LOG_LEVEL="info")
    ranks.ready()
    ranks.processes[0].send_signal(signal.SIGUSR1)
    wait_until(lambda: "SIGUSR1 has a handler of the script's" in ranks.log(0), "the line about it")
    assert commands.main(["dump", str(ranks.processes[0].pid)]) == 0
    wait_until(lambda: bool(list(ranks.dumps.glob("dump_rank0_*.json"))), "the dump")
    assert ranks.go_on() == [0, 0]
    assert "rank 0 ended well, 1 signals of its own" in ranks.log(0)
    assert len(list(ranks.dumps.glob("dump_rank0_*.json"))) == 1  # by the command alone


def test_a_forked_child_writes_nothing(start: Start) -> None:
    ranks = start("forks")
    ranks.ready()
    child = int((ranks.folder / "ready_0").read_text())
    os.kill(child, signal.SIGUSR1)
    os.kill(child, signal.SIGRTMAX - 6)
    assert "writes no dumps" in str(dump.ask(child))
    ranks.processes[1].send_signal(signal.SIGUSR1)
    wait_until(lambda: bool(list(ranks.dumps.glob("dump_rank1_*.json"))), "rank 1's dump")
    assert not list(ranks.dumps.glob("dump_rank0_*"))
    os.kill(child, 0)  # it lives
    for rank in (0, 1):
        os.kill(int((ranks.folder / f"ready_{rank}").read_text()), signal.SIGKILL)
    assert ranks.go_on() == [0, 0]


def test_a_stopped_rank_cannot_answer_and_the_notice_says_so(start: Start) -> None:
    ranks = start("sleep")
    wait_until(lambda: "has waited" in ranks.log(0), "a notice")
    ranks.processes[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: "stopped or overloaded? Its stack cannot be fetched" in ranks.log(0), "that it is stopped")


def test_a_folder_that_cannot_be_written_gives_one_line(start: Start) -> None:
    ranks = start("waits", RINGDP_DUMP_DIR="/proc/no/such/folder")
    ranks.ready()
    for _ in range(3):
        ranks.processes[0].send_signal(signal.SIGUSR1)
    assert ranks.go_on() == [0, 0]
    lines = [line for line in ranks.log(0).splitlines() if "cannot write" in line]
    assert len(lines) == 1
    assert "/proc/no/such/folder" in lines[0]
    assert "nothing else is affected" in lines[0]


def test_without_a_folder_nothing_is_written_and_the_signal_is_the_systems(start: Start) -> None:
    ranks = start("waits", RINGDP_DUMP_DIR="")
    ranks.ready()
    assert "writes no dumps" in str(dump.ask(ranks.processes[0].pid))
    ranks.processes[0].send_signal(signal.SIGUSR1)
    assert ranks.processes[0].wait(30) == -signal.SIGUSR1


@pytest.mark.ci
def test_under_ringrun_dumps_lie_beside_the_logs(tmp_path: Path, jobs: list[launch_jobs.Job]) -> None:
    environ = {"RINGDP_STALL_NOTICE": "1", "PYTHONPATH": str(launch_jobs.ROOT), "RINGDP_DUMP_DIR": ""}
    job = launch_jobs.Job(
        tmp_path, "--nproc-per-node", "2", "--log-dir", tmp_path / "logs", PROGRAM, "lock", tmp_path, environ=environ
    )
    jobs.append(job)
    wait_until(lambda: any(tmp_path.rglob("stalls_rank0.log")), "the log of stalls", 60)
    stalls = next(tmp_path.rglob("stalls_rank0.log"))
    assert (stalls.parent / "stderr.log").exists()
    found: list[Verdict] = []

    def judged() -> bool:
        assert commands.main(["dump", str(tmp_path / "logs")]) == 0
        found.append(judge(read_job([tmp_path / "logs"])))
        return found[-1].guilty == (1,) and "waits for a lock at" in found[-1].paragraph

    wait_until(judged, "the verdict")
    assert "waits for a lock at hang_program.py" in found[-1].paragraph
