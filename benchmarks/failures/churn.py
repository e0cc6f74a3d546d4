"""Whether elastic jobs hold what they promise while ranks are killed at random times, again and again.

    python -m benchmarks churn                                   jobs of 6 ranks for 5 minutes
    python -m benchmarks churn --minutes 60 --seed 7
    python -m benchmarks churn --every 0.1,1 --ranks 4           losses one upon the other
    python -m benchmarks churn --faults kill,repair --kinds int8

Each job is `ringrun --elastic`, and loses ranks until one is left (sometimes two), every 2 to 10 s: `kill` is SIGKILL
to a random rank, `first` to rank 0, `two` to two at once, `repair` to one and to another while that is repaired,
`raise` has a rank raise an exception, `stop` stops one for longer than RINGDP_HEAL, so that it has to be waited for,
`stop-kill` kills another one meanwhile, `stop-dead` kills the stopped one.

After each job, of what its ranks have written down: a step that counts has the same gradients and parameters, to the
bit, on all ranks, dead ones included; its mean is exactly the one of the members of one view, computed without RingDP
(not asked of the kinds `samples` and `int8`, whose means are rounded); no rank leaves out a step; all go
through the same views; each change is one line, which says what has become of the step; descriptors do
not grow; the exit code is 0; no process and no temporary file is left. A rank that does not go on within --patience
seconds after a fault is a hang: its stacks are printed. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.failures import churn_checks
from benchmarks.failures.churn_rank import KINDS
from benchmarks.lib import session
from benchmarks.lib.ranks import ROOT, start, stop_all

FAULTS = ("kill", "first", "two", "repair", "raise", "stop", "stop-kill", "stop-dead")
WEIGHTS = (6, 2, 2, 2, 2, 1, 1, 1)
HEAL_S = 1.0
REPAIR_S = 0.15
STEP_PAUSE_S = 0.02
MARK = "CHURN_OF_RINGDP"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="no job is begun after them (5)")
    parser.add_argument("--ranks", type=int, default=6, help="of each job (6)")
    parser.add_argument("--every", default="2,10", help="seconds between two faults, at least and at most (2,10)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the machine (1)")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of jobs: {', '.join(KINDS)}")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a rank hangs (60)")
    parser.add_argument("--transport", default="auto", help="RINGDP_TRANSPORT of the jobs (auto)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of jobs in which something was wrong")


def check(args: argparse.Namespace) -> None:
    args.faults = session.chosen(args.faults, FAULTS)
    args.kinds = session.chosen(args.kinds, tuple(KINDS))
    args.least, args.most = (float(one) for one in args.every.split(","))
    if args.ranks < 2 or args.minutes <= 0 or not 0 < args.least <= args.most:
        raise ValueError("at least two ranks, and times above 0, are needed")


@dataclass
class Fault:
    """One that has been made: what, who, and when, by the host's clock."""

    what: str
    victims: list[int]
    at: float = field(default_factory=time.time)


class Job:
    """A launcher and its ranks, of which some are alive."""

    def __init__(self, folder: Path, kind: str, args: argparse.Namespace) -> None:
        self.folder, self.kind, self.args = folder, kind, args
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        command = [sys.executable, str(ROOT / "launch.py"), "--elastic", "-n", str(args.ranks), "--console", "errors"]
        command += ["-m", "benchmarks.failures.churn_rank", str(folder), kind, str(STEP_PAUSE_S)]
        env = {**os.environ, MARK: self.mark, "RINGDP_HEAL": str(HEAL_S), "TMPDIR": str(self.temporary)}
        env |= {"RINGDP_TRANSPORT": args.transport, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(folder / "said", "wb") as said:
            self.process = start(command, cwd=folder, env=env, stdout=said, stderr=subprocess.STDOUT)
        self.alive = list(range(args.ranks))
        self.faults: list[Fault] = []

    def told(self, place: int) -> churn_checks.Told:
        return churn_checks.read(self.folder, place)

    def pid(self, place: int) -> int:
        return self.told(place).pid

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises TimeoutError, with the stacks of the ranks that live."""
        end = time.monotonic() + self.args.patience
        while not condition():
            if self.process.poll() is not None:
                raise TimeoutError(f"the job ended with {self.process.returncode} while this was awaited: {what}")
            if time.monotonic() > end:
                raise TimeoutError(f"waited {self.args.patience:g} s for {what}\n{self.stacks()}")
            time.sleep(0.02)

    def stacks(self) -> str:
        for place in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(place), signal.SIGUSR2)
        time.sleep(1.0)
        return "\n".join(
            f"---- place {place}, {len(self.told(place).steps)} steps\n{(self.folder / f'stacks-{place}').read_text()}"
            for place in self.alive
        )

    def signal(self, place: int, number: int) -> None:
        os.kill(self.pid(place), number)
        if number in (signal.SIGKILL, signal.SIGUSR1):
            self.alive.remove(place)

    def go_on(self, least: int = 3) -> None:
        """Each rank that lives makes steps of exactly those that live."""
        size = len(self.alive)
        places = list(self.alive)

        def have() -> bool:
            return all(sum(step.size == size for step in self.told(place).steps[-50:]) >= least for place in places)

        self.until(have, f"steps of {size} by places {places}")

    def inflict(self, what: str, random_: random.Random) -> None:
        """A fault, of which at least one rank is left."""
        victims = random_.sample(self.alive, min(2, len(self.alive)))
        if what in ("stop-kill", "two", "repair") and len(self.alive) < 3:
            what = "kill"
        one, other = victims[0], victims[-1]
        if what == "first":
            one = self.alive[0]
        fault = Fault(what, [one, other] if what in ("two", "repair", "stop-kill") else [one])
        self.faults.append(fault)
        if what.startswith("stop"):
            self.signal(one, signal.SIGSTOP)
            if what == "stop-kill":
                self.signal(other, signal.SIGKILL)
            time.sleep(HEAL_S + random_.uniform(0.2, 2.0))
            fault.at = time.time()
            self.signal(one, signal.SIGKILL if what == "stop-dead" else signal.SIGCONT)
            return
        self.signal(one, signal.SIGUSR1 if what == "raise" else signal.SIGKILL)
        if what in ("two", "repair"):
            time.sleep(random_.uniform(0.0, REPAIR_S) if what == "repair" else 0.0)
            self.signal(other, signal.SIGKILL)

    def made_s(self, fault: Fault) -> float | None:
        """From the fault until the last of those that live had the first step behind which the victims are gone."""
        ends, size = [], len(self.alive)
        for place in self.alive:
            told = self.told(place)
            after = [step.at for step in told.steps if step.at > fault.at and step.size == size]
            if not after:
                return None
            ends.append(after[0])
        return max(ends) - fault.at

    def leftovers(self) -> list[str]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {entry.name}: {(entry / 'cmdline').read_bytes()[:200]!r}")
                    os.kill(int(entry.name), signal.SIGKILL)
        return found + [f"file {path}" for path in self.temporary.rglob("*") if not path.is_dir()]

    def end(self) -> None:
        stop_all([self.process])


def run(folder: Path, number: int, args: argparse.Namespace, random_: random.Random) -> tuple[list[str], list[float]]:
    """One job. Returns what was wrong, and how long each loss took until the step was made."""
    kind = random_.choice(args.kinds)
    last = 1 if args.ranks == 2 or random_.random() < 0.7 else 2
    weights = [WEIGHTS[FAULTS.index(fault)] for fault in args.faults]
    problems: list[str] = []
    times: list[float] = []
    job = Job(folder, kind, args)
    try:
        job.until(lambda: all(len(job.told(place).steps) > 5 for place in range(args.ranks)), "the first steps")
        while len(job.alive) > last:
            time.sleep(random_.uniform(args.least, args.most))
            before = len(job.alive)
            job.inflict(random_.choices(args.faults, weights)[0], random_)
            job.go_on()
            fault = job.faults[-1]
            made = job.made_s(fault)
            if made is not None and len(job.alive) < before and fault.what in ("kill", "first", "two"):
                times.append(made)
            line = (job.told(job.alive[0]).lines or ["nothing was lost"])[-1] if len(job.alive) < before else "waited"
            print(
                f"  job {number} ({kind}) {fault.what} of places {fault.victims}: {made or 0:.3f} s; {_short(line)}",
                flush=True,
            )
        (folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(args.patience)
        if job.process.returncode != 0:
            problems.append(f"the job's exit code is {job.process.returncode}\n{job.stacks()}")
    except (TimeoutError, ProcessLookupError, ValueError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        job.end()
    told = [job.told(place) for place in range(args.ranks)]
    problems += churn_checks.wrong(told, kind, job.alive)
    problems += [f"left behind: {what}" for what in job.leftovers()]
    if problems:
        problems.append(f"kind {kind}; faults {[(fault.what, fault.victims, fault.at) for fault in job.faults]}")
        problems.append((folder / "said").read_text(errors="replace")[-3000:])
    return problems, times


def _short(line: str) -> str:
    return re.sub(r"host \S+, ", "", line)[:400]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    random_ = random.Random(args.seed)
    end = time.monotonic() + 60 * args.minutes
    jobs = wrong = 0
    times: list[float] = []
    while time.monotonic() < end:
        jobs += 1
        folder = Path(tempfile.mkdtemp(prefix="ringdp-churn-"))
        problems, made = run(folder, jobs, args, random_)
        times += made
        wrong += bool(problems)
        for problem in problems:
            print(f"job {jobs} WRONG: {problem}", flush=True)
        if problems and args.keep:
            print(f"job {jobs}: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return {"benchmark": "churn", "jobs": jobs, "failed": wrong, "made_s": times}


def report(result: dict[str, Any]) -> str:
    made = result["made_s"]
    middle = (
        f"; from a kill to the step made, median {statistics.median(made):.3f}, most {max(made):.3f} s" if made else ""
    )
    return f"{result['jobs']} jobs, {result['failed']} of them with something wrong; {len(made)} kills timed{middle}"
