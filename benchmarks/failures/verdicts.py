"""How often the report's verdict is wrong: causes, as data, are injected one after the other, many times each.

    python -m benchmarks verdicts                         all causes, 20 runs each
    python -m benchmarks verdicts --runs 3 --causes loader-sleep-all,burst-checkpoint

A run is a new RingDP in ranks that go on from run to run, 31 steps with the cause, and the verdict after step 30:

    right     the kind and cause that were injected
    silent    no rank, link or remedy was named ("none", or ranks that take turns)
    cores     a core that other threads have, or a slow core, while other programs had some: on a machine that others
              use that is no wrong remedy. `--alone` counts it as one
    wrong     anything else: its remedy would have cost a user an hour
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import busy_processes, table

SLOW = 1  # the rank that a cause of one rank is injected into
STEPS = 31
WIDTH, ROWS = 384, 128


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause, and the verdicts that name it.

    Attributes:
        wanted: (kind, cause) that are right; "int8" in place of a cause: the remedy names it, "-int8": it does not.
        phase: where time is spent: "between", "forward", "backward" or "after".
        seconds: of it, in a step.
        burns: the core computes meanwhile; it sleeps otherwise.
        every: in each so-manieth step only.
        all_ranks: not in rank `SLOW` alone.
        turns: the time is drawn from an exponential distribution on each rank.
        parameters: of the model beside its layers, so many millions.
        ranks: of the job.
        rate: RINGDP_RATE; the ranks are connected by TCP then.
        hogs: processes that never rest, on rank `SLOW`'s core (with `pinned`) or on all.
        pinned: each rank has a core of its own.
        quota: of a core, for the ranks that have the cause.
    """

    wanted: tuple[tuple[str, str | None], ...]
    phase: str = "forward"
    seconds: float = 0.0
    burns: bool = False
    every: int = 1
    all_ranks: bool = False
    turns: bool = False
    parameters: int = 0
    ranks: int = 2
    rate: str = ""
    hogs: int = 0
    pinned: bool = False
    quota: float = 0.0


def _of_one_rank() -> dict[str, Cause]:
    causes = {}
    for phase in ("forward", "backward", "after", "between"):
        for seconds, size in ((0.04, "short"), (0.15, "long")):
            for burns in (False, True):
                cause = "data" if phase == "between" else "work" if burns else "sleep"
                name = f"{phase}-{'burn' if burns else 'sleep'}-{size}"
                causes[name] = Cause((("rank", cause),), phase, seconds, burns)
    return causes


BURSTS, STARVED = (("rank", "bursts"),), (("between", None),)
CAUSES: Mapping[str, Cause] = {
    **_of_one_rank(),
    "forward-sleep-3-ranks": Cause((("rank", "sleep"),), "forward", 0.1, ranks=3),
    "loader-sleep-3-ranks": Cause((("rank", "data"),), "between", 0.1, ranks=3),
    "burst-checkpoint": Cause(BURSTS, "between", 0.4, every=5),
    "burst-checkpoint-burn": Cause(BURSTS, "between", 0.4, burns=True, every=5),
    "burst-checkpoint-3-ranks": Cause(BURSTS, "between", 0.4, every=5, ranks=3),
    "burst-seldom": Cause(BURSTS, "between", 0.8, every=9),
    "burst-often": Cause(BURSTS, "between", 0.3, every=4),
    "burst-optimizer": Cause(BURSTS, "after", 0.4, every=5),
    "burst-forward": Cause(BURSTS, "forward", 0.4, every=5),
    "burst-backward": Cause(BURSTS, "backward", 0.4, burns=True, every=5),
    "loader-sleep-all": Cause(STARVED, "between", 0.15, all_ranks=True),
    "loader-sleep-all-long": Cause(STARVED, "between", 0.4, all_ranks=True),
    "loader-burn-all": Cause(STARVED, "between", 0.15, burns=True, all_ranks=True),
    "loader-turns-all": Cause(STARVED, "between", 0.15, all_ranks=True, turns=True),
    "loader-sleep-all-3-ranks": Cause(STARVED, "between", 0.15, all_ranks=True, ranks=3),
    "turns": Cause((("uneven", None), ("none", None)), "forward", 0.03, all_ranks=True, turns=True),
    "turns-3-ranks": Cause((("uneven", None), ("none", None)), "forward", 0.03, all_ranks=True, turns=True, ranks=3),
    "bytes-shared-memory": Cause((("communication", "-int8"), ("none", None)), parameters=16),
    "bytes-shared-memory-3-ranks": Cause((("communication", "-int8"), ("none", None)), parameters=8, ranks=3),
    "bytes-network": Cause((("communication", "int8"),), parameters=4, rate="400mbit"),
    "bytes-network-slow": Cause((("communication", "int8"),), parameters=1, rate="50mbit"),
    "neighbour": Cause((("rank", "core"), ("host", "core")), hogs=1, pinned=True),
    "neighbours": Cause((("rank", "core"), ("host", "core")), hogs=2, pinned=True),
    "neighbours-of-all": Cause((("host", "core"), ("rank", "core")), hogs=3),
    "neighbours-and-bytes": Cause((("host", "core"), ("rank", "core")), hogs=3, parameters=8),
    "quota": Cause((("rank", "quota"), ("host", "quota")), quota=0.3),
    "quota-of-all": Cause((("host", "quota"), ("rank", "quota")), quota=0.3, all_ranks=True),
    "quiet": Cause((("none", None), ("uneven", None))),
}


@contextlib.contextmanager
def _machine(cause: Cause, rank: int) -> Iterator[None]:
    """What is done to this rank's process from outside."""
    cores = sorted(os.sched_getaffinity(0))
    groups = Path("/sys/fs/cgroup/cpu")
    limited = cause.quota > 0 and (cause.all_ranks or rank == SLOW)
    group = groups / f"ringdp-verdicts-{os.getpid()}"
    try:
        if cause.pinned:
            os.sched_setaffinity(0, [cores[rank % len(cores)]])
        if limited:
            group.mkdir()
            (group / "cpu.cfs_quota_us").write_text(str(int(cause.quota * 100_000)))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        os.sched_setaffinity(0, cores)
        if limited:
            (groups / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def run_rank(cause: Cause, seed: int) -> dict[str, Any]:
    """One run on one rank; the verdict. Called by all ranks."""
    import torch

    import ringdp

    rank = ringdp.rank()
    chance = random.Random(1000 * seed + rank)
    step = 0

    def spend(phase: str) -> None:
        if phase != cause.phase or cause.seconds == 0 or not (cause.all_ranks or rank == SLOW) or step % cause.every:
            return
        seconds = chance.expovariate(1 / cause.seconds) if cause.turns else cause.seconds
        if not cause.burns:
            time.sleep(seconds)
            return
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            spend("backward")
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
            self.more = torch.nn.Parameter(torch.zeros(max(cause.parameters << 20, 1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spend("forward")
            return self.layers(InBackward.apply(x.requires_grad_())) + self.more[:1]

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            spend("after")
            super().step(closure)

    with _machine(cause, rank):
        torch.manual_seed(seed)
        model = ringdp.RingDP(Model(), guard=0)
        optimizer = Optimizer(model.parameters(), 1e-3)
        for number in range(1, STEPS + 1):
            step = number
            batch = torch.randn(ROWS, WIDTH)
            spend("between")
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        model.module.eval()
        model(torch.randn(1, WIDTH)).sum().backward()  # whose forward takes the report of step 30
        found = model.report().verdict
        ringdp.monitored_barrier()
    return {} if found is None else dataclasses.asdict(found)


def run_all(names: list[str], seed: int) -> list[dict[str, Any]]:
    """Each cause once, on ranks that go on from one to the next; the verdicts. Called by all ranks."""
    return [run_rank(CAUSES[name], seed) for name in names]


def outcome(cause: Cause, verdict: Mapping[str, Any], *, alone: bool = False) -> str:
    """What the verdict is worth: "right", "silent", "cores" or "wrong"."""
    if not verdict:
        return "silent"
    kind, named, remedy = verdict["kind"], verdict["cause"], verdict["remedy"]
    for wanted, of_it in cause.wanted:
        if kind == wanted and of_it in (None, named):
            return "right" if kind != "rank" or verdict["rank"] == SLOW or cause.all_ranks else "wrong"
        if kind == wanted and of_it in ("int8", "-int8") and ("int8" in remedy) == (of_it == "int8"):
            return "right"
    if kind in ("none", "uneven"):
        return "silent"
    if named in ("core", "speed") and not alone:
        return "cores"
    return "wrong"


def _place(cause: Cause) -> tuple[int, str, int, bool]:
    """Causes of one place run in the same processes."""
    return cause.ranks, cause.rate, cause.hogs, cause.pinned


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures so far, after each run of all causes."""
    import ringdp

    places: dict[tuple[int, str, int, bool], list[str]] = defaultdict(list)
    for name in args.causes:
        places[_place(CAUSES[name])].append(name)
    rows = []
    for seed in range(args.runs):
        for (ranks, rate, hogs, pinned), names in places.items():
            os.environ |= {"OMP_NUM_THREADS": "1", "RINGDP_TRANSPORT": "tcp" if rate else "auto"}
            os.environ.pop("RINGDP_RATE", None)
            if rate:
                os.environ["RINGDP_RATE"] = rate
            cores = sorted(os.sched_getaffinity(0))
            with busy_processes(hogs, cores=cores[1:2] if pinned else ()):
                verdicts = ringdp.launch(run_all, (names, seed), nprocs=ranks)[0]
            for name, verdict in zip(names, verdicts, strict=True):
                what = outcome(CAUSES[name], verdict, alone=args.alone)
                rows.append({"cause": name, "outcome": what, "load": os.getloadavg()[0], "verdict": verdict})
                if what in ("wrong", "silent"):
                    sys.stderr.write(f"{name}: {what}: {verdict.get('text')} Remedy: {verdict.get('remedy')}.\n")
        yield session.result_of("verdicts", None, rows=rows)


def report(result: dict[str, Any]) -> str:
    by_cause: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        by_cause[row["cause"]].append(row)
    lines = []
    total: Counter[str] = Counter()
    for cause, rows in by_cause.items():
        counts = Counter(row["outcome"] for row in rows)
        total += counts
        said = Counter(
            " ".join(filter(None, (row["verdict"].get("kind"), row["verdict"].get("cause")))) for row in rows
        )
        named = ", ".join(f"{count} {what or 'nothing'}" for what, count in said.most_common())
        lines.append([cause, *(str(counts[one]) for one in ("right", "silent", "cores", "wrong")), named])
    runs = sum(total.values())
    loads = sorted(row["load"] for row in result["rows"])
    title = (
        f"{len(by_cause)} causes, {runs} runs; wrong: {total['wrong']} ({total['wrong'] / max(runs, 1):.1%});"
        f" load {loads[0]:.1f} to {loads[-1]:.1f}, in the middle {loads[len(loads) // 2]:.1f}"
    )
    return session.text(result, title, table(["cause", "right", "silent", "cores", "wrong", "named"], lines))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--causes", default=",".join(CAUSES), help=f"of {', '.join(CAUSES)}")
    parser.add_argument("--runs", type=int, default=20, help="of each cause (default 20)")
    parser.add_argument("--alone", action="store_true", help="no other program runs: a busy core is wrong, too")


def check(args: argparse.Namespace) -> None:
    args.causes = session.chosen(args.causes, list(CAUSES))
    session.at_least(1, runs=args.runs)
