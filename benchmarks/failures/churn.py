"""Whether elastic jobs hold what they promise while ranks are killed at random times, again and again.

    python -m benchmarks churn                                   jobs of 6 ranks for 5 minutes
    python -m benchmarks churn --minutes 60 --seed 7
    python -m benchmarks churn --every 0.1,1 --ranks 4           losses one upon the other
    python -m benchmarks churn --faults kill,repair --kinds int8
    python -m benchmarks churn --kinds job --minutes 60          ranks come and leave, too
    sudo python -m benchmarks churn --delay 25ms --loss 0.1      rounds of two hosts, a long line between them

Each job is `ringrun --elastic`, and loses ranks until one is left (sometimes two), every 2 to 10 s: `kill` is SIGKILL
to a random rank, `first` to rank 0, `two` to two at once, `repair` to one and to another while that is repaired,
`raise` has a rank raise an exception, `stop` stops one for longer than RINGDP_HEAL, so that it has to be waited for,
`stop-kill` kills another one meanwhile, `stop-dead` kills the stopped one; `site`, in rounds, kills all of a site.

Jobs of the kind `job` (`ringdp.elastic.Job`) last for 60 to 120 s: their launcher replaces ranks, and `leave` sends
SIGTERM to one, `join` starts `ringrun --join` beside them, `newcomer` kills a process that comes. `topk` has error
feedback, micro-batches and a BalancedSampler; `job-rounds` is a Job of DiLoCo with a rank a site, `job-quorum` one with
a quorum, whose turns are looked at as steps; `rounds` and `rounds-int4` are DiLoCo over two sites. With --delay each
site is a network namespace with half of the ranks and a launcher of its own (far/long_line.py).

After each job, of what its ranks have written down: a step that counts has the same gradients and parameters, to the
bit, on all ranks, dead ones included; its mean is exactly the one of the members of one view, computed without RingDP
(of kinds whose means are not rounded); each sample of an epoch is in the mean of one step, or a line says how many are
in none; what error feedback owes and the mean are together what the ranks had; no rank leaves out a step; all go
through the same views; each change is one line, which says what has become of the step; descriptors do not grow; where
ranks come, no step takes --pause seconds more than ranks were stopped for; the exit code is 0; no process and no
temporary file is left. A rank that does not go on within --patience seconds after a fault is a hang: its stacks are
printed. The exit code is 1 if anything was wrong.
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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.failures import churn_checks
from benchmarks.failures.churn_rank import CODES, KINDS, LAUNCHER, WITH_JOB
from benchmarks.far.long_line import FarHosts, LongLine, parse_rate, parse_time
from benchmarks.lib import session
from benchmarks.lib.hosts import PORT, Hosts
from benchmarks.lib.ranks import ROOT, signals_unwind, start, stop_all

FAULTS = ("kill", "first", "two", "repair", "raise", "stop", "stop-kill", "stop-dead", "site")
WEIGHTS = (6, 2, 2, 2, 2, 1, 1, 1, 1)
OF_NEWCOMERS = {"leave": 4, "join": 6, "newcomer": 2}
"""And their weights."""
HEAL_S, HEAL_FAR_S = 1.0, 4.0
SITES = 2
REPAIR_S = 0.15
STEP_PAUSE_S = 0.02
JOB_S = (60.0, 120.0)
NEWEST = 20_000
"""Bytes of a record that are read while a job runs."""
MARK = "CHURN_OF_RINGDP"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="no job is begun after them (5)")
    parser.add_argument("--ranks", type=int, default=6, help="of each job (6)")
    parser.add_argument("--every", default="2,10", help="seconds between two faults, at least and at most (2,10)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random but the machine (1)")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}; in jobs of ranks that come all"
    )
    parser.add_argument("--kinds", help=f"of jobs: {', '.join(KINDS)} (all; with --delay those of rounds)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a rank hangs (60)")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds that a step may take where ranks come (2)")
    parser.add_argument("--transport", default="auto", help="RINGDP_TRANSPORT of the jobs (auto)")
    parser.add_argument("--delay", type=parse_time, help="two hosts, which are so far apart: 25ms (one host)")
    parser.add_argument("--loss", type=float, default=0.0, help="with --delay: percent of the packets (0)")
    parser.add_argument("--rate", default="100mbit", help="with --delay: of each host's line, up and down (100mbit)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of jobs in which something was wrong")


def check(args: argparse.Namespace) -> None:
    args.faults = session.chosen(args.faults, FAULTS)
    args.kinds = session.chosen(args.kinds or ",".join(KINDS if args.delay is None else CODES), tuple(KINDS))
    args.least, args.most = (float(one) for one in args.every.split(","))
    if args.ranks < 2 or args.minutes <= 0 or not 0 < args.least <= args.most:
        raise ValueError("at least two ranks, and times above 0, are needed")
    if args.delay is not None and (args.ranks % SITES or "job" in args.kinds):
        raise ValueError("with --delay the ranks are split over two hosts, and no rank comes: not for the kind job")
    parse_rate(args.rate)


@dataclass
class Fault:
    """One that has been made: what, who, and when, by the host's clock."""

    what: str
    victims: list[int]
    at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.time)


class Job:
    """A launcher and its ranks, of which some are alive."""

    def __init__(self, folder: Path, kind: str, args: argparse.Namespace) -> None:
        self.folder, self.kind, self.args = folder, kind, args
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.processes: list[subprocess.Popen[Any]] = []
        self.alive: list[int] = []
        self.faults: list[Fault] = []
        self.heal_s = HEAL_S
        self.begin()

    def begin(self) -> None:
        self.launch("--elastic", "-n", str(self.args.ranks))
        self.alive = list(range(self.args.ranks))

    def placed(self, command: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """Of the next launcher."""
        return command, env

    def launch(self, *options: str) -> None:
        number = len(self.processes)
        command = [sys.executable, str(ROOT / "launch.py"), *options, "--console", "errors"]
        command += ["-m", "benchmarks.failures.churn_rank", str(self.folder), self.kind, str(STEP_PAUSE_S)]
        env = {**os.environ, MARK: self.mark, "RINGDP_HEAL": str(self.heal_s), "TMPDIR": str(self.temporary)}
        env |= {"RINGDP_TRANSPORT": self.args.transport, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command, env = self.placed(command, env | {LAUNCHER: str(number)})
        with open(self.folder / f"said-{number}", "wb") as said:
            self.processes.append(start(command, cwd=self.folder, env=env, stdout=said, stderr=subprocess.STDOUT))

    @property
    def process(self) -> subprocess.Popen[Any]:
        return self.processes[0]

    def said(self) -> str:
        paths = [self.folder / f"said-{number}" for number in range(len(self.processes))]
        return "\n".join(f"---- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def told(self, place: int, newest: int = 0) -> churn_checks.Told:
        return churn_checks.read(self.folder, place, newest)

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
            newest = [self.told(place, NEWEST).steps[-50:] for place in places]
            return all(sum(step.size == size for step in steps) >= least for steps in newest)

        self.until(have, f"steps of {size} by places {places}")

    def inflict(self, what: str, random_: random.Random) -> None:
        """A fault, of which at least one rank is left."""
        victims = random_.sample(self.alive, min(2, len(self.alive)))
        one, other = victims[0], victims[-1]
        of_site = [place for place in self.alive if self.told(place).site == self.told(one).site]
        if what == "site" and len(of_site) < len(self.alive):
            self.faults.append(Fault(what, of_site))
            for place in of_site:
                self.signal(place, signal.SIGKILL)
            return
        if what == "site" or (what in ("stop-kill", "two", "repair") and len(self.alive) < 3):
            what = "kill"
        if what == "first":
            one = self.alive[0]
        fault = Fault(what, [one, other] if what in ("two", "repair", "stop-kill") else [one])
        self.faults.append(fault)
        if what.startswith("stop"):
            self.signal(one, signal.SIGSTOP)
            if what == "stop-kill":
                self.signal(other, signal.SIGKILL)
            time.sleep(self.heal_s + random_.uniform(0.2, 2.0))
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
            told = self.told(place, NEWEST)
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
        stop_all(self.processes)


class Apart(Job):
    """One of two hosts, each with a launcher and half of the ranks."""

    def begin(self) -> None:
        self.heal_s = HEAL_FAR_S
        hosts: Hosts = self.args.hosts
        secret = self.folder / "secret"
        secret.write_text(self.mark * 2)
        secret.chmod(0o600)
        meeting = ["--master-addr", hosts.address(0), "--master-port", str(PORT), "--secret-file", str(secret)]
        for host in range(SITES):
            each = ["--nnodes", str(SITES), "--node-rank", str(host), "-n", str(self.args.ranks // SITES)]
            self.launch("--elastic", *each, *meeting)
        self.alive = list(range(self.args.ranks))

    def placed(self, command: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        host = len(self.processes)
        return self.args.hosts.command(host, command), env | self.args.hosts.host_env(host) | {"RINGDP_SITE": str(host)}


class Joined(Job):
    """One whose ranks are replaced, leave and come. They are known by their pids; `alive` has the members."""

    def begin(self) -> None:
        self.secret = self.folder / "secret"
        self.secret.write_text(self.mark * 2)
        self.secret.chmod(0o600)
        self.endpoint = f"127.0.0.1:{session.free_port()}"
        self.leaving: list[int] = []
        self.coming: list[int] = []
        self.gone: set[int] = set()
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--secret-file", str(self.secret))
        self.launch("--elastic", "-n", str(max(self.args.ranks - 2, 2)), "--max-replacements", "1000", *meeting)

    def pid(self, place: int) -> int:
        return place

    def pids(self) -> list[int]:
        """Of all processes that there have been."""
        return [int(path.name.partition("-")[2]) for path in self.folder.glob("record-*")]

    def look(self) -> None:
        """Who is a member now, and who comes."""
        living = [pid for pid in self.pids() if pid not in self.gone]
        self.gone |= {pid for pid in living if not _runs(pid)}
        living = [pid for pid in living if pid not in self.gone]
        self.leaving = [pid for pid in self.leaving if pid in living]
        members = {pid: steps[-1] for pid in living if (steps := self.told(pid, NEWEST).steps)}
        self.coming = [pid for pid in living if pid not in members]
        members = {pid: step for pid, step in members.items() if pid not in self.leaving}
        self.alive = sorted(members, key=lambda pid: self.told(pid).started)

    def has_begun(self) -> bool:
        self.look()
        return len(self.alive) >= 2

    def is_complete(self) -> bool:
        """All that came are members."""
        self.look()
        return self.starting() == 0 and not self.coming

    def starting(self) -> int:
        """Processes that joining launchers start, and that have not said anything yet."""
        begun = Counter(self.told(pid).launcher for pid in self.pids())
        wanted = {it.victims[0]: len(it.victims) for it in self.faults if it.what == "join"}
        return sum(
            max(ranks - begun[number], 0) for number, ranks in wanted.items() if _runs(self.processes[number].pid)
        )

    def inflict(self, what: str, random_: random.Random) -> None:
        self.look()
        enough = len(self.alive) >= (3 if what in ("two", "repair", "stop-kill") else 2)
        population = len(self.alive) + len(self.leaving) + len(self.coming) + self.starting()
        if not (self.coming if what == "newcomer" else enough):
            what = "join"
        if what == "join" and population >= self.args.ranks:
            what = "leave" if len(self.alive) >= 2 else "wait"
        if what == "join":
            ranks = random_.choice((1, 1, 2)) if population + 2 <= self.args.ranks else 1
            self.faults.append(Fault(what, [len(self.processes)] * ranks))
            self.launch("--join", self.endpoint, "--secret-file", str(self.secret), "-n", str(ranks))
        elif what == "leave":
            victim = random_.choice(self.alive)
            self.faults.append(Fault(what, [victim]))
            self.signal(victim, signal.SIGTERM)
            self.leaving.append(victim)
        elif what == "newcomer":
            victim = random_.choice(self.coming)
            self.faults.append(Fault(what, [victim]))
            os.kill(victim, signal.SIGKILL)
        elif what == "wait":
            self.faults.append(Fault(what, []))
        else:
            super().inflict(what, random_)

    def go_on(self, least: int = 3) -> None:
        """Each member that lives makes steps, and those that leave are gone."""
        self.look()
        last = max((self.told(pid, NEWEST).steps[-1].number for pid in self.alive), default=0)

        def have() -> bool:
            self.look()
            newest = [self.told(pid, NEWEST).steps[-1].number for pid in self.alive]
            return bool(newest) and min(newest) >= last + least and not self.leaving

        self.until(have, f"{least} steps behind {last} by {self.alive}, and the end of {self.leaving}")

    def wrong(self, codes: list[int | None]) -> tuple[list[str], float]:
        """And the longest pause. `codes`: of the launchers."""
        told = [self.told(pid) for pid in self.pids()]
        for one in told:
            churn_checks.read_audit(self.folder, one)
        problems = churn_checks.wrong_where_ranks_come(told, self.kind, self.alive)
        hurt = {pid for fault in self.faults if fault.what not in ("leave", "join", "stop") for pid in fault.victims}
        for fault in self.faults:
            for one in told:
                if fault.what == "leave" and one.place in fault.victims and not (one.left == 0 or one.ended):
                    problems.append(f"process {one.place} was told to leave, and did not: {one.left}")
        for number, code in enumerate(codes):
            late = "the job ended before this process could join it" in (self.folder / f"said-{number}").read_text()
            if code != 0 and not late and not any(it.launcher == number and it.place in hurt for it in told if number):
                problems.append(f"the exit code of launcher {number} is {code}")
        stops = [(fault.began, fault.at) for fault in self.faults if fault.what.startswith("stop")]
        longest, at, pid = max(churn_checks.pauses(told, stops), default=(0.0, 0.0, 0))
        if longest > self.args.pause:
            near = [(it.what, it.victims, round(it.began - at, 2)) for it in self.faults if -15 < it.began - at < 3]
            problems.append(f"process {pid} made no step for {longest:.3f} s from {at}; faults {near}")
        return problems, longest


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def churn(job: Joined, number: int, random_: random.Random) -> None:
    """Faults for as long as the job lasts."""
    weights = [*WEIGHTS, *OF_NEWCOMERS.values()]
    job.until(job.has_begun, "the first steps")
    end = time.monotonic() + random_.uniform(*JOB_S)
    while time.monotonic() < end:
        time.sleep(random_.uniform(job.args.least, job.args.most))
        job.inflict(random_.choices([*FAULTS, *OF_NEWCOMERS], weights)[0], random_)
        job.go_on()
        fault = job.faults[-1]
        said = f"{time.time() - fault.at:.1f} s; {len(job.alive)} members, {len(job.coming) + job.starting()} come"
        print(f"  job {number} ({job.kind}) {fault.what} of {fault.victims}: {said}", flush=True)
    job.until(job.is_complete, "newcomers that come")


def shrink(job: Job, number: int, random_: random.Random) -> list[float]:
    """Faults until one or two ranks are left. How long each loss took until the step was made."""
    args, times = job.args, []
    last = 1 if args.ranks == 2 or random_.random() < 0.7 else 2
    weights = [WEIGHTS[FAULTS.index(fault)] for fault in args.faults]
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
            f"  job {number} ({job.kind}) {fault.what} of places {fault.victims}: {made or 0:.3f} s; {_short(line)}",
            flush=True,
        )
    return times


@dataclass
class Outcome:
    """Of one job: what was wrong, its faults, how long each loss took until the step was made, the longest pause."""

    kind: str
    problems: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    made_s: list[float] = field(default_factory=list)
    pause_s: float = 0.0


def run(folder: Path, number: int, args: argparse.Namespace, random_: random.Random) -> Outcome:
    """One job."""
    outcome = Outcome(random_.choice(args.kinds))
    problems = outcome.problems
    kind = Joined if outcome.kind in WITH_JOB else Job if args.delay is None else Apart
    job = kind(folder, outcome.kind, args)
    try:
        if isinstance(job, Joined):
            churn(job, number, random_)
        else:
            outcome.made_s = shrink(job, number, random_)
        (folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in job.processes:
                process.wait(args.patience)
        if any(process.returncode is None for process in job.processes):
            problems.append(f"the job does not end\n{job.stacks()}")
    except (TimeoutError, ProcessLookupError, ValueError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        ended = [process.poll() for process in job.processes]
        job.end()
    if isinstance(job, Joined):
        found, outcome.pause_s = job.wrong(ended)
        problems += found
    else:
        problems += [f"the job's exit code is {code}" for code in ended if code != 0]
        problems += churn_checks.wrong([job.told(place) for place in range(args.ranks)], outcome.kind, job.alive)
    problems += [f"left behind: {what}" for what in job.leftovers()]
    outcome.faults = [fault.what for fault in job.faults]
    if problems:
        problems.append(f"{outcome.kind}; faults {[(it.what, it.victims, it.began, it.at) for it in job.faults]}")
        problems.append(job.said())
    return outcome


def _short(line: str) -> str:
    return re.sub(r"host \S+, ", "", line)[:400]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.delay is None:
        return measure_jobs(args)
    line = LongLine(args.delay, args.loss)
    with signals_unwind(), FarHosts(SITES, rate=args.rate, line=line) as args.hosts:
        return measure_jobs(args)


def measure_jobs(args: argparse.Namespace) -> dict[str, Any]:
    random_ = random.Random(args.seed)
    end = time.monotonic() + 60 * args.minutes
    outcomes: list[Outcome] = []
    while time.monotonic() < end:
        number = len(outcomes) + 1
        folder = Path(tempfile.mkdtemp(prefix="ringdp-churn-"))
        outcomes.append(outcome := run(folder, number, args, random_))
        for problem in outcome.problems:
            print(f"job {number} WRONG: {problem}", flush=True)
        if outcome.problems and args.keep:
            print(f"job {number}: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "benchmark": "churn",
        "jobs": len(outcomes),
        "failed": sum(bool(it.problems) for it in outcomes),
        "kinds": Counter(it.kind for it in outcomes),
        "faults": Counter(fault for it in outcomes for fault in it.faults),
        "made_s": [one for it in outcomes for one in it.made_s],
        "pauses_s": [it.pause_s for it in outcomes if it.kind in WITH_JOB],
    }


def report(result: dict[str, Any]) -> str:
    made, pauses = result["made_s"], result["pauses_s"]

    def counted(counts: dict[str, int]) -> str:
        return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))

    said = f"{result['jobs']} jobs ({counted(result['kinds'])}), {result['failed']} of them with something wrong"
    said += f"; {counted(result['faults'])}; {len(made)} kills timed"
    if made:
        said += f"; from a kill to the step made, median {statistics.median(made):.3f}, most {max(made):.3f} s"
    if pauses:
        said += f"; longest pause where ranks come {max(pauses):.3f} s"
    return said
