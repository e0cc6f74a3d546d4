"""200 random programs, for changes of the reducer that must change nothing: what they did is recorded, and compared.

    python -m tests.train.corpus record build/corpus.json       # at the commit before
    python -m tests.train.corpus compare build/corpus.json      # after the change: the programs that differ

Of each program and rank: the bits of all gradients after each backward, the operations in the order in which they were
called (kind, name, type, elements), the class of the error, and the weights at the end. Every eighth program is an
elastic job, whose ranks are killed; its operations depend on when a loss is noticed, and are left out. Bits are those
of one machine and one build of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import importlib
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

import ringdp
from ringdp import _C
from tests.fault import elastic_jobs
from tests.fault.elastic_oracle import STEPS as ELASTIC_STEPS
from tests.fault.elastic_oracle import live
from tests.fault.faults import PHASES, Faults
from tests.train import models
from tests.train.harness import folder, run_ranks

PROGRAMS, ELASTIC, STEPS = 200, 25, 5
THREADED = ("topk", "powersgd")
ACCIDENTS = (
    "none",
    "raises in forward",  # of all ranks, after a layer
    "raises in backward",
    "no backward",  # one rank's
    "twice",  # the graph is kept, and gone through again
    "frozen apart",  # on one rank
    "not finite",
    "another batch",  # one rank's backward goes through two forwards
)


@dataclass(frozen=True)
class Program:
    world: int
    model: str
    unused: bool | None
    static_graph: bool
    skip_unused: bool
    branches: bool
    caps: Any
    own_gradients: bool
    compression: Any
    later: bool
    weight: str | None
    hook: str
    micro_batches: int
    freeze: int
    replace: int
    evaluation: bool
    join: bool
    scaler: bool
    reproducible: bool
    double: bool
    guard: int
    set_to_none: bool
    accident: str


def draw(number: int) -> Program:
    some = random.Random(number)

    def now_and_then(chance: float) -> bool:
        return some.random() < chance

    compression = some.choice([None, None, None, "int8", "int4", "bf16", "topk", "powersgd"])
    hook = some.choice(["", "", "", "allreduce", "fp16"]) if compression is None else ""
    return Program(
        world=some.choice([1, 2, 2, 3]),
        model=some.choice(sorted(models.MODELS)),
        unused=some.choice([None, None, True, True, False]),
        static_graph=now_and_then(0.1),
        skip_unused=now_and_then(0.15),
        branches=now_and_then(0.4),
        caps=some.choice([None, 0.001, 0.004, [0.004, 0.001]]),
        own_gradients=now_and_then(0.2),
        compression=compression,
        later=now_and_then(0.1) and not hook,
        weight=some.choice([None, None, "samples", "call"]),
        hook=hook,
        micro_batches=some.choice([1, 1, 2, 3]),
        freeze=some.choice([-1, -1, 1, 3]),
        replace=some.choice([-1, -1, -1, 2]),
        evaluation=now_and_then(0.2),
        join=now_and_then(0.15),
        scaler=now_and_then(0.15),
        reproducible=now_and_then(0.2),
        double=now_and_then(0.1),
        guard=some.choice([0, 2]),
        set_to_none=now_and_then(0.7),
        accident=some.choice([*ACCIDENTS, *["none"] * 6]),
    )


class Branches(nn.Module):
    """Its rank's branch alone has a gradient."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.branches = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.broken = ""

    def forward(self, x: Tensor, branch: int) -> Tensor:
        hidden: Tensor = self.trunk(x)
        if branch >= 0:
            hidden = hidden + self.branches[branch](hidden)
        if self.broken == "forward":
            raise ValueError("of the forward")
        if self.broken == "backward":
            hidden.register_hook(_raise)
        return hidden


def _raise(gradient: Tensor) -> Tensor:
    raise ValueError("of the backward")


def bits(tensors: Sequence[Tensor | None]) -> str:
    sha = hashlib.sha256()
    for one in tensors:
        if one is None:
            sha.update(b"none")
        else:
            sha.update(repr((one.dtype, tuple(one.shape))).encode())
            flat = one.detach().contiguous().reshape(-1)
            sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return sha.hexdigest()[:16]


def run(number: int, place: str) -> dict[str, Any]:
    """On a rank."""
    program, rank = draw(number), int(os.environ["RANK"])
    torch.manual_seed(number)
    torch.set_num_threads(1)
    os.environ["RINGDP_REPORT_EVERY"] = "20"
    ringdp.init(init_method=f"file://{place}", rank=rank, world_size=program.world, timeout=20, device="cpu")
    told: dict[str, Any] = {"gradients": [], "error": "", "weights": ""}
    module = Branches(models.build(program.model))
    try:
        train(program, module, rank, told["gradients"])
    except Exception as error:
        told["error"] = type(error).__name__
    finally:
        told["weights"] = bits(list(module.parameters()))
        told["operations"] = [f"{one.kind} {one.op} {one.name} {one.dtype} {one.count}" for one in _C.operations()]
        if program.compression in THREADED:  # buckets' operations are called by a thread, beside those of the reducer
            told["operations"].sort()
        if told["error"]:  # buckets may be on their way, and either rank may be first to see it
            del told["operations"], told["gradients"][-1:], told["weights"]
        ringdp.shutdown()
    return told


def plain(text: str) -> str:
    """Without what another run has otherwise: times, ports, paths, processes."""
    for pattern in (
        r"\S*/\S+",
        r"[0-9.]+(?:-[0-9.]+)? ?(?:ms|s)\b",
        r"\b[0-9]{4,}\b",
        r"0x[0-9a-f]+",
        r"\[[0-9a-f]+\]",
    ):
        text = re.sub(pattern, "…", text)
    return text[:600]


def train(program: Program, module: Branches, rank: int, gradients: list[str]) -> None:
    named: dict[str, Any] = {
        "find_unused_parameters": program.unused,
        "gradient_as_bucket_view": not program.own_gradients,
    }
    if program.static_graph:
        named["static_graph"] = True
    if program.skip_unused:
        named |= {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = ringdp.RingDP(
        module,
        bucket_cap_mb=program.caps,
        compression=program.compression,
        weight=program.weight,
        reproducible=program.reproducible,
        reduce_dtype=torch.float64 if program.double else None,
        guard=program.guard,
        **named,
    )
    if program.hook == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif program.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    scaler = ringdp.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if program.scaler else None
    steps = STEPS - (rank if program.join else 0)
    joined: contextlib.AbstractContextManager[Any] = Join([model]) if program.join else contextlib.nullcontext()
    with joined:
        for step in range(steps):
            if step == program.freeze:
                module.branches.requires_grad_(False)
            if step == program.replace:
                module.branches[1] = copy.deepcopy(module.branches[0])
                optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
            if program.later and step == 2:
                model.set_compression("int8")
            if program.evaluation:
                with torch.no_grad():
                    model.eval()(models.batch(step, 9)[0], -1)
                model.train()
            accident = program.accident if step == 3 else "none"
            one_step(program, model, optimizer, scaler, rank, step, accident, gradients)


def one_step(
    program: Program,
    model: ringdp.RingDP,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    rank: int,
    step: int,
    accident: str,
    gradients: list[str],
) -> None:
    module = model.module
    branch = rank if program.branches and step != 1 else -1
    if accident == "frozen apart" and rank == 0:
        module.branches[2].requires_grad_(False)
    module.broken = accident.removeprefix("raises in ") if accident.startswith("raises") else ""
    for number in range(program.micro_batches):
        last = number == program.micro_batches - 1
        x, _ = models.batch(10 * step + number, rank, size=4 + (rank + step) % 3)
        if accident == "not finite" and rank == program.world - 1:
            x = x * float("inf")
        with contextlib.nullcontext() if last else model.no_sync():
            if program.weight == "call":
                model.set_weight(len(x))
            try:
                loss = model(x, branch).float().square().mean()
                if accident == "another batch" and rank == 0:
                    loss = loss + model(x * 0.5, branch).float().square().mean()
                if accident == "no backward" and rank == 0:
                    continue
                loss = loss if scaler is None else scaler.scale(loss)
                loss.backward(retain_graph=accident == "twice")
                if accident == "twice":
                    loss.backward()
            except ValueError as error:
                if not str(error).startswith("of the "):
                    raise
                gradients.append(str(error))
    gradients.append(bits([one.grad for one in module.parameters()]))
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=program.set_to_none)


def elastic(number: int, world: int = 4) -> dict[str, Any]:
    """A job whose ranks are killed."""
    some = random.Random(number)
    faults, left = Faults(), list(range(world))
    for _ in range(some.choice([1, 1, 2])):
        rank = left.pop(some.randrange(len(left)))
        faults = faults.kill(rank, some.choice(list(ELASTIC_STEPS)), some.choice(PHASES))
    options: dict[str, Any] = {"uneven": some.random() < 0.2, "accumulate": some.random() < 0.3}
    options["branches"] = not options["accumulate"] and some.random() < 0.3
    options["hook"] = some.choice(["", "", "allreduce", "builtin fp16"])
    chosen: dict[str, Any] = {"gradient_as_bucket_view": some.random() < 0.7}
    if not options["hook"]:
        chosen["compression"] = some.choice([None, None, "int8", "bf16"])
    if options["branches"]:
        chosen["find_unused_parameters"] = some.choice([None, True])
    if options["uneven"]:
        chosen["weight"] = "samples"
    with tempfile.TemporaryDirectory(prefix="ringdp-corpus-") as place:
        told = live(Path(place), world, faults, elastic_jobs.train, options=chosen, **options)
    return {
        str(rank): {
            "gradients": [digest(one) for one in of.gradients],
            "weights": [digest(one) for one in of.parameters],
        }
        for rank, of in told.items()
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _importable() -> Any:
    """`run` of the module that the ranks can import."""
    return importlib.import_module("tests.train.corpus").run


def results(numbers: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in numbers:
        print(f"\rprogram {number}", end="", file=sys.stderr, flush=True)
        try:
            if number % (PROGRAMS // ELASTIC) == 0:
                found[str(number)] = elastic(number)
                continue
            with mock.patch.dict(os.environ):
                world = draw(number).world
                place = os.path.join(folder(world), f"corpus-{random.getrandbits(64):x}")
                told = run_ranks(_importable(), number, place, world_size=world, backend=None, timeout_s=60)
            found[str(number)] = {str(rank): one for rank, one in enumerate(told)}
        except AssertionError as error:
            found[str(number)] = {"all": {"error": plain(str(error))}}
    print(file=sys.stderr)
    return found


Recorded = dict[str, dict[str, dict[str, list[Any]]]]
"""By program, rank and key, all values that were seen: where ranks race to an error, either may be first."""


def observe(recorded: Recorded, found: dict[str, Any]) -> set[int]:
    """Adds what was found. Returns the programs that gave something new."""
    new = set()
    for number, ranks in found.items():
        for rank, told in ranks.items():
            for key, value in told.items():
                seen = recorded.setdefault(number, {}).setdefault(rank, {}).setdefault(key, [])
                if value not in seen:
                    seen.append(value)
                    new.add(int(number))
    return new


def differences(recorded: Recorded, now: dict[str, Any]) -> list[str]:
    """One line for each value that was not seen before."""
    lines: list[str] = []
    for number, ranks in now.items():
        for rank, told in ranks.items():
            for key, value in told.items():
                seen = recorded[number].get(rank, {}).get(key, [])
                if value not in seen:
                    asked = "elastic" if int(number) % (PROGRAMS // ELASTIC) == 0 else asdict(draw(int(number)))
                    lines.append(f"program {number}, rank {rank}, {key}: {value}, before {seen} ({asked})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.train.corpus", description=__doc__)
    parser.add_argument("action", choices=("record", "add", "compare"), help="add: further runs to a file")
    parser.add_argument("file", type=Path)
    parser.add_argument("--programs", type=int, nargs="+", default=list(range(PROGRAMS)), metavar="NUMBER")
    arguments = parser.parse_args()
    numbers: Sequence[int] = sorted(arguments.programs)
    recorded: Recorded = {} if arguments.action == "record" else json.loads(arguments.file.read_text())
    if arguments.action == "compare":
        lines = differences(recorded, results(numbers))
        print("\n".join(line[:1500] for line in lines))
        print(f"{len(numbers)} programs compared, {len(lines)} values differ")
        sys.exit(bool(lines))
    if arguments.action == "record":
        observe(recorded, results(numbers))
    vary = set(numbers)
    for _ in range(5):
        vary = observe(recorded, results(sorted(vary)))
    arguments.file.write_text(json.dumps(recorded, indent=1))
    raised = sum(any(told.get("error", [""]) != [""] for told in ranks.values()) for ranks in recorded.values())
    print(f"{len(recorded)} programs recorded, of which {raised} end in an error")


if __name__ == "__main__":
    main()
