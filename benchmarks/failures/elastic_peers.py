"""What the loss of a rank costs in an elastic job, in torchft and in Horovod Elastic.

    python -m benchmarks elastic_peers                            4 ranks, `small` and `mlp`, 3 jobs of each peer
    python -m benchmarks elastic_peers --models mlp --jobs 0      step times only, while no rank is lost

A peer is run where it is installed; otherwise its row says how to install it.

Losses: one of the ranks, processes on this host, kills itself (SIGKILL) in the backward of its seventh step, before it
has a gradient. `until a step counts` is from just before that, by the host's clock, until the last of the others has
made the next step that counts, the optimizer's part included. `batches lost` are those of the survivors that no
optimizer step had, or that were computed again. The means of that step are compared between the survivors, to the bit,
and with the mean of their own gradients, computed once more, in float64: `off` is the largest difference, relative to
the largest mean.

Steps: in one job each process has the model in all wrappers, and blocks of steps take turns. A time is that of the
slowest rank; the interval is of the ratio to torch's DDP on gloo, over the rounds. RingDP is measured in an elastic job
and as usual; Horovod is not among them.

"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import models, session
from benchmarks.lib.measure import format_time, table
from benchmarks.lib.ranks import ROOT, start, stop_all

RANK = (sys.executable, "-m", "benchmarks.failures.elastic_peers_rank")
PATIENCE_S = 120.0
TRAINEES = ("ringdp", "torchft", "horovod")
# All are this host. Horovod bans a whole host, by its name, when a rank on it dies.
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "0x7f.1", "0177.1")


class NoStep(RuntimeError):
    """The survivors did not come to another step; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One row: what trains, which package that needs, and what torchft's lighthouse and its ranks are told."""

    trainee: str
    package: str
    settings: str = ""
    server: Mapping[str, int] = field(default_factory=dict)  # options of torchft_lighthouse or horovodrun
    rank_settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Why it is not run; empty where it is."""
        if find_spec(self.package) is not None:
            return ""
        return f"not installed: {INSTALL[self.package]}"

    @property
    def options(self) -> list[str]:
        return [str(word) for option in self.server.items() for word in option]

    @property
    def title(self) -> str:
        """Its name with the version that is installed."""
        known = [f"{name} {_version(name)}" for name in (self.package, f"{self.package}-nightly") if _version(name)]
        return " ".join([*(known or [self.package]), self.settings]).strip()


INSTALL = {
    "torchft": "pip install torchft (or torchft-nightly)",
    "horovod": "pip install horovod, from sources that ask for C++20 (docs/lab/elastic.md)",
}
DEFAULTS = {"HEARTBEAT_INTERVAL_MS": "100", "GLOO_TIMEOUT_MS": "5000"}  # the Manager's; train_ddp.py's
SHORT = {"HEARTBEAT_INTERVAL_MS": "20", "GLOO_TIMEOUT_MS": "1000"}
SHORT_LIGHTHOUSE = {"--heartbeat_timeout_ms": 200, "--quorum_tick_ms": 10}
PEERS = (
    Peer("ringdp", "ringdp", "--elastic"),
    Peer("torchft", "torchft", "", rank_settings=DEFAULTS),
    Peer("torchft", "torchft", "with short timeouts", SHORT_LIGHTHOUSE, SHORT),
    Peer("horovod", "horovod", "Elastic"),
    Peer("horovod", "horovod", "Elastic with a short timeout", {"--gloo-timeout-seconds": 5}),
)


@dataclass(frozen=True)
class Loss:
    """What one job showed."""

    seconds: float  # from the kill until the last survivor had made a step that counts
    lost: int  # batches of all survivors
    equal: bool  # their means, to the bit
    off: float  # the largest difference from the mean of their gradients, relative to the largest mean


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@contextmanager
def lighthouse(peer: Peer, folder: Path) -> Iterator[dict[str, str]]:
    """torchft's, for as long as the `with` lasts; what the ranks' environment must have."""
    if peer.trainee != "torchft":
        yield {}
        return
    port = session.free_port()
    words = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
    words += ["--min_replicas", "1", *peer.options]
    with open(folder / "lighthouse", "wb") as said:
        server = start(words, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
    try:
        yield {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", **peer.rank_settings}
    finally:
        stop_all([server])


def run_ranks(commands: Sequence[Sequence[str]], folder: Path, variables: Mapping[str, str]) -> list[int | None]:
    """Their exit codes; None for one that did not end in time."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RINGDP_REPORT_EVERY": "0",
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    processes = []
    with open(folder / "said", "wb") as said:
        try:
            for words in commands:
                quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
                processes.append(start(words, env=environment, **quiet))
            end = time.monotonic() + PATIENCE_S
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                time.sleep(0.02)
            return [process.poll() for process in processes]
        finally:
            stop_all(processes)


def commands_of(peer: Peer, folder: Path, words: Sequence[str], ranks: int) -> list[list[str]]:
    """What starts the ranks, which run the program `words`: with the rank as its last argument, or a launcher."""
    if peer.trainee != "horovod":
        return [[*words, str(rank)] for rank in range(ranks)]
    name_hosts(folder, ranks)
    discovery = folder / "hosts.sh"
    discovery.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
    discovery.chmod(0o755)
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--network-interfaces", "lo"]
    launcher += ["-np", str(ranks), "--min-np", "1", "--max-np", str(ranks), *peer.options]
    return [[*launcher, "--host-discovery-script", str(discovery), *words]]


def name_hosts(folder: Path, count: int) -> None:
    """Horovod finds so many hosts of one rank from now on."""
    new = folder / "hosts.new"
    new.write_text("".join(f"{name}:1\n" for name in HOSTS[:count]))
    new.rename(folder / "hosts")


def lose_a_rank(peer: Peer, model: str, ranks: int, victim: int) -> Loss:
    """One job. Raises NoStep where the survivors did not go on."""
    with tempfile.TemporaryDirectory(prefix="ringdp-peers-") as name:
        folder = Path(name)
        with lighthouse(peer, folder) as variables:
            words = [*RANK, str(folder), peer.trainee, model, str(ranks), str(victim)]
            codes = run_ranks(commands_of(peer, folder, words, ranks), folder, variables)
        survivors = [rank for rank in range(ranks) if rank != victim]
        found = [folder / f"rank-{rank}.pt" for rank in survivors]
        if not all(path.exists() for path in found):
            raise NoStep(_reason(folder, codes))
        if not (folder / "killed").exists():
            raise NoStep("no rank was killed")
        return read([torch.load(path) for path in found], float((folder / "killed").read_text()))


def read(survivors: Sequence[Mapping[str, Any]], killed: float) -> Loss:
    """What the survivors' files say together."""
    mean = torch.stack([one["own"].double() for one in survivors]).mean(0)
    return Loss(
        seconds=max(one["ended"] for one in survivors) - killed,
        lost=sum(one["lost"] for one in survivors),
        equal=all(torch.equal(one["means"], survivors[0]["means"]) for one in survivors),
        off=max(((one["means"].double() - mean).abs().max() / mean.abs().max()).item() for one in survivors),
    )


def _reason(folder: Path, codes: Sequence[int | None]) -> str:
    errors = [path.read_text().splitlines()[0] for path in sorted(folder.glob("error-*"))]
    if errors:
        return f"no step: {Counter(errors).most_common(1)[0][0]} on {len(errors)} ranks"
    if None in codes:
        return f"no step within {PATIENCE_S:.0f} s"
    said = (folder / "said").read_text(errors="replace").split("\n")
    return f"no step: the processes ended with {codes}; last: {' '.join(said[-3:]).strip()[-200:]}"


def loss_row(peer: Peer, model: str, ranks: int, victim: int, jobs: int) -> list[str]:
    cells = [model, peer.title]
    if peer.missing:
        return [*cells, peer.missing, "", "", ""]
    try:
        found = [lose_a_rank(peer, model, ranks, victim) for _ in range(jobs)]
    except NoStep as reason:
        return [*cells, str(reason), "", "", ""]
    seconds = sorted(one.seconds for one in found)
    lost = sorted({one.lost for one in found})
    return [
        *cells,
        f"{format_time(statistics.median(seconds))} ({format_time(seconds[0])} to {format_time(seconds[-1])})",
        " to ".join(str(it) for it in {lost[0]: 0, lost[-1]: 0}),
        "yes" if all(one.equal for one in found) else "no",
        f"{max(one.off for one in found):.1e}",
    ]


def step_rows(model: str, ranks: int, rounds: int, block: int) -> Iterator[list[str]]:
    """Median step time of each peer, and its ratio to torch's DDP on gloo."""
    torchft = next(peer for peer in PEERS if peer.trainee == "torchft")
    ours = torchft if not torchft.missing else PEERS[0]
    with tempfile.TemporaryDirectory(prefix="ringdp-peers-") as name:
        folder = Path(name)
        words = [*RANK, name, "cost", model, str(ranks), "-1"]
        commands = [[*words, str(rank), str(rounds), str(block)] for rank in range(ranks)]
        with lighthouse(ours, folder) as variables:
            codes = run_ranks(commands, folder, variables)
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}:\n{(folder / 'said').read_text()[-3000:]}")
        found = json.loads((folder / "cost").read_text())
    titles = {
        "ddp": "torch's DDP on gloo",
        "plain": "RingDP, not elastic",
        "ringdp": PEERS[0].title,
        "torchft": torchft.title,
    }
    for name, title in titles.items():
        if name not in found:
            yield [model, title, torchft.missing, ""]
            continue
        median, mean, half = found[name]
        yield [model, title, format_time(median), f"{mean:+.1f} ± {half:.1f} %" if name != "ddp" else ""]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4, help="processes of a job (4)")
    parser.add_argument("--models", default="small,mlp", help=f"of {', '.join(models.NAMES)} (small,mlp)")
    parser.add_argument("--peers", default=",".join(TRAINEES), help=f"of {', '.join(TRAINEES)} (all)")
    parser.add_argument("--jobs", type=int, default=3, help="in which a rank is lost, for each row; 0: none (3)")
    parser.add_argument("--victim", type=int, help="the rank that is killed (the last one)")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps for each wrapper; 0: none (8)")
    parser.add_argument("--block", type=int, default=8, help="steps of a block (8)")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, models.NAMES)
    args.peers = session.chosen(args.peers, TRAINEES)
    args.victim = args.ranks - 1 if args.victim is None else args.victim
    if not 3 <= args.ranks <= len(HOSTS) or not 0 <= args.victim < args.ranks:
        raise ValueError(f"3 to {len(HOSTS)} ranks are needed, and a victim among them")


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """After each row."""
    result = session.result_of("elastic_peers", None, ranks=args.ranks, load=os.getloadavg()[0], losses=[], steps=[])
    for model in args.models if args.jobs else ():
        for peer in PEERS:
            if peer.trainee in args.peers:
                result["losses"].append(loss_row(peer, model, args.ranks, args.victim, args.jobs))
                yield result
    for model in args.models if args.rounds else ():
        result["steps"] += step_rows(model, args.ranks, args.rounds, args.block)
        yield result


def report(result: dict[str, Any]) -> str:
    losses = ["model", "peer", "until a step counts", "batches lost", "survivors equal", "off"]
    parts = [table(losses, result["losses"])] if result["losses"] else []
    steps = ["model", "peer", "a step", "beside DDP on gloo, 95 %"]
    parts += [table(steps, result["steps"])] if result["steps"] else []
    return session.text(result, f"{result['ranks']} ranks, load {result['load']:.1f} before", *parts)
