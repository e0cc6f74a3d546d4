"""Any two features go together: a job trains to the weights of one process, or both ranks raise the refusal of it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel.distributed import _MixedPrecision

import ringdp
from ringdp import kvstore, refusals
from ringdp.data import BalancedSampler
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, InvalidStateError
from tests.train.harness import folder, ring_is_built, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

STEPS, SAMPLES, RATE = 4, 12, 0.05
BFLOAT16, LOSSY = 2e-2, float("inf")  # of the weights' largest difference; LOSSY: the ranks are equal, and no more
IN_DEFAULT = 24  # pairs that the default tier draws


@dataclass(frozen=True)
class Feature:
    """What a user adds to a job.

    Attributes:
        keys: the names of it in `refusals.FEATURES`.
        slot: of two with one slot a job has one.
        error: how far the weights may be from those of one process.
        arguments: RingDP's; a function is called with the module for its value.
        before, wrapped: called with the module before, and with RingDP after wrapping.
        beside: called when the module is wrapped.
    """

    keys: tuple[str, ...] = ()
    slot: str = ""
    error: float = 1e-6
    arguments: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[nn.Sequential], Any] | None = None
    wrapped: Callable[[RingDP], Any] | None = None
    beside: Callable[[], Any] | None = None


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 12), nn.LayerNorm(12), nn.Linear(12, 3))


def in_backward(module: nn.Sequential) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})


def rounds_of_another_model() -> None:
    other = nn.Linear(2, 2)
    ringdp.DiLoCo(other, torch.optim.SGD(other.parameters(), 0.1), every=100)


def pushes() -> None:
    store = kvstore.create()
    store.init("a", torch.zeros(3))
    store.push("a", torch.ones(3))
    pulled = torch.empty(3)
    store.pull("a", out=pulled)
    assert torch.equal(pulled, torch.full((3,), 2.0))


def table() -> None:
    rows = ringdp.nn.ShardedEmbedding(10, 4)
    rows(torch.tensor([[1, 2]])).sum().backward()
    rows.step()


def draws() -> None:
    sampler = BalancedSampler(20, 4, balance="equal")
    sampler.watch(RingDP(torch.nn.Linear(1, 1)))
    list(sampler)


FEATURES = {
    "elastic": Feature(("elastic",), "job"),
    "find_unused": Feature((), "unused", arguments={"find_unused_parameters": True}),
    "static_graph": Feature((), "unused", arguments={"static_graph": True}),
    "skip_unused": Feature(
        (), "unused", arguments={"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ),
    "own gradients": Feature(arguments={"gradient_as_bucket_view": False}),
    "small buckets": Feature((), "caps", arguments={"bucket_cap_mb": 0.001}),
    "list of buckets": Feature((), "caps", arguments={"bucket_cap_mb": [0.004, 0.001]}),
    "int8": Feature(("compression",), "compression", LOSSY, {"compression": "int8"}),
    "bf16": Feature(("compression",), "compression", BFLOAT16, {"compression": "bf16"}),
    "topk": Feature(("compression",), "compression", LOSSY, {"compression": "topk"}),
    "powersgd": Feature(("compression",), "compression", LOSSY, {"compression": "powersgd"}),
    "auto": Feature(("compression", "auto"), "compression", BFLOAT16, {"compression": "auto", "allow": "near"}),
    "rules": Feature(("compression",), "compression", LOSSY, {"rules": [("0.weight", "int4")]}),
    "warm-up": Feature((), "warm-up", arguments={"warmup_steps": 2}),
    "samples": Feature(("weight",), "weight", arguments={"weight": "samples"}),
    "weights": Feature(("weight",), "weight", arguments={"weight": "call"}),
    "guard": Feature((), arguments={"guard": 2}),
    "reproducible": Feature(("reproducible",), arguments={"reproducible": True}),
    "no pool": Feature(arguments={"gradient_pool": False}),
    "in double": Feature(arguments={"reduce_dtype": torch.float64}),
    "mixed precision": Feature(
        ("mixed_precision", "low precision"),
        error=BFLOAT16,
        arguments={"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    ),
    "optimizer in backward": Feature(("optimizer in backward",), "optimizer", before=in_backward),
    "delayed": Feature(
        ("delayed all-reduce",),
        arguments={
            "delay_all_reduce_named_params": lambda module: [("4.weight", module[4].weight)],
            "param_to_hook_all_reduce": lambda module: module[0].weight,
        },
    ),
    "all-reduce hook": Feature(
        ("any hook",), "hook", wrapped=lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook)
    ),
    "bfloat16 hook": Feature(
        ("any hook",),
        "hook",
        BFLOAT16,
        wrapped=lambda model: model.register_comm_hook(None, default_hooks.bf16_compress_hook),
    ),
    "PowerSGD hook": Feature(
        ("any hook", "hook", "mixing hook"),
        "hook",
        LOSSY,
        wrapped=lambda model: model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
        ),
    ),
    "scaler": Feature((), "optimizer"),
    "accumulation": Feature((), "micro-batches"),
    "frozen": Feature((), "frozen"),
    "join": Feature(("join",), "loop"),
    "state": Feature((), "state"),
    "autocast": Feature((), "autocast", BFLOAT16),
    "evaluation": Feature((), "evaluation"),
    "not compared": Feature(arguments={"init_sync": False}),
    "replaced": Feature(("other parameters",), "replaced"),
    "compression later": Feature(("compression",), "later", LOSSY),
    "measured": Feature((), "warm-up"),
    "kvstore": Feature(("kvstore",), beside=pushes),
    "sampler": Feature(("sampler",), beside=draws),
    "embedding": Feature(("embedding",), beside=table),
    "rounds": Feature(("rounds",), beside=rounds_of_another_model),
}

# A feature of one pair that has no sense without another: it is added.
NEEDS = {"warm-up": "int8", "measured": "int8"}


def pairs() -> list[tuple[str, ...]]:
    both = (
        (a, b)
        for a, b in itertools.combinations(FEATURES, 2)
        if not FEATURES[a].slot or FEATURES[a].slot != FEATURES[b].slot
    )
    return [tuple(dict.fromkeys([*pair, *completed(pair)])) for pair in both]


def completed(pair: Iterable[str]) -> list[str]:
    compressed = any(FEATURES[name].slot == "compression" and name != "compression later" for name in pair)
    return [NEEDS[name] for name in pair if name in NEEDS and not compressed]


def refusal(names: Iterable[str]) -> refusals.Row | None:
    keys = {key for name in names for key in FEATURES[name].keys}
    return next((row for row in refusals.TABLE if {row.feature, row.other} <= keys), None)


def batch(step: int) -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs.float() - 0.3).square().mean()


def alone(frozen: bool) -> dict[str, Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for step in range(STEPS):
        if frozen and step == 2:
            module[2].requires_grad_(False)
        optimizer.zero_grad()
        loss_of(module(batch(step))).backward()
        optimizer.step()
    return module.state_dict()


def train(names: tuple[str, ...], place: str) -> dict[str, Tensor] | InvalidArgumentError | InvalidStateError:
    rank = int(os.environ["RANK"])
    os.environ["RINGDP_ELASTIC"] = "1" if "elastic" in names else "0"
    ringdp.init(init_method=f"file://{place}", rank=rank, world_size=2, timeout=20, device="cpu")
    try:
        return steps(names, rank)
    except (InvalidArgumentError, InvalidStateError) as error:  # the latter at the first forward that finds the pair
        return error
    finally:
        ringdp.shutdown()


def steps(names: tuple[str, ...], rank: int) -> dict[str, Tensor]:
    features = [FEATURES[name] for name in names]
    module = net()
    for one in features:
        if one.before is not None:
            one.before(module)
    given = {name: value for one in features for name, value in one.arguments.items()}
    values = {
        name: value(module) if callable(value) and name != "mixed_precision" else value for name, value in given.items()
    }
    said: dict[str, Any] = {name: values.pop(name) for name in ("rules", "warmup_steps", "allow") if name in values}
    if said:
        values["compression"] = ringdp.Compression(values.get("compression"), **said)
    model = RingDP(module, **values)
    for one in features:
        if one.wrapped is not None:
            one.wrapped(model)
        if one.beside is not None:
            one.beside()
    if "measured" in names:
        model.measure_compression(every=2)
    optimizer = None if "optimizer in backward" in names else torch.optim.SGD(model.parameters(), RATE)
    scaler = ringdp.amp.GradScaler("cpu", init_scale=64.0) if "scaler" in names else None
    weighted = "weight" in values
    joined: contextlib.AbstractContextManager[Any] = Join([model]) if "join" in names else contextlib.nullcontext()
    with joined:
        for step in range(STEPS):
            if "frozen" in names and step == 2:
                module[2].requires_grad_(False)
            if "state" in names and step == 2:
                model.load_state_dict(model.state_dict())
            if "replaced" in names and step == 1:
                module[4] = copy.deepcopy(module[4])
                optimizer = optimizer and torch.optim.SGD(model.parameters(), RATE)
            if "compression later" in names and step == 1:
                model.set_compression("int8")
            if "evaluation" in names:
                with torch.no_grad():
                    model.eval()(batch(step))
                model.train()
            mine = batch(step).chunk(2)[rank]
            parts = mine.chunk(2 if "accumulation" in names else 1)
            if optimizer is not None:
                optimizer.zero_grad()
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    if values.get("weight") == "call":
                        model.set_weight(len(part))
                    with torch.autocast("cpu", enabled="autocast" in names):
                        outputs = model(part)
                    loss = loss_of(outputs) / (1 if weighted else len(parts))
                    (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.step(optimizer)  # type: ignore[arg-type]
                scaler.update()
            elif optimizer is not None:
                optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@contextlib.contextmanager
def at_place() -> Iterator[str]:
    place = os.path.join(folder(2), f"pair-{random.getrandbits(64):x}")
    yield place
    with contextlib.suppress(OSError):
        os.unlink(place)


def check(names: tuple[str, ...]) -> None:
    with at_place() as place, mock.patch.dict(os.environ):
        results = run_ranks(train, names, place, backend=None, timeout_s=40)
    row = refusal(names)
    if row is not None:
        for result in results:
            assert isinstance(result, Exception), f"{names} are not refused: {row}"
            assert f" cannot be combined: {row.why}." in str(result)
        return
    for result in results:
        assert not isinstance(result, Exception), f"{names}: {result}"
    expected = alone("frozen" in names)
    error = max(FEATURES[name].error for name in names)
    for name, value in expected.items():
        assert torch.equal(results[0][name], results[1][name]), f"{names}: the ranks differ in {name}"
        assert torch.isfinite(results[0][name]).all()
        assert error == LOSSY or (results[0][name] - value).abs().max() <= error, f"{names}: {name}"


DRAWN = random.Random(1).sample(pairs(), IN_DEFAULT)


@pytest.mark.parametrize("names", DRAWN, ids=" and ".join)
def test_a_pair(names: tuple[str, ...]) -> None:
    check(names)


def several(number: int) -> tuple[str, ...]:
    """A draw of 3 to 6 features, of which a job has at most one of a slot."""
    draw, chosen, slots = random.Random(number), list[str](), set[str]()
    for name in draw.sample(sorted(FEATURES), len(FEATURES)):
        slot = FEATURES[name].slot
        if (not slot or slot not in slots) and refusal([*chosen, name]) is None:
            chosen.append(name)
            slots.add(slot)
    names = chosen[: draw.randint(3, 6)]
    return tuple(dict.fromkeys([*names, *completed(names)]))


@pytest.mark.parametrize("number", [pytest.param(one, marks=[pytest.mark.slow] * (one >= 8)) for one in range(200)])
def test_several(number: int) -> None:
    """What goes together in pairs goes together in larger numbers."""
    names = several(number)
    if refusal(names) is None:
        check(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", [pair for pair in pairs() if pair not in DRAWN], ids=" and ".join)
def test_every_other_pair(names: tuple[str, ...]) -> None:
    check(names)
