"""ringrun --evict-after: which stopped ranks are killed, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from ringdp.launcher import processes, stopped
from ringdp.launcher.arguments import parse
from ringdp.launcher.stopped import StoppedRanks


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    running = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield running
    for one in running:
        one.kill()
        one.wait()


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopped, "time", made)
    return made


def stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    while not processes.is_stopped(process.pid):
        time.sleep(0.001)


def look(ranks: StoppedRanks, clock: Clock, pids: list[int], *seconds: float, others: bool = False) -> None:
    for passed in seconds:
        clock.now_s += passed
        ranks.look(pids, others=others)


def test_it_counts_from_the_last_time_that_it_ran(sleepers: list[subprocess.Popen[bytes]], clock: Clock) -> None:
    pids = [one.pid for one in sleepers]
    ranks = StoppedRanks(2.0)
    stop(sleepers[0])
    look(ranks, clock, pids, 0.0, 0.9, 0.9)
    os.kill(sleepers[0].pid, signal.SIGCONT)
    while processes.is_stopped(sleepers[0].pid):
        time.sleep(0.001)
    look(ranks, clock, pids, 0.9)
    stop(sleepers[0])
    look(ranks, clock, pids, 0.5, 0.9, 0.9)
    assert [one.poll() for one in sleepers] == [None, None]
    assert ranks.why(sleepers[0].pid) == ""
    look(ranks, clock, pids, 0.5)
    assert sleepers[0].wait(5) == -signal.SIGKILL
    assert ranks.why(sleepers[0].pid) == "it had been stopped for 2.3 s: --evict-after 2"
    assert sleepers[1].poll() is None
    assert ranks.why(sleepers[1].pid) == ""


def test_time_in_which_the_launcher_was_stopped_itself_does_not_count(
    sleepers: list[subprocess.Popen[bytes]], clock: Clock
) -> None:
    pids = [one.pid for one in sleepers]
    ranks = StoppedRanks(5.0)
    stop(sleepers[0])
    look(ranks, clock, pids, 0.0, 3600.0, 3600.0)
    assert sleepers[0].poll() is None


def test_the_last_ranks_are_left_alone_where_there_are_no_others(
    sleepers: list[subprocess.Popen[bytes]], clock: Clock
) -> None:
    pids = [one.pid for one in sleepers]
    ranks = StoppedRanks(1.0)
    for one in sleepers:
        stop(one)
    look(ranks, clock, pids, 0.0, 1.0, 1.0)
    assert [one.poll() for one in sleepers] == [None, None]
    look(ranks, clock, pids, 1.0, others=True)
    assert [one.wait(5) for one in sleepers] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("limit_s", "words"), [(None, "the others may not"), (60.0, "the others may not"), (1.0, "--evict-after")]
)
def test_a_newcomer_may_be_stopped_for_two_seconds(
    sleepers: list[subprocess.Popen[bytes]], clock: Clock, limit_s: float | None, words: str
) -> None:
    pids = [one.pid for one in sleepers]
    ranks = StoppedRanks(limit_s)
    stop(sleepers[0])
    for passed in (0.0, 0.9, 0.9, 0.9):
        clock.now_s += passed
        ranks.look(pids, others=False, newcomers=pids[:1])
    assert sleepers[0].wait(5) == -signal.SIGKILL
    assert words in ranks.why(pids[0])


def test_without_a_limit_a_member_may_be_stopped(sleepers: list[subprocess.Popen[bytes]], clock: Clock) -> None:
    pids = [one.pid for one in sleepers]
    ranks = StoppedRanks(None)
    stop(sleepers[0])
    look(ranks, clock, pids, 0.0, *[0.9] * 9, others=True)
    assert sleepers[0].poll() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--evict-after", "5"], "--evict-after needs --elastic"),
        (["--elastic", "--evict-after", "0"], "a number of seconds above 0, got 0"),
        (["--elastic", "--evict-after", "nan"], "a number of seconds above 0, got nan"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*arguments, "train.py"])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
