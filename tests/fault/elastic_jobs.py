"""What the ranks of elastic jobs do: train, and meet their faults."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

import ringdp
from ringdp import checkpoint
from ringdp.compression import get
from ringdp.compression.partition import bounds, owner_offset_of
from ringdp.ddp import parameter_changes
from ringdp.errors import MembershipChanged, RingError
from ringdp.job.elastic import as_unit
from tests.fault.faults import Faults
from tests.fault.launch_jobs import wait_until
from tests.train.harness import name_jobs_after


@dataclass
class Told:
    """By one rank that lives to the end.

    Attributes:
        gradients, parameters: digests of each tensor, after each step.
        sizes, ranks: of the group, after each step.
        seconds: of each step, from its forward to the end of its backward.
        lines: what ringdp has logged.
        state: without elasticity, what a job that goes on from here begins with on this place.
        extra: what a test adds.
    """

    gradients: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


ROWS = 16


class Net(nn.Module):
    """Several buckets at `width` 300; one small one at 8."""

    def __init__(self, width: int, *, norm: bool = False, branches: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(ROWS, 6, sparse=True) if sparse else None
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        self.branches = nn.ModuleList([nn.Linear(width, 1) for _ in range(5 * branches)])  # one for each place

    def forward(self, x: Tensor, place: int = 0) -> Tensor:
        if self.table is not None:
            x = x + self.table((x[:, 0].abs() * ROWS).long() % ROWS)
        if self.branches:
            return self.branches[place](torch.tanh(self.first(x))) + self.last(torch.tanh(self.middle(self.first(x))))
        return self.last(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))


def batch(place: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * place + step))
    return x, x.square().sum(1, keepdim=True).tanh()


def digests(tensors: Sequence[Tensor]) -> str:
    """Of the bits of each one."""
    dense = [tensor.detach().to_dense() if tensor.is_sparse else tensor.detach() for tensor in tensors]
    return " ".join(hashlib.blake2b(one.contiguous().numpy().tobytes(), digest_size=16).hexdigest() for one in dense)


@contextlib.contextmanager
def joined(folder: str, *, elastic: bool) -> Iterator[int]:
    """In a job whose store is a file. Gives this rank's place."""
    os.environ["RINGDP_ELASTIC"] = "1" if elastic else "0"
    place, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ringdp.init(init_method=f"file://{folder}/store{'-elastic' * elastic}", rank=place, world_size=world, timeout=30)
    yield place
    ringdp.shutdown()


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def telling(folder: str, *, elastic: bool = True, places: tuple[int, ...] | None = None) -> Iterator[tuple[Told, int]]:
    """In a job, what this rank tells, and its place; `places`: whose data this job's ranks have; None: their own."""
    told, lines = Told(), Lines()
    logging.getLogger("ringdp").addHandler(lines)
    with joined(folder, elastic=elastic) as rank:
        yield told, rank if places is None else places[rank]
    told.lines = lines.said
    logging.getLogger("ringdp").removeHandler(lines)


def train(
    folder: str,
    steps: range,
    faults: Faults = Faults(),  # noqa: B008
    *,
    elastic: bool = True,
    places: tuple[int, ...] | None = None,
    state: dict[str, Any] | None = None,
    width: int = 300,
    options: dict[str, Any] | None = None,
    norm: bool = False,
    branches: bool = False,
    sparse: bool = False,
    accumulate: bool = False,
    each_step: str = "",
    overflow: tuple[int, int] | None = None,
    uneven: bool = False,
    hook: str = "",
    freeze: tuple[int, ...] = (),
    replace: int | None = None,
    catch: bool = False,
    transport: str = "auto",
    in_backward: bool = False,
    delayed: bool = False,
    groups: tuple[tuple[int, ...], ...] = (),
) -> Told:
    """`overflow`: with a scaler; the gradients of that place are infinite in that step.
    `freeze`: in these steps, with `accumulate`, the middle layer is frozen, or unfrozen, between the micro-batches.
    `replace`: in this step the last layer is replaced.
    `uneven`: the batches have other numbers of samples. `hook`: a name in `HOOKS`.
    `delayed`: a parameter's all-reduce is. `in_backward`: with optimizers that step in backward.
    `each_step`: a name in `EACH_STEP`, or "checkpoint".
    `groups`: the places that train together; () for all.
    `catch`: a step's error is told, and the process lives until the other ranks have ended the step."""
    os.environ["RINGDP_TRANSPORT"] = transport
    with telling(folder, elastic=elastic, places=places) as (told, place):
        net = Net(width, norm=norm, branches=branches, sparse=sparse)
        given: dict[str, Any] = {"bucket_cap_mb": 0.1, "reproducible": width > 100, **(options or {})}
        if groups:
            given["process_group"] = group_of(groups, places)
        if delayed:  # the gradient of `first` comes last
            given["delay_all_reduce_named_params"] = [("middle.weight", net.middle.weight)]
            given["param_to_hook_all_reduce"] = net.first.weight
        model = ringdp.RingDP(net, **given)
        if hook:
            HOOKS[hook](model)
        for _, kept in model._comm_hooks if state is not None and "hook" in state else ():
            give_hook_state(kept, state["hook"])  # type: ignore[index]
        net.middle.requires_grad_(sum(step < steps.start for step in freeze) % 2 == 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.0 if in_backward else 0.1, momentum=0.5)
        if in_backward:  # all gradients are None behind it
            _apply_optimizer_in_backward(torch.optim.SGD, list(net.parameters()), {"lr": 0.1})
        scaler = None if overflow is None else ringdp.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        if state is not None:
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            model.reducer.compression.give_residuals(state["residuals"])
            if "memory" in state:
                give_memory(model, (options or {})["compression"], state["memory"])
        for step in steps:
            here = faults.at(place, step)
            try:
                if scaler is not None:
                    scaled_step(model, optimizer, scaler, place, step, here, told, infinite=overflow == (place, step))
                else:
                    named = {"accumulate": accumulate, "uneven": uneven, "freeze": step in freeze}
                    with replacing(model, optimizer, place, here) if step == replace else contextlib.nullcontext():
                        one_step(model, optimizer, place, step, here, told, **named)
            except RingError as error:
                if not catch:
                    raise
                told.extra |= {"error": type(error).__name__, "text": str(error)}
                told.extra |= {"rank": error.rank, "peer": getattr(error, "peer", None)}
                ended(folder, step, place)
                return told
            if catch and elastic:
                Path(folder, f"ended-{step}-{place}").touch()
            if each_step == "checkpoint":
                save(folder, step, model, here)
            elif each_step:
                told.extra.setdefault(each_step, []).append(EACH_STEP[each_step](model, place))
            told.sizes.append(model.process_group.size())
            told.ranks.append(model.process_group.rank())
        model_state = {name: value.clone() for name, value in model.state_dict().items()}
        state = {"model": model_state, "optimizer": optimizer.state_dict()}
        state |= {"scaler": scaler.state_dict()} if scaler is not None else {}
        told.extra["coded"] = sum(
            row["bytes_before"] - row["bytes_after"] for row in model.reducer.report.bucket_rows()
        )
        compression = (options or {}).get("compression")
        state |= {"memory": take_memory(model, compression)} if in_python(compression) else {}
        for _, kept in model._comm_hooks:
            state |= {"hook": hook_state(kept)}
        state |= {"residuals": model.reducer.compression.take_residuals(list(range(len(list(model.parameters())))))}
        told.state = {} if elastic else state
    return told


def hook_state(state: Any) -> Any:
    """Of hooks with a state: what the next step of another job needs."""
    if isinstance(state, powerSGD_hook.PowerSGDState):
        return {name: getattr(state, name) for name in state.__slots__ if name != "process_group"}
    if isinstance(state, ringdp.hooks.CompressedHook):
        return state.state_dict()
    return dict(state) if isinstance(state, dict) else None


def give_hook_state(state: Any, kept: Any) -> None:
    if isinstance(state, dict):
        state.update(kept)
    if isinstance(state, ringdp.hooks.CompressedHook):
        (entries,) = kept["ranks"].values()
        here = {"world_size": ringdp.world_size(), "ranks": {str(ringdp.rank()): entries}}
        state.load_state_dict(kept | here)
    for name, value in kept.items() if isinstance(state, powerSGD_hook.PowerSGDState) else ():
        setattr(state, name, value)


def group_of(groups: Sequence[Sequence[int]], places: tuple[int, ...] | None) -> dist.ProcessGroup:
    """Of those that are in the job: this rank's one."""
    known = tuple(range(ringdp.world_size())) if places is None else places
    ranks = [[known.index(place) for place in group if place in known] for group in groups]
    mine, _ = dist.new_subgroups_by_enumeration([group for group in ranks if group])
    return mine


def in_python(compression: Any) -> bool:
    compressor = get(compression)
    return compressor is not None and getattr(compressor, "native", None) is None


def take_memory(model: Any, compression: Any) -> dict[str, Any]:
    """The state of compressors in Python, with residuals of this rank's own gradients."""
    state = model.compression_state_dict()
    own = of_owners(compression, state["ranks"][str(ringdp.rank())], float(ringdp.world_size()))
    return state | {"ranks": {"own": own}}


def give_memory(model: Any, compression: Any, state: dict[str, Any]) -> None:
    rank, ranks = ringdp.rank(), ringdp.world_size()
    entries = of_owners(compression, state["ranks"]["own"], 1.0 / ranks)
    model.load_compression_state_dict(state | {"world_size": ranks, "ranks": {str(rank): entries}})


def of_owners(compression: Any, entries: dict[str, Any], factor: float) -> dict[str, Any]:
    """Residuals times `factor` in the elements whose mean this rank encodes (docs/reference/wire_format.md); where
    elements have owners, no other ranks have these parts, and what belongs to a part is left out."""
    aggregate = getattr(get(compression), "aggregate", "owner")
    if aggregate not in ("owner", "merge"):
        return entries
    scaled = {}
    for name, entry in entries.items():
        scaled[name] = {path: value for path, value in entry.items() if path.count("/") < 3}
        if "residual" in entry and aggregate == "owner" and ringdp.world_size() > 1:
            residual = entry["residual"].clone()
            edges = bounds(len(residual), ringdp.world_size(), owner_offset_of(name))
            residual[edges[ringdp.rank()] : edges[ringdp.rank() + 1]] *= factor
            scaled[name]["residual"] = residual
    return scaled


def ended(folder: str, step: int, place: int) -> None:
    """This process lives until all three ranks have ended the step."""
    Path(folder, f"ended-{step}-{place}").touch()
    paths = [Path(folder, f"ended-{step}-{other}") for other in range(3)]
    wait_until(lambda: all(path.exists() for path in paths), "the step's end on the other ranks", 15)


def sum_of_places(place: int) -> float:
    """By collectives of the script, of which one writes in place."""
    total = torch.tensor([float(place)])

    def add() -> list[Tensor]:
        dist.all_reduce(total)
        all_totals = [torch.empty_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(all_totals, total)
        return all_totals

    all_totals = ringdp.elastic.unit(add, writes=[total])
    assert all(torch.equal(one, total) for one in all_totals)
    return float(total)


EACH_STEP: dict[str, Callable[[Any, int], Any]] = {
    "mean": lambda model, place: ringdp.metrics.mean(float(place)),
    "check_replicas": lambda model, place: model.check_replicas(),
    "mean and state": lambda model, place: (ringdp.metrics.mean(float(place)), model.compression_state_dict())[0],
    "monitored_barrier": lambda model, place: ringdp.monitored_barrier(),
    "unit": lambda model, place: sum_of_places(place),
}


def of_ones_own(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Overwrites its bucket."""
    mean = bucket.buffer().div_(group.size())
    dist.all_reduce(mean, group=group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(mean)
    return done


def of_ones_own_with_a_state(state: dict[str, Any], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What it adds to a gradient depends on those before it, and on how often it was called for the parameter."""
    for name, gradient in zip(ringdp.hooks.parameter_names(bucket), bucket.gradients(), strict=True):
        kept = state.setdefault(name, {"sum": torch.zeros_like(gradient), "calls": []})
        kept["sum"].add_(gradient)
        kept["calls"].append(name)
        gradient.add_(kept["sum"], alpha=0.01).add_(1e-3 * len(kept["calls"]))
    return of_ones_own(dist.group.WORLD, bucket)  # type: ignore[arg-type]


of_ones_own_with_a_state.repeatable = True  # type: ignore[attr-defined]
of_ones_own_with_a_state.per_parameter = True  # type: ignore[attr-defined]
of_ones_own.repeatable = of_ones_own.per_parameter = True  # type: ignore[attr-defined]

HOOKS: dict[str, Callable[[Any], Any]] = {
    "builtin allreduce": lambda model: model.register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
    "builtin fp16": lambda model: model.register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
    "torch fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "allreduce": lambda model: model.register_comm_hook(None, ringdp.hooks.allreduce_hook),
    "bf16": lambda model: model.register_comm_hook(model.process_group, ringdp.hooks.bf16_hook),
    "one's own": lambda model: model.register_comm_hook(model.process_group, of_ones_own),
    "one's own with a state": lambda model: model.register_comm_hook({}, of_ones_own_with_a_state),
    "torch powerSGD": lambda model: model.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
    "ddp_hook": lambda model: model.register_comm_hook(
        *ringdp.hooks.ddp_hook(ringdp.compression.get("randomk", fraction=0.2, error_feedback=True))
    ),
    "measured": lambda model: model.measure_compression(every=1),
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
    here("forward")
    if accumulate:
        with model.no_sync():
            (model(x[:4]) - y[:4]).square().mean().backward()
        x, y = x[4:], y[4:]
    if freeze:
        net.middle.requires_grad_(not net.middle.weight.requires_grad)
    loss = (model(x, place) - y).square().mean()
    here("backward")
    handles = dying_hooks(net, here)
    loss.backward()
    for handle in handles:
        handle.remove()
    told.seconds.append(time.monotonic() - began)
    here("after backward")
    told.gradients.append(digests([torch.zeros(1) if one.grad is None else one.grad for one in net.parameters()]))
    half_by_half(optimizer, list(net.parameters()), here)
    told.parameters.append(digests(list(net.parameters())))


def dying_hooks(net: Any, here: Callable[[str], None]) -> list[Any]:
    return [
        net.last.weight.register_hook(lambda gradient: here("first bucket")),
        net.first.weight.register_hook(lambda gradient: here("last bucket")),
    ]


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
    here("forward")
    loss = (model(x) - y).square().mean() * (float("inf") if infinite else 1.0)
    handles = dying_hooks(net, here)
    scaler.scale(loss).backward()
    for handle in handles:
        handle.remove()
    here("after backward")
    told.gradients.append(digests([one.grad for one in net.parameters()]))
    scaler.step(optimizer)
    here("optimizer")
    scaler.update()
    optimizer.zero_grad()
    told.parameters.append(digests(list(net.parameters())) + f" {scaler.get_scale()}")


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
    net, send = model.module, as_unit
    torch.manual_seed(place)
    for parameter in net.last.parameters():
        optimizer.state.pop(parameter, None)
    net.last = nn.Linear(net.last.in_features, 1)
    optimizer.param_groups[0]["params"] = list(net.parameters())

    def dying_send(group: Any, what: str, body: Callable[[], Any], *, writes: Any = ()) -> Any:
        def dying_broadcast() -> None:
            here("new parameters")
            body()

        return send(group, what, dying_broadcast if writes else body, writes=writes)

    with mock.patch.object(parameter_changes, "as_unit", dying_send):
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
        return {"parameters": digests(list(model.parameters())), "again": again, "made": made}


def another_job_afterwards(folder: str) -> float:
    """Rank 0 is the last one of an elastic job, whose group it keeps. Then it is in another job, with rank 2."""
    first = int(os.environ["RANK"])
    os.environ["WORLD_SIZE"] = "2"
    kept: Any = None
    if first < 2:
        with joined(folder, elastic=True) as place:
            model = ringdp.RingDP(Net(8))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            one_step(model, optimizer, place, 0, Faults().kill(1, 0).at(place, 0), Told())
            kept = dist.group.WORLD
    name_jobs_after(folder)
    os.environ["RANK"] = str(first // 2)
    with joined(folder, elastic=False):
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0, 1]))
    del kept
    return total.item()


def refusals(folder: str) -> dict[str, tuple[str, str]]:
    """The class and the text with which each of `REFUSED` is refused."""
    said: dict[str, tuple[str, str]] = {}
    with joined(folder, elastic=True):
        for kind, call in REFUSED.items():
            try:
                call(Net(8))
            except (ringdp.InvalidArgumentError, ringdp.RingError) as error:
                said[kind] = (type(error).__name__, str(error))
        dist.barrier()
    return said


def _hook_of_the_program(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    raise NotImplementedError


class Counting:
    """A user's, whose calls change it."""

    repeatable = False

    def compress(self, x: Tensor, info: Any) -> tuple[Tensor]:
        return (x,)

    def decompress(self, payload: Any, info: Any) -> Tensor:
        return payload[0]


REFUSED: dict[str, Callable[[Net], Any]] = {
    "Counting": lambda net: ringdp.RingDP(net, compression=Counting()),
    "_hook_of_the_program": lambda net: ringdp.RingDP(net).register_comm_hook(None, _hook_of_the_program),
    "(of allreduce_hook)": lambda net: ringdp.RingDP(net).register_comm_hook(
        dist.new_group([0, 1]), ringdp.hooks.allreduce_hook
    ),
    "Join": lambda net: ringdp.RingDP(net).join().__enter__(),
    "(backend gloo)": lambda net: ringdp.RingDP(net, process_group=dist.new_group(backend="gloo")),
    "sparse tensors": lambda net: dist.all_reduce(torch.eye(2).to_sparse()),
}
"""By words of the refusal."""
