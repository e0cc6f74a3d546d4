"""Who is to blame, and what is said of it."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from ringdp import stories
from ringdp.launcher import disks, summary
from ringdp.launcher.failure import examine, last_exception
from ringdp.launcher.filters import plain
from ringdp.launcher.logs import RankLogs
from ringdp.launcher.messages import RankFailure
from ringdp.launcher.summary import MAX_LINES, broken, failed

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'


class Ranks:
    """Fabricated ends of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: list[RankFailure] = []
        self.logs: list[RankLogs] = []

    def add(self, exit_code: int, *, stderr: str = "", stdout: str = "", error: str = "", at_s: float = 1000.0) -> None:
        rank = len(self.logs)
        folder = self.folder / str(rank)
        folder.mkdir()
        logs = RankLogs(
            rank=rank,
            local_rank=rank,
            stdout=str(folder / "stdout.log"),
            stderr=str(folder / "stderr.log"),
            error_file=str(folder / "error.json"),
        )
        Path(logs.stdout).write_text(stdout)
        Path(logs.stderr).write_text(stderr)
        os.utime(logs.stderr, (at_s, at_s))
        if error:
            Path(logs.error_file).write_text(json.dumps({"message": {"message": error, "extraInfo": {}}}))
            os.utime(logs.error_file, (at_s, at_s))
        self.logs.append(logs)
        if exit_code == 0:  # torch's agent counts failures alone
            return
        self.failures.append(
            RankFailure(rank=rank, local_rank=rank, pid=100 + rank, exit_code=exit_code, observed_s=float(int(at_s)))
        )

    def summary(self, *, killed_by: str = "") -> list[str]:
        reports = examine(tuple(self.failures), tuple(self.logs), killed_by=killed_by)
        return failed(reports, host="box", folder=str(self.folder), seconds=12.34, restarts=0)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_who_lost_a_peer_is_not_to_blame(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + "ringdp.errors.PeerLostError: rank 1 on host box is gone\n", at_s=1000.1)
    ranks.add(-signal.SIGKILL, at_s=1000.3)
    ranks.add(-signal.SIGTERM)
    summary = ranks.summary()
    assert "rank 1 on host box was killed by SIGKILL" in summary[0]
    assert "  then: rank 0 PeerLostError; rank 2 stopped" in summary


def test_a_damaged_connection_is_to_blame_and_not_who_lost_a_peer_by_it(ranks: Ranks) -> None:
    damaged = "DamagedDataError: rank 1 (host box) received damaged bytes from rank 2 (host far, pid 7)"
    ranks.add(1, stderr=TRACEBACK + "ringdp.errors.PeerLostError: rank 1 on host box is gone\n", at_s=1000.1)
    ranks.add(1, stderr=TRACEBACK + f"ringdp.errors.{damaged}\n", at_s=1000.3)
    assert f"rank 1 on host box raised {damaged}" in ranks.summary()[0]


def test_the_earlier_exception_is_to_blame(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + "RuntimeError: second\n", at_s=1000.5)
    ranks.add(1, stderr=TRACEBACK + "RuntimeError: first\n", at_s=1000.2)
    assert "rank 1 on host box raised RuntimeError: first" in ranks.summary()[0]


def test_who_was_still_ending_of_its_exception_when_it_was_stopped_is_to_blame(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + "PeerLostError: rank 1 left\n", at_s=1000.1)
    ranks.add(-signal.SIGTERM, stderr=TRACEBACK + "ValueError: bad batch\n", at_s=1000.0)
    assert "rank 1 on host box raised ValueError: bad batch" in ranks.summary()[0]


def test_an_exception_that_was_logged_long_ago_is_not_the_cause(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + "PeerLostError: rank 5 on host far is gone\n")
    ranks.add(-signal.SIGTERM, stderr=TRACEBACK + "OSError: retried\n" + "step done\n" * 20)
    assert "rank 0 on host box raised PeerLostError: rank 5 on host far is gone" in ranks.summary()[0]


def test_sigkill_is_put_down_to_what_the_kernel_has_counted(ranks: Ranks) -> None:
    ranks.add(-signal.SIGKILL)
    assert "SIGKILL (often: out of memory)" in ranks.summary()[0]
    assert "SIGKILL (out of memory: the kernel ended it)" in ranks.summary(killed_by=stories.out_of_memory(4, 5))[0]
    assert "the kernel's own killer did not act" in ranks.summary(killed_by=stories.out_of_memory(4, 4))[0]


def test_all_ended_by_somebody_elses_sigterm(ranks: Ranks) -> None:
    ranks.add(-signal.SIGTERM)
    assert "was killed by SIGTERM (another process asked it to end)" in ranks.summary()[0]


def test_who_left_by_itself_and_was_stopped_while_it_was_ending_is_to_blame(ranks: Ranks) -> None:
    """By sys.exit(3): it says goodbye, the others fail, and torch's agent stops it before its interpreter has ended."""
    lost = (
        "ringdp.errors.PeerLostError: rank {} (host box) lost rank 1 (host box, pid 7) during all_reduce #2: Connection"
        " closed by peer: it left the job: its program ended; look at that rank's own log\n"
    )
    ranks.add(1, stderr=TRACEBACK + lost.format(0))
    ranks.add(-signal.SIGTERM)
    ranks.add(1, stderr=TRACEBACK + lost.format(2))
    summary = ranks.summary()
    assert "rank 1 on host box was killed by SIGTERM" in summary[0]
    assert "had left the job before, as the other ranks reported: its program ended" in summary[0]
    assert "  then: ranks 0, 2 PeerLostError" in summary


LOST = (
    "ringdp.errors.PeerLostError: {}rank 0 (host box) lost rank 1 (host box, pid 7) during all_reduce #17 (float32[59]"
    ", AVG) 'bucket 0: bias, weight', waiting for rank 1 (host box, pid 7; 0 of 236 bytes received): Connection closed"
    " by peer: {}; look at that rank's own log for the reason (step 13, bucket 0: bias, weight)\n"
)
EARLY = "rank 1's program ended after 12 steps while rank 0 makes step 13: the ranks have … ("


def test_a_rank_whose_batches_ended_is_named_with_its_exit_code(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + LOST.format(EARLY, "it left the job: its program ended after 12 steps"))
    ranks.add(0)
    assert ranks.summary()[0] == (
        "ringrun: FAILED after 12.3 s: rank 1 finished its script after 12 steps (exit code 0) while rank 0 makes step"
        " 13: the ranks have different numbers of batches. Use DistributedSampler, drop_last=True, or"
        " `with model.join():`"
    )


@pytest.mark.parametrize("last", [-signal.SIGTERM, 3])
def test_a_rank_whose_end_is_not_known_may_have_left_early(ranks: Ranks, last: int) -> None:
    ranks.add(1, stderr=TRACEBACK + LOST.format(EARLY, "it left the job: its program ended after 12 steps"))
    ranks.add(last)
    words = ranks.summary()[0]
    if last == 3:
        assert words.endswith("rank 1 on host box ended with exit code 3")
    else:
        assert "rank 1's program ended after 12 steps while rank 0 makes step 13: " in words
        assert "or rank 1 left its loop early. Use DistributedSampler" in words


def test_a_rank_that_ends_well_and_leaves_the_others_waiting_is_named(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + LOST.format("", "the connection ended without a goodbye"))
    ranks.add(0)
    during = "while rank 0 waited for it in all_reduce #17 (float32[59], AVG) 'bucket 0: bias, weight'"
    left = f"rank 1 ended with exit code 0 without leaving the job (os._exit?) {during}"
    assert ranks.summary()[0].endswith(left)


def test_a_metric_behind_the_loop_that_met_a_bucket_is_told_with_both_steps(ranks: Ranks) -> None:
    text = (
        "ranks disagree about operation #17: rank 0 (host box, pid 6) does all_reduce(float32[59], AVG) 'bucket 0: w',"
        " rank 1 (host box, pid 7) does all_reduce(float32[1], SUM); call the same"
    )
    told = "rank 1 calls all_reduce(float32[1], SUM) after 12 steps while rank 0 makes a further step: "
    ranks.add(1, stderr=TRACEBACK + f"ringdp.errors.MismatchError: ({text} (step 13, bucket 0: w))\n", at_s=1000.1)
    ranks.add(1, stderr=TRACEBACK + f"ringdp.errors.MismatchError: {told}({text} (reported by rank 0 (host box)))\n")
    assert "rank 1 calls all_reduce(float32[1], SUM) after 12 steps while rank 0 makes step 13: " in ranks.summary()[0]


def test_nobody_is_blamed_where_the_others_lost_different_ranks(ranks: Ranks) -> None:
    ranks.add(1, stderr=TRACEBACK + "PeerLostError: rank 0 (host box) lost rank 2 (host box, pid 9)\n", at_s=1000.1)
    ranks.add(-signal.SIGTERM)
    ranks.add(1, stderr=TRACEBACK + "PeerLostError: rank 2 (host box) lost rank 1 (host box, pid 8)\n", at_s=1000.2)
    assert "rank 0 on host box raised PeerLostError" in ranks.summary()[0]


def test_torchs_error_file_is_believed(ranks: Ranks) -> None:
    ranks.add(1, stderr="noise\n", error="ValueError: recorded\nsecond line")
    summary = ranks.summary()
    assert summary[0].endswith("raised ValueError: recorded")
    assert "    | noise" in summary


def test_an_abort_in_native_code_says_what(ranks: Ranks) -> None:
    text = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no such device\n"
    ranks.add(-signal.SIGABRT, stderr=text)
    assert ranks.summary()[0].endswith("was killed by SIGABRT (a check in native code failed): no such device")


def test_faulthandlers_stack_is_shown_from_its_top(ranks: Ranks) -> None:
    stack = "".join(f'  File "f.py", line {n} in f{n}\n' for n in range(40))
    head = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    ranks.add(-signal.SIGSEGV, stderr=head + stack)
    assert any("line 0 in f0" in line for line in ranks.summary())


def test_stdout_is_quoted_where_stderr_is_empty(ranks: Ranks) -> None:
    ranks.add(3, stdout="usage: train.py DATA\n")
    summary = ranks.summary()
    assert summary[0].endswith("ended with exit code 3")
    assert "    | usage: train.py DATA" in summary


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.ENOSPC, "is full (No space left on device)"),
        (errno.EDQUOT, "is full: this user's quota is used up (Disk quota exceeded)"),
        (errno.EROFS, "is read-only (Read-only file system)"),
        (errno.EIO, "has errors (Input/output error)"),
    ],
)
def test_a_disk_that_takes_no_logs_is_named(
    ranks: Ranks, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.add(1, stdout="step 3\n")
    assert "disk" not in ranks.summary()[0]

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        first, *_ = ranks.summary()
        [metrics] = disks.troubles({"logs": None, "metrics": ranks.folder, "dumps": ranks.folder})
    assert f"ended with exit code 1; the disk under {ranks.folder.parent} {words}" in first
    assert metrics == f"the disk under {ranks.folder} {words}: metrics cannot be written there"
    assert [one.name for one in ranks.folder.iterdir()] == ["0"]  # no probe is left


def test_at_most_fifteen_lines_whatever_happens(ranks: Ranks) -> None:
    long = "".join(f"line {n} " + "x" * 2000 + "\n" for n in range(500))
    ranks.add(1, stderr=long + TRACEBACK + "ValueError: " + "y" * 5000 + "\n" + long)
    for _ in range(60):
        ranks.add(1, stderr=long)
    summary = ranks.summary()
    assert len(summary) <= MAX_LINES == 15
    assert max(map(len, summary)) <= 400
    assert any("full log" in line for line in summary)
    assert len(broken(long, host="box", log="x")) <= MAX_LINES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory.\n", "OutOfMemoryError: CUDA out of memory."),
        (TRACEBACK + "KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
         + TRACEBACK + "RuntimeError: b\n", "RuntimeError: b"),
        (TRACEBACK + "AssertionError\n", "AssertionError"),
        ("".join(f"[rank1]: {line}\n" for line in (TRACEBACK + "ValueError: bad").splitlines()), "ValueError: bad"),
        (TRACEBACK + "ValueError: first line\nsecond line: more\n", "ValueError: first line"),
        ('  File "t.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
        ("warning: nothing here\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_last_exception(text: str, expected: str | None) -> None:
    found = last_exception([plain(line) for line in text.splitlines()])
    assert (found.text if found else None) == expected


def test_the_line_of_a_good_end(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert summary.steps_of(str(report)) is None
    for text in ("", "[]", '{"steps": null}', '{"st'):
        report.write_text(text)
        assert summary.steps_of(str(report)) is None
    report.write_text('{"steps": 1200}')
    steps = summary.steps_of(str(report))
    whole = summary.finished(5.12, steps, logs="logs/x")
    assert whole == "ringrun: finished after 5.1 s and 1,200 steps, logs in logs/x"
    assert summary.finished(5.12, 1, where=" on 2 hosts") == "ringrun: finished after 5.1 s and 1 step on 2 hosts"
    assert summary.finished(65, None) == "ringrun: finished after 1 min 05 s"
    assert summary.finished(1, 3, restarted=True) == "ringrun: finished after 1.0 s and 3 steps since the restart"
