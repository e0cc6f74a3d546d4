"""What each rank of `auto_compression.py` does."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
import torch
import torch.distributed as dist


class Trained:
    """A model in RingDP, and how long its steps take."""

    def __init__(self, name: str, rank: int, group: dist.ProcessGroup, idle_s: float, **arguments: Any) -> None:
        import ringdp

        self.task = models.make(name, rank=rank)
        self.module = ringdp.RingDP(self.task.module, process_group=group, **arguments)
        self.optimizer = torch.optim.SGD(self.task.module.parameters(), lr=self.task.learning_rate)
        self.idle_s = idle_s

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.module, self.task.batch)
        if self.idle_s:
            loss.register_hook(lambda gradient: time.sleep(self.idle_s))
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - began


def run_rank(path: str) -> None:
    joined = session.join(path)
    import ringdp  # noqa: F401  # registers the backend

    group = dist.new_group(backend="ring")
    settings = joined.settings
    auto = Trained(
        settings["model"], joined.rank, group, settings["idle_s"], compression="auto", allow=settings["allow"]
    )
    seen: list[tuple[float, int, str]] = []

    def note() -> None:
        for one in auto.module.compression_stats().decisions[len(seen) :]:
            seen.append((time.time(), one.step, one.reason))
            if joined.rank == 0:
                print(f"… step {one.step}: {one.reason}", file=sys.stderr, flush=True)

    if settings["what"] == "follow":
        result = follow(auto, settings["seconds"], note)
    else:
        exact = Trained(settings["model"], joined.rank, group, settings["idle_s"])
        result = compare(exact, auto, settings["blocks"], settings["block_steps"], note)
    joined.deliver(result | {"decisions": seen})


def follow(auto: Trained, seconds: float, note: Any) -> dict[str, Any]:
    begin, steps = time.time(), list[tuple[float, float]]()
    go_on = torch.ones(1)
    while bool(go_on):
        steps.append((time.time(), auto.step()))
        note()
        go_on.fill_(float(time.time() - begin < seconds))
        dist.broadcast(go_on, 0)
    return {"steps": steps}


def compare(exact: Trained, auto: Trained, blocks: int, block_steps: int, note: Any) -> dict[str, Any]:
    for one in (exact, auto):
        for _ in range(3):
            one.step()
    times: dict[str, list[float]] = {"exact_s": [], "auto_s": []}
    for block in range(blocks):
        order = [("exact_s", exact), ("auto_s", auto)]
        for name, one in order if block % 2 == 0 else order[::-1]:
            dist.barrier()
            one.step()  # the caches still hold the other's
            began = time.perf_counter()
            for _ in range(block_steps):
                one.step()
            times[name].append((time.perf_counter() - began) / block_steps)
            note()
    return times
