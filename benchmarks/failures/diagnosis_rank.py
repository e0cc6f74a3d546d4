"""One rank of diagnosis.py: trains a small model with a cause injected, and writes what the report says on rank 0."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

QUIET_STEPS = 20
STEPS = 31  # reports come after 10 and 30, and are there a step later
SLEEP_S = 0.1


def main(settings: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    cause, slow = settings["cause"], rank == settings["slow"]
    if "cores" in settings:
        os.sched_setaffinity(0, [settings["cores"][rank]])
    import torch

    import ringdp

    ringdp.init()
    torch.manual_seed(rank)
    width = 512
    file: mmap.mmap | None = None

    class SleepInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(SLEEP_S if slow and cause == "backward" else 0)
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[torch.nn.Module] = [torch.nn.Linear(width, width) for _ in range(4)]
            self.layers = torch.nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(SLEEP_S if slow and cause == "forward" else 0)
            if file is not None:
                sum(file[at] for at in range(0, len(file), 4096))
            return self.layers(SleepInBackward.apply(x.requires_grad_()))

    if slow and cause == "quota":
        Path(settings["group"], "cgroup.procs").write_text(str(os.getpid()))
    model = ringdp.RingDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if slow and cause == "memory":
        Path(settings["group"], "cgroup.procs").write_text(str(os.getpid()))
    if "files" in settings:
        file = _map(settings["files"][rank])
    rows = 64 if cause == "link" else 512
    verdicts: list[dict[str, Any]] = []
    seen = 0
    steps = 11 + QUIET_STEPS * (settings["windows"] - 1) if cause in ("quiet", "loaded") else STEPS
    for step in range(1, steps + 2):
        batch = torch.randn(rows, width)
        time.sleep(SLEEP_S if slow and cause == "data" else 0)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        # It takes a while, of rank 0 alone: asked in each step, it would be what makes rank 0 slow.
        report = model.report() if rank == 0 and step % QUIET_STEPS == 11 else None
        if report is not None and report.verdict is not None and report.step != seen:
            seen = report.step
            verdicts.append({"step": seen, **dataclasses.asdict(report.verdict)})
            last = str(report)
    if slow and "group" in settings:  # so that the group can be removed
        Path(settings["group"]).parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
    if rank == 0:
        Path(settings["folder"], "found.json").write_text(json.dumps({"verdicts": verdicts, "report": last}))
    ringdp.shutdown()


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
