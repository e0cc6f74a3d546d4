"""How long it takes until a killed rank is replaced, and for how long the others wait for the newcomer.

    python -m benchmarks joins                       4 ranks, `small` and `mlp` (23.1 M parameters, AdamW), 3 jobs each
    python -m benchmarks joins --models mlp --jobs 5

Each job is `ringrun --elastic` with `ringdp.elastic.Job`; after some steps one of its ranks is killed (SIGKILL), and
its launcher starts another process. `ready` is from the kill until that process has built its model, `takes part` from
then until its first step is made. `pause` is the time for which the others let it in (`Change.seconds`); `gap` the
longest time between two steps of rank 0 around that, less the median step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import machine
from benchmarks.lib.ranks import ROOT, start, stop_all
from ringdp.text import table

MODELS = ("small", "mlp")
LIMIT_S = 120.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", type=int, default=4, help="of each job (4)")
    parser.add_argument("--jobs", type=int, default=3, help="of each model (3)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="a rank sleeps so long in each step (0.05)")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, MODELS)
    if args.ranks < 2 or args.jobs < 1 or args.step_seconds < 0:
        raise ValueError("at least two ranks and a job are needed, and no time below 0")


def told(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By pid."""
    found = {}
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        found[int(path.stem)] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


def run(model: str, args: argparse.Namespace) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="ringdp-joins-"))
    command = [sys.executable, str(ROOT / "launch.py"), "--elastic", "-n", str(args.ranks)]
    command += ["-m", "benchmarks.failures.joins_rank", str(folder), model, str(args.step_seconds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RINGDP_REPORT_EVERY": "0"}
    with open(folder / "said", "wb") as said:
        process = start(command, cwd=folder, env=env, stdout=said, stderr=subprocess.STDOUT)

    def until(condition: Any) -> Any:
        end = time.monotonic() + LIMIT_S
        while not (found := condition(told(folder))):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / "said").read_text(errors="replace")[-2000:])
            time.sleep(0.05)
        return found

    def steps(events: list[dict[str, Any]], least: int) -> list[dict[str, Any]]:
        found = [it for it in events if it["what"] == "step"]
        return found if len(found) >= least else []

    try:
        until(lambda all_told: sum(bool(steps(events, 10)) for events in all_told.values()) == args.ranks)
        victim = next(pid for pid, events in told(folder).items() if events[-1].get("rank") == args.ranks - 1)
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        newcomer = until(
            lambda all_told: next((it for it in all_told.values() if it[0]["joins"] and steps(it, 10)), None)
        )
        (folder / "finish").touch()
        process.wait(LIMIT_S)
        first = next(
            events for events in told(folder).values() if steps(events, 1) and steps(events, 1)[0]["rank"] == 0
        )
    finally:
        stop_all([process])
        shutil.rmtree(folder, ignore_errors=True)
    at = {it["what"]: it["at"] for it in reversed(newcomer)}
    ends = [it["at"] for it in first if it["what"] == "step"]
    gaps = [(after - before, after) for before, after in itertools.pairwise(ends)]
    joined = next(it for it in first if it["what"] == "change" and it["joined"])
    near = [gap for gap, after in gaps if abs(after - joined["at"]) < 2.0]
    return {
        "ready_s": at["ready"] - killed_at,
        "takes_part_s": at["step"] - at["ready"],
        "pause_s": joined["seconds"],
        "gap_s": max(near) - statistics.median(gap for gap, _ in gaps),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    rows = {model: [run(model, args) for _ in range(args.jobs)] for model in args.models}
    return {"benchmark": "joins", "ranks": args.ranks, "machine": machine(), "load": load, "rows": rows}


def report(result: dict[str, Any]) -> str:
    rows = []
    for model, jobs in result["rows"].items():
        medians = {name: statistics.median(job[name] for job in jobs) for name in jobs[0]}
        rows.append(
            [model, *(f"{value:.3f} s" for value in medians.values()), f"{max(it['gap_s'] for it in jobs):.3f} s"]
        )
    columns = ["model", "ready", "takes part", "pause", "gap", "longest gap"]
    head = f"{result['ranks']} ranks of one host, medians, load {result['load']:.1f} before"
    return f"{head}\n{table(columns, rows)}"
