"""What `python -m ringdp explain` concludes from dumps, and what torch's own analyzer makes of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringdp import __main__ as commands
from ringdp.tools.hang import explain
from ringdp.tools.hang.dump_files import read_job
from ringdp.tools.hang.verdict import Verdict, judge

SLEEP = """Main thread (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
    self.not_empty.wait()
  File "/home/me/train.py", line 88 in load_batch
    batch = queue.get()

Thread pin_memory (most recent call first):
  File "/home/me/other.py", line 1 in work
C++ stack of the main thread (most recent call first):
  PyThread_acquire_lock_timed in libpython3.11.so
"""


def operation(number: int, group: str, sequence: int, state: str = "done", **other: Any) -> dict[str, Any]:
    count = other.pop("count", 10)
    kind = other.pop("kind", "all_reduce")
    dtype = other.pop("dtype", "float32")
    ended = {"done": number * 1000 + 500, "failed": number * 1000 + 900}.get(state, 0)
    return {
        "number": number, "group": group, "sequence": sequence, "order": "collective", "kind": kind,
        "dtype": dtype, "op": "SUM", "root": -1, "count": count, "bytes": 4 * count,
        "text": "barrier" if kind == "barrier" else f"{kind}({dtype}[{count}], SUM)", "state": state,
        "queued_ns": number * 1000, "started_ns": number * 1000 + 1, "ended_ns": ended, "flows": [], **other,
    }  # fmt: skip


CALL_SITE = "/x/lib/python3.11/site-packages/torch/d.py:5 in all_reduce\n/home/me/train.py:31 in step\n"
WORLD = {"id": "7", "name": "0", "members": [0, 1, 2], "removed": False}
PAIR = {"id": "8", "name": "pair", "members": [0, 1], "removed": False}


def write(
    folder: Path,
    rank: int,
    operations: list[dict[str, Any]],
    *,
    groups: tuple[dict[str, Any], ...] = (WORLD,),
    failures: tuple[dict[str, Any], ...] = (),
    stacks: str = "",
    at: int = 10**10,
    count: int = 1,
    world: int = 3,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"dump_rank{rank}_{count}.json"
    path.write_text(
        json.dumps({
            "format": 1, "rank": rank, "world": world, "host": "a", "pid": 100 + rank, "reason": "signal",
            "at_ns": at, "unix_ns": at + 10**18, "called": len(operations), "groups": list(groups),
            "failures": list(failures), "stacks": stacks, "operations": operations,
            "call_sites": {"0": CALL_SITE},
        })
    )  # fmt: skip
    return path


def verdict(folder: Path) -> Verdict:
    return judge(read_job([folder]))


def failure(kind: str, guilty: int, at: int, text: str) -> dict[str, Any]:
    return {"at_ns": at, "group": "7", "sequence": 2, "guilty": guilty, "kind": kind, "text": text}


def test_the_rank_that_never_called_is_named_with_its_operation_and_its_stack(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, [operation(1, "7", 1), operation(2, "7", 2, "started", call_site=0)])
    write(tmp_path, 1, [operation(1, "7", 1, call_site=0)], stacks=SLEEP)
    found = verdict(tmp_path)
    assert found.guilty == (1,)
    assert found.paragraph.startswith(
        "Rank 1 never called all_reduce #2 (float32[10], SUM) of group '0' of all ranks, in which ranks 0 and 2 wait"
        " (called at train.py:31 in step)."
    )
    assert "called all_reduce #1 (float32[10], SUM) last there (called at train.py:31 in step)" in found.paragraph
    assert "waits for a lock at train.py:88 in load_batch" in found.paragraph
    assert "load_batch" in found.stacks[1]


def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    flow = {"peer": 1, "sends": False, "first_ns": 0, "last_ns": 0, "moved": 0, "total": 40}
    waits = operation(2, "7", 99, "started", order="message", kind="recv", flows=[flow], call_site=0)
    write(tmp_path, 0, [operation(1, "7", 1), waits])
    write(tmp_path, 1, [operation(1, "7", 1)], stacks=SLEEP)
    found = verdict(tmp_path)
    assert found.guilty == (1,)
    assert "for rank 1, which has not sent it. Rank 1 waits for a lock at train.py:88" in found.paragraph
    assert found.paragraph.startswith("Rank 0 waits in recv in a message (float32[10], SUM) (called at train.py:31 in")


def test_what_the_launcher_knows_is_said_first(tmp_path: Path) -> None:
    """How a process ended, and what the kernel did: no dump has that."""
    lost = "rank 0 (host a) lost rank 1 (host a, pid 101) during all_reduce #2: Connection closed by peer: no goodbye"
    attempt = tmp_path / "attempt_0"
    operations = [operation(1, "7", 1), operation(2, "7", 2, "failed")]
    write(attempt / "0", 0, operations, failures=(failure("PeerLostError", 1, 5000, lost),))
    words = "rank 1 on host a was killed by SIGKILL (out of memory: the kernel ended it)"
    (attempt / "verdict.json").write_text(json.dumps({"rank": 1, "words": words}))
    job = read_job([tmp_path])
    text = explain.report(job, judge(job))
    assert text.startswith(f"ringrun: {words}\n\nRank 1 was lost first: ")
    assert "It left no dump" not in text
    for dump in attempt.rglob("dump_*"):
        dump.unlink()
    job = read_job([tmp_path])
    assert explain.report(job, judge(job)) == f"ringrun: {words}\n\nNo rank has left a dump."


def test_different_numbers_of_batches_are_told_without_a_launcher(tmp_path: Path) -> None:
    text = (
        "rank 0 (host a) lost rank 1 (host a, pid 101) during all_reduce #2 (float32[10], SUM) 'bucket 0: w', waiting"
        " for rank 1: Connection closed by peer: it left the job: its program ended after 12 steps; look at that rank"
    )
    write(
        tmp_path,
        0,
        [operation(1, "7", 1), operation(2, "7", 2, "failed")],
        failures=(failure("PeerLostError", 1, 5000, text),),
    )
    found = verdict(tmp_path)
    assert found.paragraph.startswith("Rank 1's program ended after 12 steps while rank 0 makes a further step: ")
    assert "DistributedSampler" in found.paragraph
    assert "It left no dump" not in found.paragraph


def test_a_rank_that_has_not_created_the_group(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(1, "8", 1, "started")], groups=(WORLD, PAIR))
    write(tmp_path, 1, [operation(1, "7", 1)])
    found = verdict(tmp_path)
    assert found.guilty == (1,)
    assert "Rank 1 has not created that group" in found.paragraph


def test_a_chain_of_waiting_leads_to_the_rank_at_its_end(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 in a later operation of another group."""
    other = {"id": "9", "name": "pair", "members": [1, 2], "removed": False}
    write(tmp_path, 0, [operation(1, "8", 1, "started")], groups=(WORLD, PAIR))
    write(tmp_path, 1, [operation(1, "9", 1, "started", kind="barrier")], groups=(WORLD, PAIR, other))
    write(tmp_path, 2, [], groups=(WORLD, other), stacks=SLEEP)
    found = verdict(tmp_path)
    assert found.guilty == (2,)
    assert found.paragraph.startswith("Rank 2 never called barrier #1 of group 'pair' of ranks 1 and 2")


def test_two_groups_in_other_orders_are_a_deadlock(tmp_path: Path) -> None:
    other = {**PAIR, "id": "9", "name": "other"}
    for rank, group in ((0, "8"), (1, "9")):
        write(tmp_path, rank, [operation(1, group, 1, "started", call_site=0)], groups=(PAIR, other), world=2)
    found = verdict(tmp_path)
    assert found.guilty == (0, 1)
    assert found.paragraph.startswith(
        "Deadlock of 2 groups that are taken in other orders: rank 0 waits in all_reduce #1"
    )
    assert "group 'pair'" in found.paragraph
    assert "group 'other'" in found.paragraph
    assert "train.py:31 in step" in found.stacks[0]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"count": 7}, "The sizes differ (7, 10)."),
        ({"dtype": "int32"}, "The types differ (int32, float32)."),
        ({"kind": "barrier"}, "The kinds differ (barrier, all_reduce)."),
        ({"name": "loss"}, "The names differ (loss, none)."),
    ],
)
def test_what_differs_between_the_ranks(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    for rank in range(3):
        later = operation(2, "7", 2, "failed", call_site=0, **(other if rank == 1 else {}))
        write(tmp_path, rank, [operation(1, "7", 1), later, operation(3, "7", 3, "failed", count=rank + 1)])
    found = verdict(tmp_path)
    assert found.guilty == (1,)
    assert "The ranks disagree about operation #2" in found.paragraph
    assert "ranks 0 and 2 called all_reduce #2 (float32[10], SUM) (called at train.py:31 in step)" in found.paragraph
    assert words in found.paragraph


def test_of_one_against_one_nobody_knows_who_is_right(tmp_path: Path) -> None:
    """The third rank heard of the failure before it called the operation."""
    for rank, count in ((0, 1000), (1, 7)):
        write(tmp_path, rank, [operation(1, "7", 1), operation(2, "7", 2, "failed", count=count, call_site=0)])
    write(tmp_path, 2, [operation(1, "7", 1)])
    found = verdict(tmp_path)
    assert found.guilty == (0, 1)
    assert "The sizes differ (1000, 7)." in found.paragraph


def test_who_died_first_and_left_no_dump(tmp_path: Path) -> None:
    lost = "rank 0 (host a) lost rank 2 (host a, pid 102) during all_reduce #2: Connection closed by peer: it died"
    later = failure("PeerLostError", 1, 9000, "rank 0 lost rank 1: it left the job")
    operations = [operation(1, "7", 1), operation(2, "7", 2, "failed", call_site=0)]
    write(tmp_path, 0, operations, failures=(failure("PeerLostError", 2, 5000, lost), later))
    write(tmp_path, 1, operations, failures=(failure("PeerLostError", 2, 5500, "rank 1 lost rank 2"),))
    found = verdict(tmp_path)
    assert found.guilty == (2,)
    assert found.paragraph.startswith("Rank 2 was lost first: rank 0 (host a) lost rank 2")
    assert "It left no dump, so its process was ended (SIGKILL, out of memory, os._exit)" in found.paragraph
    assert "Rank 1 went after it" in found.paragraph


def test_who_died_later_in_an_elastic_job(tmp_path: Path) -> None:
    """It has written a dump at the first loss, which says nothing of its own."""
    second = {"id": "9", "name": "0/view 2", "members": [0, 1], "removed": False}
    first = failure("PeerLostError", 2, 5000, "rank 0 lost rank 2 during all_reduce #2: it died")
    operations = [operation(1, "7", 1), operation(2, "7", 2, "failed", call_site=0)]
    again = [*operations, operation(3, "9", 1, "failed")]
    later = failure("PeerLostError", 1, 9000, "rank 0 lost rank 1: it died")
    write(tmp_path, 0, again, groups=(WORLD, second), failures=(first, later))
    write(tmp_path, 1, operations, failures=(first,))
    found = verdict(tmp_path)
    assert found.guilty == (2,)
    assert found.paragraph.startswith("Rank 2 was lost first: rank 0 lost rank 2")
    assert found.paragraph.endswith("The job is elastic: the others went on without it, and lost rank 1 later.")


def test_nothing_is_blamed_where_nothing_waits(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, [operation(number, "7", number) for number in range(1, 6)])
    found = verdict(tmp_path)
    assert found.guilty == ()
    assert found.paragraph.startswith("All ranks with a dump have called the same operations")


def test_dumps_of_different_moments_of_a_job_that_runs_blame_nobody(tmp_path: Path) -> None:
    """Rank 0 wrote its dump when it had just called what rank 1, earlier, had not."""
    now = 10**9
    write(tmp_path, 0, [operation(1, "7", 1), operation(2, "7", 2, "started", queued_ns=now - 10**6)], at=now)
    for rank in (1, 2):
        write(tmp_path, rank, [operation(1, "7", 1)], at=now - 2 * 10**6)
    assert verdict(tmp_path).guilty == ()
    write(tmp_path, 0, [operation(1, "7", 1), operation(2, "7", 2, "started", queued_ns=now - 10**6)], at=10 * now)
    write(tmp_path, 1, [operation(1, "7", 1)], at=10 * now)
    assert verdict(tmp_path).guilty == (1,)


def test_operations_that_one_rank_has_forgotten_are_not_missing(tmp_path: Path) -> None:
    """Rank 1 has called so much in another group that it remembers only its last operations of this one."""
    write(tmp_path, 0, [operation(n, "7", n, "failed" if n == 1 else "done") for n in range(1, 9)])
    write(tmp_path, 1, [operation(n, "7", n) for n in range(6, 9)])
    assert verdict(tmp_path).guilty == ()


def test_the_newest_dump_of_the_newest_attempt_counts(tmp_path: Path) -> None:
    old = write(tmp_path / "attempt_0" / "0", 0, [operation(1, "7", 1, "failed")], count=1)
    os.utime(old, (1, 1))
    write(tmp_path / "attempt_1" / "0", 0, [operation(1, "7", 1)], count=1, at=10**9)
    write(tmp_path / "attempt_1" / "0", 0, [operation(1, "7", 1), operation(2, "7", 2)], count=2, at=2 * 10**9)
    job = read_job([tmp_path])
    assert [len(dump.operations) for dump in job.dumps.values()] == [2]
    assert job.absent == [1, 2]


def test_dumps_of_an_earlier_job_in_the_same_folder_do_not_count(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, [operation(1, "7", 1, "failed")])
    write(tmp_path, 0, [operation(1, "7", 1)], count=2, at=2 * 10**9)
    for rank in range(3):
        (tmp_path / f"process_rank{rank}.json").write_text(json.dumps({"pid": 100 if rank == 0 else 1, "host": "a"}))
    job = read_job([tmp_path])
    assert list(job.dumps) == [0]
    (tmp_path / "process_rank0.json").write_text(json.dumps({"pid": 1, "host": "a"}))
    assert list(read_job([tmp_path]).dumps) == [0, 1, 2]


def test_files_that_are_not_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["explain", str(tmp_path)]) == 1
    assert "no dump of a rank" in capsys.readouterr().err
    (tmp_path / "dump_rank0_1.json").write_text('{"format": 2}')
    assert commands.main(["explain", str(tmp_path)]) == 1
    assert "its format is 2" in capsys.readouterr().err
    write(tmp_path, 1, [operation(1, "7", 1)])
    (tmp_path / "dump_rank2_1.json").write_text('{"half": ')
    assert commands.main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "dump_rank2_1.json cannot be read" in out
    assert "No dump of ranks 0, 2 of 3." in out


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("rank",), None, "it has no 'rank'"),
        (("rank",), 3, "it is of rank 3 of 3"),
        (("world",), 10**30, f"it is of rank 2 of {10**30}"),
        (("stacks",), 5, "'stacks' must be a text, not 5"),
        (("groups", 0, "members"), [], "'members' must be a list of ranks, not []"),
        (("operations", 0, "sequence"), ["a"], "'sequence' must be a whole number, not ['a']"),
        (("operations", 0, "flows"), [1], "an object of JSON was wanted, not 1"),
        (("call_sites",), [], "an object of JSON was wanted, not []"),
    ],
)
def test_a_file_with_values_of_other_types_is_named_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[Any, ...], value: Any, words: str
) -> None:
    for rank in range(3):
        path = write(tmp_path, rank, [operation(1, "7", 1)])
    raw = place = json.loads(path.read_text())
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(raw))
    assert commands.main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"dump_rank2_1.json cannot be read as a dump: {words}" in out
    assert "No dump of rank 2 of 3." in out


def test_a_file_that_is_nested_without_end_is_not_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dump_rank0_1.json").write_text("[" * 200_000)
    assert commands.main(["explain", str(tmp_path)]) == 1
    assert "too deep" in capsys.readouterr().err


def test_dumps_of_jobs_of_other_sizes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [operation(1, "7", 1)], world=200)
    write(tmp_path, 1, [operation(1, "7", 1)])
    assert commands.main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "jobs of 3 and of 200 ranks" in out
    assert "and 134 more of 200" in out
