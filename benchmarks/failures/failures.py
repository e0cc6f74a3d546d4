"""How soon, and in which words, the other ranks learn of a fault: ring beside gloo, three ranks each.

    python -m benchmarks failures                          all faults, both backends (about four minutes)
    python -m benchmarks failures --faults killed,stopped  those whose names contain one of the words
    python -m benchmarks failures --backends ring          one of them
    python -m benchmarks failures --markdown               the table as docs/lab/faults.md has it

Rank 1 is at fault. Measured is the time from the fault to the exception on the slower of the two others, and whether
both messages name rank 1. The losses of a host are made with network namespaces and need root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.failures.failures_rank import INJURIES, ONE_CALL, VICTIM, write
from benchmarks.lib import session
from benchmarks.lib.hosts import Hosts, set_link, why_not
from benchmarks.lib.ranks import ROOT, start, stop_all

WORLD_SIZE = 3
TIMEOUT_S = 12.0  # of the process group, where the fault is one that only the timeout ends
PATIENCE_S = 30.0
STOPPED_S = 4.0
HOST_FAULTS = ("host gone, in flight", "host gone, idle")
FAULTS = (*INJURIES, *HOST_FAULTS, *ONE_CALL)


@dataclass(frozen=True)
class Finding:
    """What one backend made of one fault."""

    seconds: float | None  # until the last of the others knew; None: not within the patience
    named: bool  # both of them name the rank at fault
    words: str  # what the slower one said
    notice: str  # the first log line about waiting, where there was one


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", default="ring,gloo", help="which, with commas (default ring,gloo)")
    parser.add_argument("--faults", default="", help="only those whose names contain one of these words")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs/lab/faults.md")


def check(args: argparse.Namespace) -> None:
    args.backends = session.chosen(args.backends, ("ring", "gloo"))
    words = [word.strip() for word in args.faults.split(",") if word.strip()]
    args.faults = [fault for fault in FAULTS if not words or any(word in fault for word in words)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for fault in args.faults:
        if fault in HOST_FAULTS and (reason := why_not()) is not None:
            print(f"{fault}: left out, {reason}", file=sys.stderr)
            continue
        findings = []
        for backend in args.backends:
            finding = one_fault(backend, fault)
            findings.append(finding)
            print(f"{fault} | {backend} | {cell(finding)}\n    {finding.words[:600]}", file=sys.stderr, flush=True)
            if finding.notice:
                print(f"    notice: {finding.notice}", file=sys.stderr, flush=True)
        rows.append({"fault": fault, "findings": [asdict(one) for one in findings]})
    return session.result_of("failures", None, backends=args.backends, markdown=args.markdown, rows=rows)


def report(result: dict[str, Any]) -> str:
    columns = ["rank 1 …", *result["backends"]]
    rows = [[row["fault"], *(cell(Finding(**one)) for one in row["findings"])] for row in result["rows"]]
    if result["markdown"]:
        lines = [columns, ["---"] * len(columns), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return session.report_table(result, f"{WORLD_SIZE} ranks, group timeout {TIMEOUT_S:.0f} s", columns, rows)


def one_fault(backend: str, fault: str) -> Finding:
    """One job, one fault."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ringdp-failures-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = stack.enter_context(Hosts(WORLD_SIZE, rate="none")) if fault in HOST_FAULTS else None
        ranks = stack.enter_context(started(backend, fault, folder, hosts))
        until(lambda: all((folder / f"met-{rank}").exists() for rank in range(WORLD_SIZE)), ranks, "the ranks to meet")
        if hosts is not None:
            time.sleep(0.3)
            set_link(hosts.name, VICTIM, "down")
            write(folder / "injured", str(time.monotonic()))
        at = fault_time(fault, folder, ranks)
        if fault == "stopped, then goes on":
            time.sleep(STOPPED_S)
            os.kill(ranks[VICTIM].pid, signal.SIGCONT)
        others = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not all(ended(folder, ranks, rank) for rank in others):
            time.sleep(0.01)
        return judge(fault, folder, ranks, others, at)


@contextlib.contextmanager
def started(backend: str, fault: str, folder: Path, hosts: Hosts | None) -> Iterator[list[subprocess.Popen[bytes]]]:
    words = [sys.executable, "-m", "benchmarks.failures.failures_rank", backend, fault, str(folder), str(TIMEOUT_S)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(WORLD_SIZE):
            if hosts is None:
                command, env = words, {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            else:
                command, env = hosts.command(rank, words), hosts.rank_env(rank=rank, per_host=1)
            env |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "OMP_NUM_THREADS": "1"}
            env |= {"RINGDP_STALL_NOTICE": "2", "PYTHONPATH": str(ROOT)}
            with open(folder / f"said-{rank}", "wb") as said:
                ranks.append(start(command, env=env, stdout=said, stderr=subprocess.STDOUT))
        yield ranks
    finally:
        stop_all(ranks)


def fault_time(fault: str, folder: Path, ranks: list[subprocess.Popen[bytes]]) -> float:
    if fault in ONE_CALL:
        return (
            max((folder / f"met-{rank}").stat().st_mtime for rank in range(WORLD_SIZE)) - time.time() + time.monotonic()
        )
    until((folder / "injured").exists, ranks, "the fault")
    return float((folder / "injured").read_text())


def until(condition: Callable[[], bool], ranks: list[subprocess.Popen[bytes]], what: str) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited 60 s for {what}; exit codes {[rank.poll() for rank in ranks]}")
        time.sleep(0.01)


def ended(folder: Path, ranks: list[subprocess.Popen[bytes]], rank: int) -> bool:
    return (folder / f"outcome-{rank}").exists() or ranks[rank].poll() is not None


def judge(fault: str, folder: Path, ranks: list[subprocess.Popen[bytes]], others: list[int], at: float) -> Finding:
    last, words, named = 0.0, "", True
    for rank in others:
        path = folder / f"outcome-{rank}"
        if not path.exists():
            code = ranks[rank].poll()
            why = "nothing" if code is None else f"rank {rank} died: {signal.Signals(-code).name if code < 0 else code}"
            return Finding(None, False, why, notice(folder, others))
        outcome = json.loads(path.read_text())
        seconds = outcome["seconds"] - at
        if seconds >= last:
            last, words = seconds, f"{outcome['error']}: {outcome['text']}" if outcome["error"] else "no error"
        named &= names_only_the_victim(outcome["text"])
    return Finding(last, named, words, notice(folder, others))


def names_only_the_victim(text: str) -> bool:
    return re.search(rf"\brank {VICTIM}\b", text) is not None


def notice(folder: Path, others: list[int]) -> str:
    for rank in others:
        for line in (folder / f"said-{rank}").read_text(errors="replace").splitlines():
            if " has waited " in line:
                return line
    return ""


def cell(finding: Finding) -> str:
    if finding.seconds is None:
        return finding.words if finding.words != "nothing" else f"not within {PATIENCE_S:.0f} s"
    if finding.words == "no error":
        return f"no error ({finding.seconds:.1f} s)"
    time_text = f"{finding.seconds * 1000:.0f} ms" if finding.seconds < 1 else f"{finding.seconds:.1f} s"
    return f"{time_text}, {'names it' if finding.named else 'names nobody'}"
