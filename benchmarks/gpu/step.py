"""A training step on one GPU over NCCL: RingDP beside torch's DDP, which is what one rank can tell of them.

    python -m benchmarks gpu_step                        ResNet-50 and GPT-2, then the wrappers alone, then AMP
    python -m benchmarks gpu_step --models gpt2 --json out.json

Three tables. `step`: a whole training step, blocks of steps alternating between the modes, medians. `host`: how long
the host is busy with a backward whose gradients cost nothing, beyond the same without a wrapper: hooks, buckets,
launches; in both, DDP's gradients are views of its buckets as RingDP's are. `amp`: what the GPU does after such a
backward with loss scaling, counted by the profiler: kernels and copies, and the passes over the gradients their time
comes to, one pass being a multiplication of all gradients in place. Both wrappers must train the same model before its
step is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringdp
from benchmarks.gpu.models import MODULES, GradientsAlone, make
from benchmarks.lib import session
from benchmarks.lib.measure import format_time, table
from benchmarks.lib.ranks import Failed, Unavailable

MODES = ("bare", "ddp", "ringdp")
LARGEST_ERROR = 1e-2  # of the parameters' change in three steps: TF32 and atomics round as they like


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODULES), help=f"of {', '.join(MODULES)}")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of steps for each mode (default 9)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block (default 10)")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, tuple(MODULES))


def wrapped(module: nn.Module, mode: str, *, view: bool = True) -> nn.Module:
    if mode == "bare":
        return module
    wrapper: Any = DistributedDataParallel if mode == "ddp" else ringdp.RingDP
    device = next(module.parameters()).device
    inputs = {} if isinstance(module, GradientsAlone) else {"device_ids": [device]}  # DDP takes no forward without
    model: nn.Module = wrapper(module, gradient_as_bucket_view=view, **inputs)
    return model


def alternate(steps: dict[str, Callable[[], float]], rounds: int, count: int) -> dict[str, float]:
    """The median seconds of each, in blocks that take turns; the first step of a block does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps[name]()
            seconds[name] += [steps[name]() for _ in range(count)]
    return {name: statistics.median(values) for name, values in seconds.items()}


# --- a whole step


def trained_alike(name: str, device: torch.device) -> None:
    """Raises Failed where three steps of DDP and RingDP end with different parameters."""
    ends = []
    for mode in ("ddp", "ringdp"):
        task = make(name, device)
        begin = [p.detach().clone() for p in task.module.parameters()]
        model = wrapped(task.module, mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)
        for _ in range(3):
            optimizer.zero_grad()
            task.loss(model, task.batch).backward()
            optimizer.step()
        ends.append([p.detach() - b for p, b in zip(task.module.parameters(), begin, strict=True)])
    error = sum(float((a - b).norm()) ** 2 for a, b in zip(*ends, strict=True)) ** 0.5
    size = sum(float(a.norm()) ** 2 for a in ends[0]) ** 0.5
    if not error <= LARGEST_ERROR * size:
        raise Failed(f"{name}: DDP and RingDP trained different models ({error / size:.2g}); its step is not timed")


def whole_step(name: str, mode: str, device: torch.device) -> Callable[[], float]:
    task = make(name, device)
    model = wrapped(task.module, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=0.9)

    def step() -> float:
        torch.cuda.synchronize(device)
        begin = perf_counter()
        optimizer.zero_grad()
        task.loss(model, task.batch).backward()
        optimizer.step()
        torch.cuda.synchronize(device)
        return perf_counter() - begin

    return step


def measure_step(name: str, device: torch.device, rounds: int, count: int) -> dict[str, Any]:
    trained_alike(name, device)
    steps = {mode: whole_step(name, mode, device) for mode in MODES}
    return {"model": name} | alternate(steps, rounds, count)


# --- the wrapper alone


def host_time(name: str, mode: str, device: torch.device) -> Callable[[], float]:
    model = wrapped(GradientsAlone(name, device), mode)

    def step() -> float:
        model.zero_grad()
        torch.cuda.synchronize(device)
        begin = perf_counter()
        model().backward()
        return perf_counter() - begin

    return step


def measure_host(name: str, device: torch.device, rounds: int, count: int) -> dict[str, Any]:
    steps = {mode: host_time(name, mode, device) for mode in MODES}
    return {"model": name} | alternate(steps, rounds, 3 * count)


# --- loss scaling

AMP_MODES = {
    "no scaling": ("bare", False, False),
    "ddp, torch's scaler": ("ddp", True, False),
    "ddp with views, torch's scaler": ("ddp", True, True),
    "ringdp, its scaler": ("ringdp", True, False),
    "ringdp with views, its scaler": ("ringdp", True, True),
}


def scaled_step(name: str, mode: str, scaled: bool, view: bool, device: torch.device) -> Callable[[], None]:
    model = wrapped(GradientsAlone(name, device), mode, view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    amp = ringdp.amp if mode == "ringdp" else torch.amp
    scaler: Any = amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model()).backward()
        scaler.unscale_(optimizer)  # as a user does who clips gradients: a fused optimizer would do it in its own pass
        scaler.step(optimizer)
        scaler.update()

    return step


def on_device(step: Callable[[], None], device: torch.device, count: int = 5) -> tuple[float, float]:
    """How many kernels and copies a step queues, and the seconds they take."""
    for _ in range(3):
        step()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize(device)
    done = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return len(done) / count, sum(event.time_range.elapsed_us() for event in done) / count / 1e6


def measure_amp(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    gradients = GradientsAlone(name, device).gradients
    _, one_pass_s = on_device(lambda: torch._foreach_mul_(gradients, 1.0), device)
    for words, (mode, scaled, view) in AMP_MODES.items():
        kernels, busy_s = on_device(scaled_step(name, mode, scaled, view, device), device)
        yield {"model": name, "mode": words, "kernels": kernels, "busy_s": busy_s, "passes": busy_s / one_pass_s}
        torch.cuda.empty_cache()


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was measured so far, after each row. Raises Unavailable, and Failed once the rest was measured."""
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA device")
    ringdp.init(rank=0, world_size=1)
    try:
        device = ringdp.device()
        if "cuda:nccl" not in dist.get_backend_config():
            raise Unavailable(f"CUDA tensors go over {dist.get_backend()} here, and not over NCCL")
        about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "step": [], "host": [], "amp": []}
        result = session.result_of("gpu_step", None, **about)
        different: list[str] = []
        for name in args.models:
            try:
                result["step"].append(measure_step(name, device, args.rounds, args.steps))
            except Failed as error:
                different.append(str(error))
            torch.cuda.empty_cache()
            result["host"].append(measure_host(name, device, args.rounds, args.steps))
            yield result
        for row in measure_amp(args.models[-1], device):
            result["amp"].append(row)
            yield result
        if different:
            raise Failed("; ".join(different))
    finally:
        ringdp.shutdown()


def report(result: dict[str, Any]) -> str:
    lines = ["step: the whole of it"]
    rows = [
        [row["model"], *(format_time(row[mode]) for mode in MODES), f"{row['ringdp'] / row['ddp']:.4f}", "1.01"]
        for row in result["step"]
    ]
    lines += [table(["model", *MODES, "ringdp / ddp", "reach"], rows), "", "host: backward beyond the bare one's"]
    rows = []
    for row in result["host"]:
        ddp, ours = row["ddp"] - row["bare"], row["ringdp"] - row["bare"]
        rows.append([row["model"], format_time(row["bare"]), format_time(ddp), format_time(ours)])
        rows[-1] += [f"{ours / ddp:.3f}", "1.1"]
    lines += [table(["model", "bare", "ddp", "ringdp", "ringdp / ddp", "reach"], rows), "", "amp: on the GPU, per step"]
    rows = []
    for row in result["amp"]:
        rows.append([row["mode"], f"{row['kernels']:.0f}", format_time(row["busy_s"]), f"{row['passes']:.2f}"])
    lines.append(table(["mode", "kernels and copies", "time", "passes over the gradients"], rows))
    return session.text(result, f"one rank over NCCL on {result['gpu']}", "\n".join(lines))
