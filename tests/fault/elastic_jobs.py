"""What the ranks of test_elastic.py do: train, and die where they are told to."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import ringdp
from ringdp import checkpoint
from ringdp.ddp import elastic as repair
from ringdp.errors import MembershipChanged

OUTLIVES_S = 8.0
PHASES = ("forward", "first bucket", "last bucket", "after backward", "optimizer")


@dataclass(frozen=True)
class Death:
    """`place` (its rank at the start) is killed in that step, by that signal.

    `stop_s`: it is stopped for so long instead. `children`: it has so many, which outlive it for some seconds.
    """

    place: int
    step: int
    phase: str
    stop_s: float = 0.0
    number: int = signal.SIGKILL
    children: int = 0


@dataclass
class Told:
    """By one rank that lives to the end.

    Attributes:
        gradients, parameters: in hexadecimal floats, after each step.
        sizes, ranks: of the group, after each step.
        seconds: of each step, from its forward to the end of its backward.
        lines: what ringdp has logged.
        extra: what a test adds.
    """

    gradients: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """Several buckets at `width` 300; one small one at 8."""

    def __init__(self, width: int, *, norm: bool = False, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        self.branches = nn.ModuleList([nn.Linear(width, 1) for _ in range(4 * branches)])  # one for each place

    def forward(self, x: Tensor, place: int = 0) -> Tensor:
        if self.branches:
            return self.branches[place](torch.tanh(self.first(x))) + self.last(torch.tanh(self.middle(self.first(x))))
        return self.last(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))


def batch(place: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * place + step))
    return x, x.square().sum(1, keepdim=True).tanh()


def hexadecimal(tensors: Sequence[Tensor]) -> str:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy().tobytes().hex()


@contextlib.contextmanager
def joined(folder: str, *, elastic: bool) -> Iterator[int]:
    """In a job whose store is a file. Gives this rank's place."""
    os.environ["RINGDP_ELASTIC"] = "1" if elastic else "0"
    place, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ringdp.init(init_method=f"file://{folder}/store{'-elastic' * elastic}", rank=place, world_size=world, timeout=30)
    yield place
    ringdp.shutdown()


def die(death: Death) -> None:
    if death.stop_s == 0:
        for _ in range(death.children):
            if os.fork() == 0:
                time.sleep(OUTLIVES_S)
                os._exit(0)
        os.kill(os.getpid(), death.number)
    if os.fork() == 0:
        time.sleep(death.stop_s)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train(
    folder: str,
    steps: range,
    deaths: tuple[Death, ...] = (),
    *,
    elastic: bool = True,
    places: tuple[int, ...] | None = None,
    state: dict[str, Any] | None = None,
    width: int = 300,
    options: dict[str, Any] | None = None,
    norm: bool = False,
    branches: bool = False,
    accumulate: bool = False,
    each_step: str = "",
    overflow: tuple[int, int] | None = None,
    uneven: bool = False,
    hook: str = "",
    freeze: tuple[int, ...] = (),
    replace: int | None = None,
) -> Told:
    """`overflow`: with a scaler; the gradients of that place are infinite in that step.
    `freeze`: in these steps, with `accumulate`, the middle layer is frozen, or unfrozen, between the micro-batches.
    `replace`: in this step the last layer is replaced.
    `uneven`: the batches have other numbers of samples. `hook`: a name in `HOOKS`.
    `places`: whose data this job's ranks have; None: their own. `each_step`: a name in `EACH_STEP`, or "checkpoint"."""
    told, lines = Told(), Lines()
    logging.getLogger("ringdp").addHandler(lines)
    with joined(folder, elastic=elastic) as rank:
        place = rank if places is None else places[rank]
        net = Net(width, norm=norm, branches=branches)
        model = ringdp.RingDP(net, bucket_cap_mb=0.1, **{"reproducible": width > 100, **(options or {})})
        if hook:
            HOOKS[hook](model)
        net.middle.requires_grad_(sum(step < steps.start for step in freeze) % 2 == 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        scaler = None if overflow is None else ringdp.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        if state is not None:
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            model.reducer.give_residuals(state["residuals"][place])
        for step in steps:
            mine = [death for death in deaths if death.place == place and death.step == step]

            def here(phase: str, mine: list[Death] = mine) -> None:
                for death in mine:
                    if death.phase == phase:
                        die(death)

            if scaler is not None:
                scaled_step(model, optimizer, scaler, place, step, here, told, infinite=overflow == (place, step))
            else:
                named = {"accumulate": accumulate, "uneven": uneven, "freeze": step in freeze}
                with replacing(model, optimizer, place, here) if step == replace else contextlib.nullcontext():
                    one_step(model, optimizer, place, step, here, told, **named)
            if each_step == "checkpoint":
                save(folder, step, model, here)
            elif each_step:
                told.extra.setdefault(each_step, []).append(EACH_STEP[each_step](model, place))
            told.sizes.append(ringdp.world_size())
            told.ranks.append(ringdp.rank())
        model_state = {name: value.clone() for name, value in model.state_dict().items()}
        told.state = {"model": model_state, "optimizer": optimizer.state_dict()}
        told.state |= {"scaler": scaler.state_dict()} if scaler is not None else {}
        told.extra["coded"] = sum(row["bytes_before"] - row["bytes_after"] for row in model.reducer.bucket_rows())
        told.state["residuals"] = model.reducer.take_residuals(list(range(len(list(model.parameters())))))
    told.lines = lines.said
    logging.getLogger("ringdp").removeHandler(lines)
    return told


EACH_STEP: dict[str, Callable[[Any, int], Any]] = {
    "mean": lambda model, place: ringdp.metrics.mean(float(place)),
    "check_replicas": lambda model, place: model.check_replicas(),
    "monitored_barrier": lambda model, place: ringdp.monitored_barrier(),
}

HOOKS: dict[str, Callable[[Any], Any]] = {
    "builtin allreduce": lambda model: model.register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
    "builtin fp16": lambda model: model.register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
    "torch fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "allreduce": lambda model: model.register_comm_hook(None, ringdp.hooks.allreduce_hook),
    "bf16": lambda model: model.register_comm_hook(model.process_group, ringdp.hooks.bf16_hook),
}


def one_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    place: int,
    step: int,
    here: Callable[[str], None],
    told: Told,
    *,
    accumulate: bool = False,
    uneven: bool = False,
    freeze: bool = False,
) -> None:
    net = model.module
    x, y = batch(place, step)
    if uneven:
        x, y = (part[: 6 + (place + step) % 3] for part in (x, y))
    began = time.monotonic()
    told.began.append(time.time())
    here("forward")
    if accumulate:
        with model.no_sync():
            (model(x[:4]) - y[:4]).square().mean().backward()
        x, y = x[4:], y[4:]
    if freeze:
        net.middle.requires_grad_(not net.middle.weight.requires_grad)
    loss = (model(x, place) - y).square().mean()
    handles = [
        net.last.weight.register_hook(lambda gradient: here("first bucket")),
        net.first.weight.register_hook(lambda gradient: here("last bucket")),
    ]
    loss.backward()
    for handle in handles:
        handle.remove()
    told.seconds.append(time.monotonic() - began)
    told.ended.append(time.time())
    here("after backward")
    told.gradients.append(hexadecimal([torch.zeros(1) if one.grad is None else one.grad for one in net.parameters()]))
    half_by_half(optimizer, list(net.parameters()), here)
    told.parameters.append(hexadecimal(list(net.parameters())))


def scaled_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    place: int,
    step: int,
    here: Callable[[str], None],
    told: Told,
    *,
    infinite: bool,
) -> None:
    net = model.module
    x, y = batch(place, step)
    loss = (model(x) - y).square().mean() * (float("inf") if infinite else 1.0)
    handle = net.first.weight.register_hook(lambda gradient: here("last bucket"))
    scaler.scale(loss).backward()
    handle.remove()
    told.gradients.append(hexadecimal([one.grad for one in net.parameters()]))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    told.parameters.append(hexadecimal(list(net.parameters())) + f" {scaler.get_scale()}")


def half_by_half(optimizer: torch.optim.Optimizer, parameters: list[Tensor], here: Callable[[str], None]) -> None:
    """A step of the optimizer, with a place between two parameters."""
    gradients = [one.grad for one in parameters]
    middle = len(parameters) // 2
    for first, end in ((0, middle), (middle, len(parameters))):
        for index, parameter in enumerate(parameters):
            parameter.grad = gradients[index] if first <= index < end else None
        optimizer.step()
        here("optimizer" if first == 0 else "")
    optimizer.zero_grad()


@contextlib.contextmanager
def replacing(model: Any, optimizer: torch.optim.Optimizer, place: int, here: Callable[[str], None]) -> Iterator[None]:
    """The last layer is another one, whose values are rank 0's; a rank dies before it has sent them, or got them."""
    net, send = model.module, repair.broadcast_in_unit
    torch.manual_seed(place)
    for parameter in net.last.parameters():
        optimizer.state.pop(parameter)
    net.last = nn.Linear(net.last.in_features, 1)
    optimizer.param_groups[0]["params"] = list(net.parameters())

    def dying_send(group: Any, what: str, tensors: Any, broadcast: Callable[[], None]) -> None:
        def dying_broadcast() -> None:
            here("new parameters")
            broadcast()

        send(group, what, tensors, dying_broadcast)

    with mock.patch.object(repair, "broadcast_in_unit", dying_send):
        yield


def save(folder: str, step: int, model: Any, here: Callable[[str], None]) -> None:
    """A checkpoint; a rank dies in the middle of its write, or after the first exchange."""
    write = checkpoint._Writer.write
    gather = checkpoint.all_gather_bytes  # type: ignore[attr-defined]

    def dying_write(self: Any, data: Any) -> int:
        here("checkpoint's write")
        return write(self, data)

    def dying_gather(*arguments: Any, **named: Any) -> Any:
        told = gather(*arguments, **named)
        here("checkpoint")
        return told

    checkpoint._Writer.write = dying_write  # type: ignore[method-assign]
    checkpoint.all_gather_bytes = dying_gather  # type: ignore[attr-defined]
    try:
        checkpoint.save(f"{folder}/checkpoints", step, {"model": model.state_dict()}, own=step)
    finally:
        checkpoint._Writer.write = write  # type: ignore[method-assign]
        checkpoint.all_gather_bytes = gather  # type: ignore[attr-defined]


def own_collective(folder: str, victim: int) -> dict[str, Any]:
    """A collective of the program itself, in which a rank is missing; then a step with those that are left."""
    with joined(folder, elastic=True) as place:
        model = ringdp.RingDP(Net(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        one_step(model, optimizer, place, 0, lambda phase: None, Told())
        if place == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        told: dict[str, Any] = {}
        ones = torch.ones(3)
        if place != 0:  # one that has had its part before the others notice
            time.sleep(0.2)
        try:
            dist.all_reduce(ones)
        except MembershipChanged as error:
            told |= {"text": str(error), "view": error.view, "survivors": error.survivors}
        ones = torch.ones(3)
        dist.all_reduce(ones)
        after = Told()
        one_step(model, optimizer, place, 1, lambda phase: None, after)
        told |= {
            "sum": ones[0].item(),
            "size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "ranks": dist.get_process_group_ranks(dist.group.WORLD),
            "gradients": after.gradients,
        }
        gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor([float(place)]))
        told["places"] = [int(one) for one in gathered]
        dist.broadcast(ones, src=0)
        pair = dist.new_group([0, 1])
        dist.all_reduce(ones, group=pair)
        told["of_a_new_group"] = ones[0].item()
        return told


def goes_on_from_its_checkpoint(folder: str, victim: int) -> dict[str, Any]:
    """docs/how-to/elastic.md: a step with a collective of its own, in which a rank is lost."""
    with joined(folder, elastic=True) as place:
        model = ringdp.RingDP(Net(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        step, again, made = 0, 0, []

        def save() -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(f"{folder}/checkpoints", step, state)

        save()
        while step < 6:
            try:
                one_step(model, optimizer, place, step, lambda phase: None, Told())
                if (place, step) == (victim, 4):
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(3))
                made.append(step)
                step += 1
                if step % 3 == 0:
                    save()
            except MembershipChanged:
                again += 1
                found = checkpoint.load(f"{folder}/checkpoints")
                assert found is not None
                model.load_state_dict(found.shared["model"])
                optimizer.load_state_dict(found.shared["optimizer"])
                optimizer.zero_grad()
                step = found.step
        return {"parameters": hexadecimal(list(model.parameters())), "again": again, "made": made}


def refusals(folder: str, kinds: tuple[str, ...]) -> dict[str, str]:
    """What RingDP says to each of these."""
    said: dict[str, str] = {}
    with joined(folder, elastic=True):
        for kind in kinds:
            try:
                _refused(kind)
            except (ringdp.InvalidArgumentError, ringdp.RingError) as error:
                said[kind] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return said


def _refused(kind: str) -> None:
    net = Net(8)
    if kind == "compression":
        ringdp.RingDP(net, compression=ringdp.compression.TopK(0.1))
    elif kind == "compression set later":
        ringdp.RingDP(net).set_compression(ringdp.compression.PowerSGD(2))
    elif kind == "measuring":
        ringdp.RingDP(Net(300), compression="int8").measure_compression(every=2)
    elif kind == "guard":
        ringdp.RingDP(net, guard_every=10)
    elif kind == "skipping":
        ringdp.RingDP(net, find_unused_parameters=True, skip_all_reduce_unused_params=True)
    elif kind == "mixed precision":
        ringdp.RingDP(net, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    elif kind == "local sgd":
        ringdp.LocalSGD(net, torch.optim.SGD(net.parameters(), 0.1), every=4)
    elif kind == "sparse":
        ringdp.RingDP(nn.Embedding(5, 2, sparse=True))
    elif kind == "hook":
        ringdp.RingDP(net).register_comm_hook(None, ringdp.hooks.noop_hook)
    elif kind == "hook of the program":

        def mine(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            raise NotImplementedError

        ringdp.RingDP(net).register_comm_hook(None, mine)
    elif kind == "hook over another group":
        ringdp.RingDP(net).register_comm_hook(dist.new_group([0, 1]), ringdp.hooks.allreduce_hook)
    elif kind == "join":
        with ringdp.RingDP(net).join():
            pass
    elif kind == "subgroup":
        group = dist.new_group([0, 1])
        ringdp.RingDP(net, process_group=group)
    elif kind == "sampler":
        ringdp.data.BalancedSampler(100, 10)
    elif kind == "kvstore":
        ringdp.kvstore.create("dist_sync")
    elif kind == "sharded embedding":
        ringdp.nn.ShardedEmbedding(10, 2)
    elif kind == "diloco":
        ringdp.DiLoCo(net, torch.optim.SGD(net.parameters(), 0.1), every=4)
    elif kind == "sparse all_reduce":
        dist.all_reduce(torch.eye(2).to_sparse())
