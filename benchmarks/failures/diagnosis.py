"""What RingDP's report names when a cause is known: each is injected into a job, and the first verdict is compared.

    python -m benchmarks diagnosis                          all causes that this machine can have
    python -m benchmarks diagnosis --causes forward,quota   some of them
    python -m benchmarks diagnosis --causes quiet --windows 50

    forward, backward, data   rank 1 of 2 sleeps there in every step
    core      a process that never rests shares rank 1's core (2 cores)
    quota     rank 1's cgroup may use half a core (cgroups of version 1 or 2, root)
    memory    rank 1's cgroup has less memory than the file that every rank maps and reads in forward (root)
    link      one of four hosts, which are network namespaces, has a link of a tenth of the others' rate (root)
    quiet     nothing: in how many of the windows a rank or link is named all the same, on --hosts hosts; a rank whose
              core is slower than the others' by a loop that all run (a virtual machine's) is no wrong verdict
    loaded    the same beside --load processes that never rest: a busy core may be named, too

A cause counts as named if the first verdict after it began, within 20 steps, has its rank and phase or cause, and a
remedy. What `explain` says of jobs that hang is in tests/fault/test_hangs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.failures.diagnosis_rank import QUIET_STEPS
from benchmarks.lib import session
from benchmarks.lib.hosts import Hosts, why_not
from benchmarks.lib.measure import busy_processes, table
from benchmarks.lib.ranks import Command, Unavailable, run_commands, torchrun_env

RANK = (sys.executable, "-m", "benchmarks.failures.diagnosis_rank")
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
    "link": {"kind": "link"},
    "quiet": {},
    "loaded": {},
}
QUIET = ("quiet", "loaded")
CAUSES = tuple(WANTED)


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
    env, port = {**os.environ, "OMP_NUM_THREADS": "1"}, session.free_port()
    words = [*RANK, json.dumps(settings)]
    commands = [
        Command(words, env | torchrun_env(rank=i, world_size=ranks, address="127.0.0.1", port=port), f"rank {i}")
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
        words = [*RANK, json.dumps(settings)]
        own = {"OMP_NUM_THREADS": "1"}
        commands = [
            Command(hosts.command(rank, words), hosts.rank_env(rank=rank, per_host=1) | own, f"rank {rank}")
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
        with busy_processes(1, cores=cores[1:2]):
            yield
    elif cause == "loaded":
        with busy_processes(settings["load"]):
            yield
    elif cause in ("quota", "memory"):
        with _group(cause) as group:
            settings["group"] = str(group)
            if cause == "memory":
                settings["files"] = [_data_file(Path(settings["folder"], f"data_{rank}")) for rank in range(2)]
            yield
    else:
        yield


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
    for cause in args.causes:
        try:
            found = run_case(cause, args.windows, args.hosts, args.load)
        except Unavailable as error:
            rows.append({"cause": cause, "unavailable": str(error)})
            continue
        rows.append({"cause": cause, "right": right(cause, found), **found})
    return session.result_of("diagnosis", None, load=os.getloadavg()[0], rows=rows)


def report(result: dict[str, Any]) -> str:
    lines, texts = [], []
    for row in result["rows"]:
        if "unavailable" in row:
            lines.append([row["cause"], "not here", "", row["unavailable"]])
            continue
        told = "right" if row["right"] else "WRONG"
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
    title = f"causes that were injected, load {result['load']:.1f}"
    return session.text(result, title, table(["cause", "verdict", "step", "named"], lines), "\n".join(texts))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--causes", default=",".join(CAUSES), help=f"of {', '.join(CAUSES)}")
    parser.add_argument("--windows", type=int, default=50, help=f"of {QUIET_STEPS} steps, for quiet (default 50)")
    parser.add_argument("--hosts", type=int, default=1, help="namespaces, for quiet (default 1: two ranks of it)")
    parser.add_argument("--load", type=int, default=5, help="processes, for loaded (default 5)")


def check(args: argparse.Namespace) -> None:
    args.causes = session.chosen(args.causes, CAUSES)
    session.at_least(1, windows=args.windows)
