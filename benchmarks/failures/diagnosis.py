#!/usr/bin/env python3
"""What RingDP's report names when a cause is known: each is injected into a job, and the first verdict is compared.

    python benchmarks/diagnosis.py                          all causes that this machine can have
    python benchmarks/diagnosis.py --causes forward,quota   some of them
    python benchmarks/diagnosis.py --causes quiet --windows 50

    forward, backward, data   rank 1 of 2 sleeps there in every step
    core      a process that never rests shares rank 1's core (2 cores)
    quota     rank 1's cgroup may use half a core (cgroups of version 1 or 2, root)
    memory    rank 1's cgroup has less memory than the file that every rank maps and reads in forward (root)
    swap      rank 1's cgroup has less memory than every rank keeps and reads in forward; it swaps to a file (root)
    link      one of four hosts, which are network namespaces, has a link of a tenth of the others' rate (root)
    quiet     nothing: in how many of the windows a rank or link is named all the same, on --hosts hosts; a rank whose
              core is slower than the others' by a loop that all run (a virtual machine's) is no wrong verdict
    loaded    the same beside --load processes that never rest: a busy core may be named, too
    stuck, asleep, lock, other_group   rank 1 computes, sleeps, or waits for a lock or for a collective of another group
    crossed   two groups are taken in other orders

A cause counts as named if the first verdict after it began, within 20 steps, has its rank and phase or cause, and a
remedy; of the jobs that hang, if the first notice has the rank, and `explain` what it does instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import command
from benchmarks.failures import diagnosis_hangs as hangs
from benchmarks.failures.diagnosis_rank import QUIET_STEPS
from benchmarks.lib.hosts import Hosts, HostsError, why_not
from benchmarks.lib.measure import machine, table
from benchmarks.lib.ranks import Command, RanksFailed, run_commands, signals_unwind, start, stop_all, torchrun_env

RANK = str(Path(__file__).with_name("diagnosis_rank.py"))
SLOW = 1
LINK_HOST = 2
MEMORY_BYTES = 100 << 20  # that the group has for what the rank allocates and maps after it has joined
RATE, SLOW_RATE = "200mbit", "20mbit"
WANTED: dict[str, dict[str, Any]] = {
    "forward": {"kind": "rank", "rank": SLOW, "phase": "forward", "cause": "sleep"},
    "backward": {"kind": "rank", "rank": SLOW, "phase": "backward", "cause": "sleep"},
    "data": {"kind": "rank", "rank": SLOW, "phase": "between", "cause": "data"},
    "core": {"kind": "rank", "rank": SLOW, "cause": "core"},
    "quota": {"kind": "rank", "rank": SLOW, "cause": "quota"},
    "memory": {"kind": "rank", "rank": SLOW, "cause": "memory"},
    "swap": {"kind": "rank", "rank": SLOW, "cause": "memory"},
    "link": {"kind": "link"},
    "quiet": {},
    "loaded": {},
}
QUIET = ("quiet", "loaded")
CAUSES = (*WANTED, *hangs.WORDS)


class Unavailable(RuntimeError):
    """This machine cannot have that cause; the message says why."""


def run_case(cause: str, windows: int, hosts: int, load: int) -> dict[str, Any]:
    """What rank 0 found. Raises Unavailable, RanksFailed."""
    with tempfile.TemporaryDirectory(prefix="ringdp-diagnosis-") as folder:
        settings = {"cause": cause, "folder": folder, "slow": SLOW, "windows": windows, "load": load}
        if cause == "link" or (cause == "quiet" and hosts > 1):
            return _on_hosts(settings, 4 if cause == "link" else hosts)
        with _prepared(cause, settings):
            _run_local(settings)
        return json.loads(Path(folder, "found.json").read_text())


def _run_local(settings: dict[str, Any], ranks: int = 2) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    port = 20_000 + os.getpid() % 20_000
    commands = [
        Command(
            [sys.executable, RANK, json.dumps(settings)],
            env
            | torchrun_env(
                rank=i, local_rank=i, world_size=ranks, local_world_size=ranks, host=0, address="127.0.0.1", port=port
            ),
            f"rank {i}",
        )
        for i in range(ranks)
    ]
    run_commands(commands, timeout_s=300, echo=_echo)


def _echo(label: str, line: str) -> None:
    sys.stderr.write(f"[{label}] {line}")


def _on_hosts(settings: dict[str, Any], count: int) -> dict[str, Any]:
    if reason := why_not():
        raise Unavailable(reason)
    slow = settings["cause"] == "link"
    with Hosts(count, rate=RATE if slow else "1gbit") as hosts:
        if slow:
            hosts.set_rate(SLOW_RATE, only=LINK_HOST)
        words = [sys.executable, RANK, json.dumps(settings)]
        python_path = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
        commands = [
            Command(hosts.command(rank, words), hosts.rank_env(rank=rank, per_host=1) | python_path, f"rank {rank}")
            for rank in range(count)
        ]
        run_commands(commands, timeout_s=300, echo=_echo)
    return json.loads(Path(settings["folder"], "found.json").read_text())


@contextlib.contextmanager
def _prepared(cause: str, settings: dict[str, Any]) -> Iterator[None]:
    """The machine as the cause needs it."""
    if cause == "core":
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise Unavailable("two cores are needed")
        settings["cores"] = cores[:2]
        with _busy(1, core=cores[1]):
            yield
    elif cause == "loaded":
        with _busy(settings["load"]):
            yield
    elif cause in ("quota", "memory", "swap"):
        with contextlib.ExitStack() as stack:
            if cause == "swap":
                stack.enter_context(_swap_file(Path(settings["folder"], "swap")))
                settings["kept_bytes"] = 2 * MEMORY_BYTES
            settings["group"] = str(stack.enter_context(_group(cause)))
            if cause == "memory":
                settings["files"] = [_data_file(Path(settings["folder"], f"data_{rank}")) for rank in range(2)]
            yield
    else:
        yield


@contextlib.contextmanager
def _busy(count: int, core: int | None = None) -> Iterator[None]:
    """Processes that never rest, on one core or wherever."""
    pinned = "" if core is None else f"import os\nos.sched_setaffinity(0, [{core}])\n"
    words = [sys.executable, "-c", f"{pinned}while True: pass"]
    running: list[subprocess.Popen[Any]] = []
    try:
        for _ in range(count):
            running.append(start(words))
        yield
    finally:
        stop_all(running)


@contextlib.contextmanager
def _group(cause: str) -> Iterator[Path]:
    """A cgroup with half a core, or (for the other causes) with little memory; ranks join it by its cgroup.procs."""
    controller = "cpu" if cause == "quota" else "memory"
    first = Path("/sys/fs/cgroup", controller)
    second = Path("/sys/fs/cgroup")
    root = first if first.is_dir() else second
    for left in root.glob("ringdp-diagnosis-*"):  # by a run that was killed
        with contextlib.suppress(OSError):  # another run's, with processes in it
            left.rmdir()
    group = root / f"ringdp-diagnosis-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise Unavailable(f"a cgroup cannot be made: {error.strerror} (it needs root)") from error
    try:
        if first.is_dir():
            limit = ("cpu.cfs_quota_us", "50000") if cause == "quota" else ("memory.limit_in_bytes", str(MEMORY_BYTES))
        else:
            limit = ("cpu.max", "50000 100000") if cause == "quota" else ("memory.max", str(MEMORY_BYTES))
        (group / limit[0]).write_text(limit[1])
        yield group
    except OSError as error:
        raise Unavailable(f"its limit cannot be set: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


@contextlib.contextmanager
def _swap_file(path: Path) -> Iterator[None]:
    """The kernel swaps to that file, too."""
    with open(path, "wb") as file:
        path.chmod(0o600)
        os.posix_fallocate(file.fileno(), 0, 4 * MEMORY_BYTES)
    for words in (["mkswap", str(path)], ["swapon", str(path)]):
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            raise Unavailable(f"{words[0]} cannot be run: {error.strerror}") from error
        if done.returncode:
            raise Unavailable(f"{words[0]}: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(path)], check=False)


def _data_file(path: Path) -> str:
    """Of random bytes, and not in the page cache: the group of the rank that reads it first pays for its pages."""
    with open(path, "wb") as file:
        for _ in range(2 * MEMORY_BYTES >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return str(path)


def right(cause: str, found: dict[str, Any]) -> bool:
    """Whether the first verdict says what was done."""
    if cause in hangs.WORDS:
        return hangs.right(cause, found)
    if cause in QUIET:
        return len(found["verdicts"]) > 0 and not any(wrong(cause, one) for one in found["verdicts"])
    if not found["verdicts"]:
        return False
    first = found["verdicts"][0]
    if cause == "link":
        return first["kind"] == "link" and LINK_HOST in (first["rank"], first["peer"]) and bool(first["remedy"])
    if cause in ("core", "quota") and first["kind"] == "host":  # where something else slows the other rank as much
        return first["cause"] == cause and f"rank {SLOW} for" in first["text"] and bool(first["remedy"])
    return all(first[key] == value for key, value in WANTED[cause].items()) and bool(first["remedy"])


def wrong(cause: str, verdict: dict[str, Any]) -> bool:
    """Whether it names a rank or link of a job that has nothing.

    A core that other processes load is busy indeed, and one that a loop shows to be slow is slow.
    """
    allowed = ("core", "speed") if cause == "loaded" else ("speed",)
    return verdict["kind"] in ("rank", "link") and verdict["cause"] not in allowed


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for cause in args.cause_list:
        try:
            if cause in hangs.WORDS:
                found = hangs.run_case(cause, SLOW)
            else:
                found = run_case(cause, args.windows, args.hosts, args.load)
        except Unavailable as error:
            rows.append({"cause": cause, "unavailable": str(error)})
            continue
        rows.append({"cause": cause, "right": right(cause, found), **found})
    return {"benchmark": "diagnosis", "machine": machine(), "load": os.getloadavg()[0], "rows": rows}


def report(result: dict[str, Any]) -> str:
    lines, texts = [], []
    for row in result["rows"]:
        if "unavailable" in row:
            lines.append([row["cause"], "not here", "", row["unavailable"]])
            continue
        told = "right" if row["right"] else "WRONG"
        if row["cause"] in hangs.WORDS:
            lines.append([row["cause"], told, "", "by one notice and explain"])
            texts.append(f"{row['cause']}: {row['text']}")
            continue
        verdicts = row["verdicts"]
        if row["cause"] in QUIET:
            named = [one for one in verdicts if wrong(row["cause"], one)]
            kinds = Counter(" ".join(filter(None, (one["kind"], one["cause"]))) for one in verdicts)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append([row["cause"], told, "", f"{len(named)} of {len(verdicts)} windows named one ({counts})"])
            texts += [f"{row['cause']}: {one['text']}" for one in named]
            continue
        first = verdicts[0] if verdicts else {"kind": "nothing", "rank": None, "phase": None, "cause": None, "text": ""}
        what = " ".join(
            str(part) for part in (first["kind"], first["rank"], first["phase"], first["cause"]) if part is not None
        )
        lines.append([row["cause"], told, str(first.get("step", "")), what])
        texts.append(f"{row['cause']}: {first['text']} Remedy: {first.get('remedy')}.")
    about = result["machine"]
    head = f"{about['processor']}, {about['cores']} cores, torch {about['torch']}; load {result['load']:.1f}"
    return f"{head}\n\n{table(['cause', 'verdict', 'step', 'named'], lines)}\n\n" + "\n".join(texts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--causes", default=",".join(CAUSES), help=f"of {', '.join(CAUSES)}")
    parser.add_argument("--windows", type=int, default=50, help=f"of {QUIET_STEPS} steps, for quiet (default 50)")
    parser.add_argument(
        "--hosts", type=int, default=1, help="network namespaces, for quiet (default 1: two ranks of it)"
    )
    parser.add_argument("--load", type=int, default=5, help="processes, for loaded (default 5)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    args = parser.parse_args(argv)
    args.cause_list = args.causes.split(",")
    if unknown := [name for name in args.cause_list if name not in CAUSES]:
        parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(CAUSES)}")
    if args.windows < 1:
        parser.error("at least one window is needed")
    with signals_unwind():
        return command.run(
            lambda: measure(args), report, json_path=args.json, cannot=(HostsError,), failed=(RanksFailed,)
        )


if __name__ == "__main__":
    sys.exit(main())
