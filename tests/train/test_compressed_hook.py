"""Compressing hooks on torch's DDP: the same bits on all ranks and in the simulation, overflow, checkpoints, errors."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.compression import Int4, Int8, RandomK, TopK
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, MismatchError, RingError
from ringdp.hooks import ddp_hook
from ringdp.testing import Simulation, simulate
from tests.train import models
from tests.train.compressed import (
    COMPRESSORS,
    ROUNDED_BY_THE_BACKEND,
    Large,
    Raising,
    Random,
    Shrinking,
    Steps,
    Swelling,
    build,
    digest,
    loss_of,
    wrapped,
)
from tests.train.harness import backends, run_outcomes, run_ranks

pytestmark = pytest.mark.parametrize("backend", backends())

COMPRESSED = ("0.weight", "2.weight")  # the others are exact by default


def trained(name: str, steps: int, overflow_at: int | None = None) -> list[dict[str, Any]]:
    """By step: every parameter's own and averaged gradient, and the parameters' digest."""
    model, rank = build(), dist.get_rank()
    ddp = wrapped(model)
    alone = build()
    hook, function = ddp_hook(COMPRESSORS[name], model=ddp)
    ddp.register_comm_hook(hook, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        overflow = step == overflow_at and rank == dist.get_world_size() - 1
        alone.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(ddp, step, rank, overflow=overflow).backward()
        loss_of(alone, step, rank, overflow=overflow).backward()
        averaged = {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        own = {n: p.grad.clone() for n, p in alone.named_parameters()}  # type: ignore[union-attr]
        if step != overflow_at:
            optimizer.step()
        seen.append({"own": own, "averaged": averaged, "digest": digest(model.parameters())})
    return seen


def check_bits(compressor: Any, ranks: list[list[dict[str, Any]]]) -> None:
    """All ranks agree in every step, and are where the simulation is."""
    world = len(ranks)
    for step, seen in enumerate(zip(*ranks, strict=True)):
        assert len({it["digest"] for it in seen}) == 1, step
        assert len({digest(it["averaged"].values()) for it in seen}) == 1, step
    for name in ranks[0][0]["own"]:
        if name in COMPRESSED:
            before: Simulation | None = None
            for step in range(len(ranks[0])):
                before = simulate(compressor, [it[step]["own"][name] for it in ranks], world, name=name, after=before)
                torch.testing.assert_close(
                    ranks[0][step]["averaged"][name], before.mean, rtol=0, atol=0, equal_nan=True, msg=f"{name} {step}"
                )
        else:
            for step in range(len(ranks[0])):
                mean = sum(it[step]["own"][name].double() for it in ranks) / world
                torch.testing.assert_close(ranks[0][step]["averaged"][name].double(), mean, equal_nan=True)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_all_ranks_have_the_bits_of_the_simulation(backend: str, name: str) -> None:
    world = 2 if name in ROUNDED_BY_THE_BACKEND else 3
    check_bits(COMPRESSORS[name], run_ranks(trained, name, 4, world_size=world, backend=backend))


@pytest.mark.parametrize(
    "world",
    [
        2,
        pytest.param(4, marks=pytest.mark.ci),
        pytest.param(5, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["int4", "large", "top k"])
def test_in_other_worlds(backend: str, name: str, world: int) -> None:
    check_bits(COMPRESSORS[name], run_ranks(trained, name, 3, world_size=world, backend=backend, timeout_s=100))


@pytest.mark.parametrize(
    "name",
    ["int8", "int4 EF21", "steps", "gathered", "large", "folded", "rounded", "sign", "low rank", "votes", "top k"],
)
def test_an_overflow_on_one_rank_is_seen_by_all_and_leaves_no_trace(backend: str, name: str) -> None:
    world = 2
    ranks = run_ranks(trained, name, 4, 1, world_size=world, backend=backend)
    for seen in ranks:
        for parameter in COMPRESSED:
            assert not seen[1]["averaged"][parameter].isfinite().any()
            assert seen[2]["averaged"][parameter].isfinite().all()
    check_bits(COMPRESSORS[name], ranks)


def among_other_groups() -> list[str]:
    """All ranks, then the last two, train where each rank is in other groups than its neighbour; by step the bits."""
    rank, pair = dist.get_rank(), dist.new_group([1, 2])
    dist.new_group([0, 1])
    seen = []
    for group in [dist.group.WORLD, pair][: 2 if rank else 1]:
        ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004, process_group=group)
        ddp.register_comm_hook(*ddp_hook("topk", model=ddp, process_group=group))
        for step in range(2):
            ddp.zero_grad()
            loss_of(ddp, step, rank).backward()
            seen.append(digest(parameter.grad for parameter in ddp.parameters()))
    return seen


def test_members_of_a_group_meet_whatever_other_groups_they_are_in(backend: str) -> None:
    first, *pair = run_ranks(among_other_groups, world_size=3, backend=backend, timeout_s=20)
    assert pair[0] == pair[1]
    assert pair[0][:2] == first
    assert len(set(pair[0])) == 4


def resumed() -> tuple[list[str], list[str]]:
    """Six steps at once, and three, a checkpoint, three with other objects; also what a rank's checkpoint holds."""
    rank = dist.get_rank()

    def run(model: torch.nn.Module, steps: range, saved: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
        ddp = wrapped(model)
        hook, function = ddp_hook("int4", rules=[("4.weight", Random())], model=ddp)
        if saved is not None:
            hook.load_state_dict(saved)
        ddp.register_comm_hook(hook, function)
        digests = []
        for step in steps:
            model.zero_grad()
            loss_of(ddp, step, rank).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            digests.append(digest(model.parameters()))
        return digests, hook.state_dict()

    whole, _ = run(build(), range(6), None)
    model = build()
    first, saved = run(model, range(3), None)
    [entries] = saved["ranks"].values()
    assert saved["steps"] == 3
    assert entries["0.weight"]["residual"].shape == (5000,)
    second, again = run(model, range(3, 6), saved)
    calls = {path: it for path, it in again["ranks"][str(rank)]["4.weight"].items() if path.endswith("calls")}
    assert set(calls.values()) == {6}, calls
    return whole, first + second


def test_resumed_from_a_checkpoint_it_goes_on_to_the_same_bits(backend: str) -> None:
    for whole, again in run_ranks(resumed, world_size=2, backend=backend):
        assert whole == again


def consolidated() -> dict[str, Any]:
    model = build()
    ddp = wrapped(model)
    hook, function = ddp_hook("int4", model=ddp)
    ddp.register_comm_hook(hook, function)
    for step in range(3):
        loss_of(ddp, step, dist.get_rank()).backward()
    with pytest.raises(InvalidArgumentError):
        hook.load_state_dict(hook.state_dict() | {"world_size": 7})
    own, mean = hook.state_dict(), hook.state_dict(consolidated=True)
    hook.load_state_dict(mean)
    again = hook.state_dict(consolidated=True)
    for name in COMPRESSED:
        assert torch.equal(again["parameters"][name]["residual"], mean["parameters"][name]["residual"])
    for state in (own, mean):  # a parameter that is frozen by then is in the way of neither form
        frozen = build()
        frozen.get_parameter("0.weight").requires_grad_(False)
        ddp = wrapped(frozen)
        hook, function = ddp_hook("int4", model=ddp)
        ddp.register_comm_hook(hook, function)
        hook.load_state_dict(state)
        loss_of(ddp, 3, dist.get_rank()).backward()
        [exact], whole = hook.state_dict()["ranks"].values(), hook.state_dict(consolidated=True)["parameters"]
        assert torch.equal(whole["0.weight"]["residual"], mean["parameters"]["0.weight"]["residual"])
        assert not torch.equal(whole["2.weight"]["residual"], mean["parameters"]["2.weight"]["residual"])
        if state is own:
            mine = own["ranks"][str(dist.get_rank())]["0.weight"]
            torch.testing.assert_close(exact["0.weight"]["residual"], mine["residual"], rtol=0, atol=0)
    return mean


def test_the_mean_over_ranks_is_the_same_on_all_and_on_both_ways(backend: str) -> None:
    means = run_ranks(consolidated, world_size=3, backend=backend)
    for mean in means:
        assert "ranks" not in mean
        for name in COMPRESSED:
            residual = mean["parameters"][name]["residual"]
            assert torch.equal(residual, means[0]["parameters"][name]["residual"])
            assert float(residual.abs().max()) > 0


def goes_on_from_another_step() -> None:
    model = build()
    ddp = wrapped(model)
    hook, function = ddp_hook(RandomK(0.1), model=ddp)
    ddp.register_comm_hook(hook, function)
    states = []
    for step in range(2):
        loss_of(ddp, step, dist.get_rank()).backward()
        states.append(hook.state_dict())
    if dist.get_rank() == 1:
        hook.load_state_dict(states[0])
    loss_of(ddp, 2, dist.get_rank()).backward()


def test_ranks_that_load_states_of_different_steps_are_told(backend: str) -> None:
    for outcome in run_outcomes(goes_on_from_another_step, world_size=2, backend=backend):
        assert isinstance(outcome.error, MismatchError)
        assert "rank 0 has compressed 2 steps before this one, rank 1 1." in str(outcome.error)


def resumed_in_half_precision() -> None:
    """What bfloat16 gradients owe is remembered as that of float32."""
    model = build().to(torch.bfloat16)
    ddp = wrapped(model)
    hooks = []
    for _ in range(2):
        hook, function = ddp_hook("int4", model=ddp)
        hooks.append(hook)
    ddp.register_comm_hook(hooks[0], function)
    ddp(torch.ones(2, 50, dtype=torch.bfloat16)).float().square().sum().backward()
    held = hooks[0].state_dict()
    hooks[1].load_state_dict(held)
    [mine], [theirs] = held["ranks"].values(), hooks[1].state_dict()["ranks"].values()
    for name in COMPRESSED:
        assert bool(mine[name]["residual"].any())
        assert torch.equal(mine[name]["residual"], theirs[name]["residual"])


def test_half_precision_is_loaded_where_it_is_looked_for(backend: str) -> None:
    run_ranks(resumed_in_half_precision, world_size=2, backend=backend)


def accumulated() -> None:
    """Compression sees the sum of two backwards, once; a scale of the loss changes nothing that is remembered."""
    rank = dist.get_rank()
    states = []
    for scale in (1.0, 2.0**12):
        model = build()
        ddp = wrapped(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.zeros(()))
        hook, function = ddp_hook("int4", model=ddp, scaler=scaler)
        ddp.register_comm_hook(hook, function)
        for step in (0, 2):
            with ddp.no_sync():
                scaler.scale(loss_of(ddp, step, rank)).backward()
            scaler.scale(loss_of(ddp, step + 1, rank)).backward()
        state = hook.state_dict()
        assert state["steps"] == 2
        states.append(state["ranks"][str(rank)])
    for name in COMPRESSED:
        assert torch.equal(states[0][name]["residual"], states[1][name]["residual"])


def test_no_sync_compresses_once_and_residuals_are_kept_without_the_loss_scale(backend: str) -> None:
    run_ranks(accumulated, world_size=2, backend=backend)


def other_types() -> None:
    """Parameters of several dtypes, one of them complex, tied and strided ones."""
    for name in ("mixed_types", "tied"):
        model = models.build(name)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(*ddp_hook("bf16", rules=[("*", "bf16")], model=ddp))
        x, y = models.batch(0, dist.get_rank())
        nn.functional.cross_entropy(ddp(x), y).backward()
        exact = DistributedDataParallel(models.build(name))
        nn.functional.cross_entropy(exact(x), y).backward()
        for one, other in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-3)


def test_other_types_and_strides(backend: str) -> None:
    run_ranks(other_types, world_size=2, backend=backend)


def disagreeing(what: str) -> Exception:
    rank = dist.get_rank()
    compressor: Any = {
        "compressor": Steps() if rank else Int8(block=100),
        "block": Int8(block=100 + rank),
        "core": Steps() if rank else Int8(),
        "exact": Steps() if rank else None,
        "size": Shrinking() if rank else Steps(),
        "raises": Raising() if rank else Steps(),
        "swells": Swelling() if rank else Large(),
    }[what]
    if what in ("size", "raises", "swells"):  # of one class, as far as the others can tell
        compressor.__class__ = type("Mine", (type(compressor),), {})
    model = build()
    ddp = wrapped(model)
    ddp.register_comm_hook(*ddp_hook(compressor, model=ddp))
    with pytest.raises(Exception) as caught:
        loss_of(ddp, 0, rank).backward()
    assert isinstance(caught.value, Exception)
    return caught.value


@pytest.mark.parametrize(
    "what, expected",
    [
        (
            "compressor",
            [(MismatchError, r"rank 0 has \S+ \[\d+\] by Int8\(block=100.*rank 1 has \S+ \[\d+\] by Steps")] * 2,
        ),
        ("block", [(MismatchError, "block=100.*block=101")] * 2),
        (
            "core",
            [(MismatchError, r"rank 0 has \S+ \[\d+\] by Int8\(.*rank 1 has \S+ \[\d+\] by Steps")] * 2,
        ),
        ("exact", [(MismatchError, r"rank 0 has \S+ \[\d+\] exact; rank 1 has \S+ \[\d+\] by Steps")] * 2),
        (
            "size",
            [
                (RingError, "rank 1 could not compress a bucket: InvalidArgumentError"),
                (InvalidArgumentError, "set fixed_size = False"),
            ],
        ),
        (
            "raises",
            [
                (RingError, "^rank 1 could not compress a bucket: ZeroDivisionError: nothing to"),
                (ZeroDivisionError, "^nothing to divide by"),
            ],
        ),
        (
            "swells",
            [
                (RingError, "rank 1 could not compress a bucket: "),
                (InvalidArgumentError, "more than 16 an element is not sent"),
            ],
        ),
    ],
)
def test_where_ranks_disagree_all_of_them_raise(
    backend: str, what: str, expected: list[tuple[type[Exception], str]]
) -> None:
    errors = run_ranks(disagreeing, what, world_size=2, backend=backend, timeout_s=15)
    for error, (kind, words) in zip(errors, expected, strict=True):
        assert type(error) is kind
        assert re.search(words, str(error), re.DOTALL), error


def test_rules_by_name_need_the_model(backend: str) -> None:
    with pytest.raises(InvalidArgumentError):
        ddp_hook("int8", rules=[("*.bias", None)])


def nameless() -> None:
    model = build()
    ddp = wrapped(model)
    hook, function = ddp_hook("int4")
    ddp.register_comm_hook(hook, function)
    for step in range(3):  # buckets are laid out anew after the first
        loss_of(ddp, step, dist.get_rank()).backward()
    [entries] = hook.state_dict()["ranks"].values()
    assert {it["residual"].numel() for it in entries.values()} == {5000, 2400}


def test_without_the_model_parameters_are_numbered(backend: str) -> None:
    run_ranks(nameless, world_size=2, backend=backend)


def by_the_core(dtype: torch.dtype) -> None:
    """The compressor's own methods are not called, whatever moves the bytes."""
    model = build().to(dtype)
    ddp = wrapped(model)
    ddp.register_comm_hook(*ddp_hook("int4", model=ddp))
    with mock.patch.object(Int4, "compress", side_effect=AssertionError("in Python")):
        for _ in range(2):
            ddp(torch.ones(2, 50, dtype=dtype)).float().square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codecs_of_the_core_are_its_own_to_exchange(backend: str, dtype: torch.dtype) -> None:
    run_ranks(by_the_core, dtype, world_size=2, backend=backend)


def moved_between_wrappers(compression: Any) -> None:
    """A state of the hook goes on in a RingDP, one of that in the hook, exact and as the mean."""
    rank, rules = dist.get_rank(), [("0.weight", compression), ("*", None)]

    def start(ring_dp: bool) -> tuple[Any, Any, Any]:
        net: Any = build()
        if ring_dp:
            model: Any = RingDP(net, compression=compression, rules=rules, bucket_cap_mb=0.004)
            return model, model.compression_state_dict, model.load_compression_state_dict
        model = wrapped(net)
        hook, function = ddp_hook(compression, rules=rules, model=model)
        model.register_comm_hook(hook, function)
        return model, hook.state_dict, hook.load_state_dict

    def gradient(model: Any, step: int) -> Tensor:
        model.zero_grad()
        loss_of(model, step, rank).backward()
        averaged: Tensor = model.module[0].weight.grad.clone()
        return averaged

    for from_ring_dp in (False, True):
        for consolidated in (False, True):
            model, save, _ = start(from_ring_dp)
            fresh = gradient(start(from_ring_dp)[0], 3)
            for step in range(3):
                gradient(model, step)
            state = save(consolidated=consolidated)
            results = []
            for ring_dp in (False, True):
                model, save_again, load = start(ring_dp)
                load(state)
                assert save_again(consolidated=consolidated).keys() == state.keys()
                results.append(gradient(model, 3))
            assert torch.equal(*results)
            assert not torch.equal(results[0], fresh)


@pytest.mark.parametrize("compression", ["int4", TopK(0.1)], ids=str)
def test_a_state_moves_between_the_hook_and_ringdp(backend: str, compression: Any) -> None:
    run_ranks(moved_between_wrappers, compression, world_size=2, backend=backend)
