"""What each rank of `step.py` does."""

from __future__ import annotations

import hashlib
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.goodput import interface_bytes
from benchmarks.lib.measure import Summary
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

MIN_STEPS, MAX_STEPS = 3, 200  # of one mode in one block
CHECKED_STEPS = 3
PHASES = ("step", "forward", "backward", "optimizer")


class WrongResult(RuntimeError):
    """A mode trained something else; its times would mean nothing."""


@dataclass
class Trainee:
    """One mode of one model on this rank, and what was measured of it."""

    task: models.Task
    module: nn.Module
    group: dist.ProcessGroup | None
    set_to_none: bool
    barrier: dist.ProcessGroup | None = None  # on which all ranks wait for each other after backward
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    block_medians_s: list[float] = field(default_factory=list)
    all_reduce_s: list[float] = field(default_factory=list)
    largest_error: float = 1e-2  # of a parameter's change, see Mode
    wire_bytes: int | None = 0
    lossy: bool = False  # what its buckets take alone would be another exchange
    steps: int = 0  # counted in sent_bytes
    sent_bytes: int = 0
    faults: int = 0  # of pages without a disk, in `steps`, by all threads of the process
    cpu_s: float = 0.0  # of all its threads, user and system

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.task.module.parameters(), lr=self.task.learning_rate)

    def step(self) -> tuple[float, tuple[float, ...]]:
        """One training step: the loss, and the seconds of each of PHASES."""
        start = perf_counter()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = self.task.loss(self.module, self.task.batch)
        forward_end = perf_counter()
        loss.backward()
        if self.barrier is not None:
            dist.all_reduce(torch.zeros(1), group=self.barrier)
        backward_end = perf_counter()
        self.optimizer.step()
        end = perf_counter()
        phases = (end - start, forward_end - start, backward_end - forward_end, end - backward_end)
        return loss.item(), phases


def run_rank(path: str) -> None:
    joined = session.join(path)
    groups = make_groups(joined.settings["modes"])
    rows = []
    for name in joined.settings["models"]:
        if joined.rank == 0:
            print(f"… {name}", file=sys.stderr, flush=True)
        rows += _one_model(joined, name, groups)
    joined.deliver(rows)


def make_groups(modes: Sequence[str]) -> dict[str, dist.ProcessGroup]:
    """A group of all ranks for each backend that the modes use."""
    groups: dict[str, dist.ProcessGroup] = {}
    for mode in modes:
        backend = models.MODES[mode].backend
        if backend and backend not in groups:
            if backend == "ring":
                import ringdp  # noqa: F401  # registers the backend
            groups[backend] = dist.new_group(backend=backend)
    return groups


def wrap(mode: models.Mode, module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """The module as that mode trains it: bare, in DDP or in RingDP."""
    if not mode.wrapper:
        return module
    if mode.wrapper == "RingDP":
        import ringdp

        compressor = mode.compressor if mode.compression else None
        weight = "call" if mode.weights else None
        model = ringdp.RingDP(
            module,
            process_group=group,
            compression=compressor,
            gradient_pool=mode.gradient_pool,
            weight=weight,
            bucket_cap_mb=mode.bucket_cap_mb(module),
        )
        if mode.weights:
            samples = 1000 + (dist.get_rank(group) if mode.weights == "unequal" else 0)
            model.register_forward_pre_hook(lambda wrapper, _: wrapper.set_weight(samples))
        return model
    wrapped = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=mode.gradient_as_bucket_view)
    if mode.hook == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    elif mode.hook == "powersgd":
        state = PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)  # 2 is the least it takes
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif mode.hook:
        from ringdp.hooks import ddp_hook

        wrapped.register_comm_hook(*ddp_hook(mode.hook, model=module, process_group=group))
    return wrapped


def wire_bytes(mode: models.Mode, module: nn.Module) -> int | None:
    """What the gradients of `module` take on the wire; None where no codec of the core says so."""
    parameters = dict(module.named_parameters())
    if mode.hook == "fp16":
        return 2 * sum(it.numel() for it in parameters.values())
    if not (mode.compression or mode.hook):
        return 4 * sum(it.numel() for it in parameters.values())
    if mode.hook == "powersgd":
        return None
    from ringdp import _C, compression

    chosen = compression.assign(mode.compressor or mode.hook, (), parameters, dict(module.named_modules()))
    if any(it is not None and not getattr(it, "native", None) for it in chosen.values()):
        return None
    total = 0
    for name, it in parameters.items():
        codec: str | None = getattr(chosen[name], "native", None)
        total += _C.codec_bytes(codec, it.numel()) if codec else 4 * it.numel()
    return total


def _one_model(joined: session.Joined, name: str, groups: dict[str, dist.ProcessGroup]) -> list[dict[str, Any]]:
    settings = joined.settings
    trainees = {}
    one_process = reference(name, joined)
    for word in settings["modes"]:
        mode, task = models.MODES[word], models.make(name, rank=joined.rank)
        group = groups.get(mode.backend)
        on_wire = wire_bytes(mode, task.module)
        trainee = Trainee(
            task,
            wrap(mode, task.module, group),
            group if mode.wrapper else None,
            settings["set_to_none"],
            group if mode.barrier else None,
        )
        trainee.largest_error, trainee.lossy = mode.largest_error, bool(mode.compression or mode.hook)
        trainee.wire_bytes = on_wire
        averaged = bool(mode.wrapper) or joined.world_size == 1
        check_training(f"{name} in mode {word}", trainee, one_process if averaged else None)
        trainees[word] = trainee
    counts = {mode: _agree_on_steps(one, settings["block_s"]) for mode, one in trainees.items()}
    modes = list(trainees)
    for turn in range(settings["rounds"]):
        for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
            _block(trainees[mode], counts[mode], settings["interface"])
    return [
        {"model": name, "mode": mode, "numel": one.task.numel, "wire_bytes": one.wire_bytes, **_over_ranks(joined, one)}
        for mode, one in trainees.items()
    ]


def _block(one: Trainee, count: int, interface: str | None) -> None:
    dist.barrier()
    sent_before = interface_bytes(interface)[1] if interface else 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    one.step()  # not timed: the caches still hold the mode before
    timed = [one.step()[1] for _ in range(count)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    one.faults += after.ru_minflt - before.ru_minflt
    one.cpu_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    dist.barrier()
    sent_after = interface_bytes(interface)[1] if interface else 0
    one.sent_bytes += sent_after - sent_before
    one.steps += count + 1
    for phase, seconds in zip(PHASES, zip(*timed, strict=True), strict=True):
        one.seconds[phase] += seconds
    one.block_medians_s.append(Summary.of([step for step, *_ in timed]).median_s)
    if one.group is not None and not one.lossy:
        one.all_reduce_s += _all_reduce_alone(one, max(MIN_STEPS, count // 3))


def _all_reduce_alone(one: Trainee, count: int) -> list[float]:
    """Seconds it takes to reduce the mode's own buckets, all issued at once, with nothing else going on."""
    buckets = [torch.zeros(size // 4) for size in bucket_bytes(one.module)]
    seconds = []
    for _ in range(count + 1):
        start = perf_counter()
        for work in [dist.all_reduce(bucket, group=one.group, async_op=True) for bucket in buckets]:
            work.wait()
        seconds.append(perf_counter() - start)
    return seconds[1:]


def bucket_bytes(module: nn.Module) -> list[int]:
    """Sizes of the buckets that DDP or RingDP reduces, in bytes, as they are once the first steps have shaped them."""
    assert isinstance(module, DistributedDataParallel)
    data = module._get_ddp_logging_data()
    text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(word) for word in text.split(",")]


def reference(name: str, joined: session.Joined) -> tuple[float, list[Tensor]]:
    """What CHECKED_STEPS steps on all ranks' batches in one process do.

    Returns this rank's first loss and how much each parameter changed.
    """
    tasks = [models.make(name, rank=rank) for rank in range(joined.world_size)]
    module = tasks[0].module
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=tasks[0].learning_rate)
    first_loss = 0.0
    for step in range(CHECKED_STEPS):
        optimizer.zero_grad()
        for rank, task in enumerate(tasks):
            loss = task.loss(module, task.batch)
            if step == 0 and rank == joined.rank:
                first_loss = loss.item()
            (loss / joined.world_size).backward()
        optimizer.step()
    return first_loss, [now.detach() - then for now, then in zip(module.parameters(), before, strict=True)]


def check_training(what: str, trainee: Trainee, reference: tuple[float, list[Tensor]] | None) -> None:
    """Take CHECKED_STEPS steps; the change of each parameter must be the reference's, and all ranks' bits the same."""
    named = dict(trainee.task.module.named_parameters())
    before = [parameter.detach().clone() for parameter in named.values()]
    losses = [trainee.step()[0] for _ in range(CHECKED_STEPS)]
    if reference is None:
        return
    first_loss, changes = reference
    if abs(losses[0] - first_loss) > 1e-5 * abs(first_loss):
        raise WrongResult(f"{what}: the first loss is {losses[0]}, not {first_loss}; nothing is timed")
    for (name, parameter), then, change in zip(named.items(), before, changes, strict=True):
        error = float((parameter.detach() - then - change).norm() / change.norm().clamp_min(1e-12))
        if not error <= trainee.largest_error:  # of a change that is itself near float32's resolution of the parameter
            raise WrongResult(f"{what}: {name} changed otherwise than in one process, by {error:.2%}; nothing is timed")
    digest = hashlib.sha256()
    for parameter in named.values():
        digest.update(parameter.detach().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if len(set(digests)) != 1:
        raise WrongResult(f"{what}: the ranks' parameters differ; nothing is timed")


def _agree_on_steps(one: Trainee, block_s: float) -> int:
    dist.barrier()
    step = session.slowest(min(one.step()[1][0] for _ in range(MIN_STEPS)))
    return max(MIN_STEPS, min(MAX_STEPS, int(block_s / step)))


def _over_ranks(joined: session.Joined, one: Trainee) -> dict[str, Any]:
    times = {phase: one.seconds[phase] for phase in PHASES} | {"all_reduce": one.all_reduce_s}
    summaries = {name: asdict(Summary.of(seconds)) for name, seconds in times.items() if seconds}
    mine = {
        "times": summaries,
        "block_medians_s": one.block_medians_s,
        "sent": one.sent_bytes / one.steps,
        "faults": one.faults / one.steps,
        "cpu_s": one.cpu_s / one.steps,
        "reports": joined.local_rank == 0 and joined.settings["interface"] is not None,
    }
    everyone: list[Any] = [None] * joined.world_size
    dist.all_gather_object(everyone, mine)
    stats: Any = getattr(one.module, "stats", lambda: None)()  # RingDP's
    row: dict[str, Any] = {
        name: asdict(Summary.slowest([Summary(**each["times"][name]) for each in everyone])) for name in summaries
    }
    return (
        {"all_reduce": None}
        | row
        | {
            "block_medians_s": [
                max(values) for values in zip(*(each["block_medians_s"] for each in everyone), strict=True)
            ],
            "sent_bytes_per_step": [each["sent"] for each in everyone if each["reports"]],
            "faults_per_step": max(each["faults"] for each in everyone),
            "cpu_s_per_step": max(each["cpu_s"] for each in everyone),
            "bucket_bytes": bucket_bytes(one.module) if one.group is not None else [],
            "waited_s": stats.total_exposed_wait_s / max(1, stats.steps) if stats is not None else None,
        }
    )
