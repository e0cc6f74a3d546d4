"""`rounds.py overlap`: what streaming rounds cost beside computing, on ranks that have met already."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.lib.measure import interval, table
from benchmarks.compression.quality_runs import gpt_loss, gpt_options
from torch import nn

import ringdp
from examples.char_lm import GPT

STREAMING: dict[str, Any] = {"fragments": 4, "delay": 5}


def large_gpt(width: int = 384, layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return GPT(96, gpt_options(width=width, layers=layers, heads=6, context=64))


def overlap(given: dict[str, Any], group: Any, rank: int, world_size: int) -> dict[str, Any]:
    """Seconds of a step alone and with rounds, in alternating blocks, of the slower rank; and its processor time, which
    other programs do not change much."""
    alone, shared = large_gpt(given["width"], given["layers"]), large_gpt(given["width"], given["layers"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-4) for one in (alone, shared)]
    rounds = ringdp.DiLoCo(
        shared, optimizers[1], every=given["every"], compression=given["compression"], process_group=group, **STREAMING
    )
    draw = torch.Generator().manual_seed(rank)
    ends = torch.zeros(1, dtype=torch.float64)

    def block(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
        began, computed = time.perf_counter(), time.process_time()
        for _ in range(steps):
            x = torch.randint(96, (given["batch"], 65), generator=draw)
            optimizer.zero_grad()
            gpt_loss(module, x).backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps, (time.process_time() - computed) / steps

    for module, optimizer in zip((alone, shared), optimizers, strict=True):
        block(module, optimizer, 2)
    dist.all_reduce(ends, group=group)
    before = rounds.stats()
    each: list[list[float]] = []  # seconds alone and with rounds, processor time of both
    steps = -(-given["every"] // 2)
    for turn in range(given["blocks"]):
        mine = [0.0] * 4
        for which in (0, 1) if turn % 2 else (1, 0):
            mine[which], mine[which + 2] = block((alone, shared)[which], optimizers[which], steps)
        told = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        each.append(told.tolist())
    after = rounds.stats()
    rounds.finish()
    waited = (after.waited_s - before.waited_s) / (steps * len(each))
    ended = rounds.stats()
    return {
        "alone": [one[0] for one in each],
        "with rounds": [one[1] for one in each],
        "cpu alone": [one[2] for one in each],
        "cpu with rounds": [one[3] for one in each],
        "waited_s": waited,
        "less": ended.bytes_of_exact_steps / max(1, ended.bytes_sent),
        "steps": ended.steps,
        "parameters": sum(p.numel() for p in alone.parameters()),
        "ranks": world_size,
    }


def report_overlap(result: dict[str, Any]) -> str:
    row, settings = result["rows"][0], result["settings"]
    alone, shared = row["alone"], row["with rounds"]
    ratio, half = interval([b / a for a, b in zip(alone, shared, strict=True)])
    code = settings["compression"] or "exact"
    cpu, cpu_half = interval([b / a for a, b in zip(row["cpu alone"], row["cpu with rounds"], strict=True)])
    rows = [
        ["alone", f"{statistics.median(alone) * 1e3:.1f} ms", "1", "1"],
        [f"every {settings['every']}, streaming, {code}", f"{statistics.median(shared) * 1e3:.1f} ms",
         f"{ratio:.3f} ± {half:.3f}", f"{cpu:.3f} ± {cpu_half:.3f}"],
    ]  # fmt: skip
    wait = row["waited_s"] / statistics.median(shared)
    words = f"{row['parameters']:,} parameters, {result['where']}; exposed wait {100 * wait:.2f} % of a step"
    sent = f"{row['steps']} steps and the last round sent 1/{row['less']:.0f} of the bytes of exact ones"
    columns = ["", "a step of the slower rank", "ratio, 95 %", "processor time, ratio"]
    return words + f"; {sent}\n\n" + table(columns, rows)
