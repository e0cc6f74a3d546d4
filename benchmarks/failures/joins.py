"""How long it takes until a killed rank is replaced, or a rank of another host has come, and how long the others wait.

    python -m benchmarks joins                       4 ranks, `small` and `mlp` (23.1 M parameters, AdamW), 3 jobs each
    python -m benchmarks joins --models mlp --peers ringdp
    python -m benchmarks joins --hosts 2 --models mlp     a rank comes over a line of 1 Gbit/s; root

After ten steps one of the ranks, processes on this host, is killed (SIGKILL), and another process is started: by
ringrun (`ringdp.elastic.Job`), by Horovod's launcher, which finds another host then, and for torchft by this program,
at once. A peer is run where it is installed. `ready` is from the kill until that process has built its model and the
wrapper around it (Horovod's waits for the others, and is not in it), `takes part` from then until its first step that
counts and has its batch. `pause` is the longest time between two steps of one of the others meanwhile (from `ready`
on), and `loss` the longest one until `ready`, both less their median step; where a peer makes no step in between, they
are one and the same. `state` is the part of the pause for which RingDP's ranks let the newcomer in (`Change.seconds`).

The means and the parameters of each step are the same on all ranks, the newcomer among them, or nothing is reported.

With --hosts 2 nothing is killed: `ringrun --join` starts a rank on a second host, a network namespace, and `ready` is
from there. `of the line` is `state` as a multiple of the time that the line takes for the bytes of the state.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.failures.elastic_peers import HOSTS, PEERS, TRAINEES, Peer, commands_of, lighthouse, name_hosts
from benchmarks.lib import session
from benchmarks.lib.hosts import PORT, Hosts
from benchmarks.lib.ranks import ROOT, Failed, signals_unwind, start, stop_all

MODELS = ("small", "mlp")
LIMIT_S = 300.0
STEPS = 10
"""Of each rank before the kill, and of the newcomer."""
LINE_BYTES_PER_S = 125e6

Events = Sequence[Mapping[str, Any]]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--peers", default=",".join(TRAINEES), help=f"of {', '.join(TRAINEES)} (all)")
    parser.add_argument("--ranks", type=int, default=4, help="of each job (4)")
    parser.add_argument("--hosts", type=int, default=1, help="2: a rank of another host joins (1)")
    parser.add_argument("--jobs", type=int, default=3, help="of each model (3)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="a rank sleeps so long in each step (0.05)")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, MODELS)
    args.peers = session.chosen(args.peers, TRAINEES)
    if not 2 <= args.ranks < len(HOSTS) or args.jobs < 1 or args.step_seconds < 0:
        raise ValueError(f"2 to {len(HOSTS) - 1} ranks and a job are needed, and no time below 0")
    if args.hosts not in (1, 2):
        raise ValueError("a rank is replaced on its own host, or comes from a second one: --hosts 1 or 2")
    if args.hosts == 2:
        args.peers = ["ringdp"]


def told(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By pid."""
    found = {}
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        found[int(path.stem)] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


def steps_of(events: Events) -> Events:
    return [it for it in events if it["what"] == "step"]


class Job:
    """The processes of one job, in `folder`, and what its ranks have told."""

    def __init__(self, folder: Path, peer: Peer, model: str, args: argparse.Namespace, hosts: Hosts | None) -> None:
        self.folder, self._peer, self._args, self._hosts = folder, peer, args, hosts
        self._program = ["-m", "benchmarks.failures.joins_rank", str(folder), peer.trainee, model]
        self._program += [str(args.ranks), str(args.step_seconds)]
        self.processes: list[subprocess.Popen[Any]] = []
        self._said = open(folder / "said", "wb")  # noqa: SIM115
        self._secret = folder / "secret"
        self._secret.write_text(secrets.token_hex(32))
        self._secret.chmod(0o600)

    def begin(self, variables: Mapping[str, str]) -> None:
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RINGDP_REPORT_EVERY": "0"}
        self._env |= variables
        if self._peer.trainee == "ringdp":
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint()] if self._hosts else []
            commands = [self._ringrun("--elastic", *meeting, "-n", str(self._args.ranks))]
        else:
            commands = commands_of(self._peer, self.folder, [sys.executable, *self._program], self._args.ranks)
        self._commands = commands
        for words in commands:
            self._start(words, host=0)

    def kill_one(self, pid: int) -> float:
        """The rank that is this process; when. Another process takes its place."""
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        if self._peer.trainee == "torchft":
            number = next(number for number, it in enumerate(self.processes) if it.pid == pid)
            self.processes[number].wait()
            del self.processes[number]
            self._start(self._commands[number], host=0)
        elif self._peer.trainee == "horovod":
            name_hosts(self.folder, self._args.ranks + 1)
        return at

    def let_one_come(self) -> float:
        """A rank of the second host; when."""
        at = time.time()
        self._start(self._ringrun("--join", self._endpoint(), "-n", "1"), host=1)
        return at

    def until(self, condition: Callable[[Mapping[int, Events]], Any]) -> Any:
        end = time.monotonic() + LIMIT_S
        while not (found := condition(told(self.folder))):
            if any(it.poll() is not None for it in self.processes) or time.monotonic() > end:
                codes = [it.poll() for it in self.processes]
                words = (self.folder / "said").read_text(errors="replace")[-2000:]
                raise Failed(f"{self._peer.title}: the ranks, or the new one, made no steps; {codes}\n{words}")
            time.sleep(0.05)
        return found

    def end(self) -> None:
        """RingDP's jobs end by themselves."""
        (self.folder / "finish").touch()
        for process in self.processes if self._peer.trainee == "ringdp" else ():
            if process.wait(LIMIT_S) != 0:
                raise Failed(f"ended with {process.returncode}\n{(self.folder / 'said').read_text()[-2000:]}")

    def close(self) -> None:
        stop_all(self.processes)
        self._said.close()

    def _endpoint(self) -> str:
        assert self._hosts is not None
        return f"{self._hosts.address(0)}:{PORT}"

    def _ringrun(self, *words: str) -> list[str]:
        secret = ["--secret-file", str(self._secret)] if self._hosts else []
        return [sys.executable, str(ROOT / "launch.py"), *words, *secret, *self._program]

    def _start(self, words: Sequence[str], *, host: int) -> None:
        env = self._env
        if self._hosts is not None:
            words, env = self._hosts.command(host, words), env | self._hosts.host_env(host)
        about: dict[str, Any] = {"cwd": self.folder, "env": env, "stdin": subprocess.DEVNULL}
        self.processes.append(start(words, stdout=self._said, stderr=subprocess.STDOUT, **about))


def run(model: str, peer: Peer, args: argparse.Namespace) -> dict[str, float]:
    with signals_unwind(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringdp-joins-")))
        hosts = stack.enter_context(Hosts(2, rate="1gbit")) if args.hosts == 2 else None
        variables = stack.enter_context(lighthouse(peer, folder))
        job = Job(folder, peer, model, args, hosts)
        stack.callback(job.close)
        job.begin(variables)
        job.until(lambda it: sum(len(steps_of(events)) >= STEPS for events in it.values()) == args.ranks)
        if hosts is not None:
            at = job.let_one_come()
        else:
            at = job.kill_one(next(pid for pid, it in told(folder).items() if it[-1].get("rank") == args.ranks - 1))
        newcomer = job.until(
            lambda it: next((pid for pid, of in it.items() if of[0]["at"] > at and len(steps_of(of)) >= STEPS), None)
        )
        job.end()
        return measures(told(folder), newcomer, at)


def measures(all_told: Mapping[int, Events], newcomer: int, at: float) -> dict[str, float]:
    """Of what the processes have told, of which one was started by `at`. Raises Failed where replicas differ."""
    mine = all_told[newcomer]
    ready = next(it for it in mine if it["what"] == "ready")
    first = next(it["at"] for it in steps_of(mine) if it["takes_part"])
    others = {pid: steps_of(events) for pid, events in all_told.items() if pid != newcomer}
    others = {pid: steps for pid, steps in others.items() if steps and steps[-1]["at"] > first}
    check_replicas([*others.values(), steps_of(mine)])
    gaps = {"loss_s": 0.0, "pause_s": 0.0}
    for steps in others.values():
        pairs = list(itertools.pairwise(it["at"] for it in steps))
        usual = statistics.median(end - begin for begin, end in pairs if end < at)
        for name, since, until in (("loss_s", at, ready["at"]), ("pause_s", ready["at"], first)):
            longest = max(end - begin for begin, end in pairs if end > since and begin < until)
            gaps[name] = max(gaps[name], longest - usual)
    found = {"ready_s": ready["at"] - at, "takes_part_s": first - ready["at"], **gaps}
    changes = [it["seconds"] for pid in others for it in all_told[pid] if it["what"] == "change" and it["joined"]]
    if changes:
        found["state_s"] = max(changes)
        found["of_the_line"] = max(changes) / (ready["state_bytes"] / LINE_BYTES_PER_S)
    return found


def check_replicas(of_ranks: Sequence[Events]) -> None:
    """The last one is the newcomer's."""
    by_number = defaultdict(list)
    for steps in of_ranks:
        for number, bits in {it["number"]: it["bits"] for it in steps}.items():
            by_number[number].append(bits)
    compared = [by_number[it["number"]] for it in of_ranks[-1]]
    whole = [bits for bits in compared if len(bits) == len(of_ranks)]
    if len(whole) < STEPS // 2 or any(len(set(bits)) > 1 for bits in compared):
        raise Failed(f"the newcomer and the others have other means or parameters: {compared}")


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """After each job; those of the rows take turns."""
    peers = [peer for peer in PEERS if peer.trainee in args.peers]
    rows = [{"model": model, "peer": peer.missing or peer.title, "jobs": []} for model in args.models for peer in peers]
    result = session.result_of("joins", None, ranks=args.ranks, hosts=args.hosts, load=os.getloadavg()[0], rows=rows)
    yield result
    for _ in range(args.jobs):
        for row, (model, peer) in zip(rows, itertools.product(args.models, peers), strict=True):
            if not peer.missing:
                row["jobs"].append(run(model, peer, args))
                yield result


def report(result: dict[str, Any]) -> str:
    columns = {"ready_s": "ready", "takes_part_s": "takes part", "pause_s": "pause", "loss_s": "loss"}
    columns["state_s"] = "state"
    if result["hosts"] == 2:
        columns["of_the_line"] = "of the line"
    rows = []
    for row in result["rows"]:
        cells = [row["model"], row["peer"]]
        for name in columns:
            values = sorted(job[name] for job in row["jobs"] if name in job)
            unit = "" if name == "of_the_line" else " s"
            many = f" ({values[0]:.3f} to {values[-1]:.3f})" if len(values) > 1 else ""
            cells.append(f"{statistics.median(values):.3f}{unit}{many}" if values else "")
        rows.append(cells)
    where = "a rank of a second host comes" if result["hosts"] == 2 else "one host"
    head = f"{result['ranks']} ranks, {where}, medians and ranges, load {result['load']:.1f} before"
    return session.report_table(result, head, ["model", "peer", *columns.values()], rows)
