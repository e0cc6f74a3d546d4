"""Compressing hooks on torch's DDP: the same bits on all ranks and in the simulation, overflow, checkpoints, errors."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp import Compression
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
from tests.train.harness import backends, each, run_ranks

ON_BOTH = pytest.mark.parametrize("backend", backends())

COMPRESSED = ("0.weight", "2.weight")  # the others are exact by default


def hooked(model: nn.Module, compressor: Any, **options: Any) -> tuple[DistributedDataParallel, Any]:
    ddp = wrapped(model)
    hook, function = ddp_hook(compressor, model=ddp, **options)
    ddp.register_comm_hook(hook, function)
    return ddp, hook


def trained(name: str, steps: int, overflow_at: int | None = None) -> list[dict[str, Any]]:
    """By step: every parameter's own and averaged gradient, and the parameters' digest."""
    model, alone, rank = build(), build(), dist.get_rank()
    ddp, _ = hooked(model, COMPRESSORS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        overflow = step == overflow_at and rank == dist.get_world_size() - 1
        alone.load_state_dict(model.state_dict())
        for one in (ddp, alone):
            one.zero_grad()
            loss_of(one, step, rank, overflow=overflow).backward()
        averaged, own = ({n: p.grad.clone() for n, p in it.named_parameters()} for it in (model, alone))  # type: ignore[union-attr]
        if step != overflow_at:
            optimizer.step()
        seen.append({"own": own, "averaged": averaged, "digest": digest(model.parameters())})
    return seen


def check_bits(compressor: Any, ranks: list[list[dict[str, Any]]], overflow_at: int | None = None) -> None:
    """All ranks agree in every step, and are where the simulation is; an overflow leaves no trace in it."""
    world = len(ranks)
    for step, seen in enumerate(zip(*ranks, strict=True)):
        assert len({it["digest"] for it in seen}) == 1, step
        assert len({digest(it["averaged"].values()) for it in seen}) == 1, step
        for name in COMPRESSED:
            finite = seen[0]["averaged"][name].isfinite()
            assert not finite.any() if step == overflow_at else finite.all(), (name, step)
    for name in ranks[0][0]["own"]:
        before: Simulation | None = None
        for step, averaged in enumerate(it["averaged"][name] for it in ranks[0]):
            own = [it[step]["own"][name] for it in ranks]
            if name in COMPRESSED:
                before = simulate(compressor, own, world, name=name, after=before)
                torch.testing.assert_close(averaged, before.mean, rtol=0, atol=0, equal_nan=True, msg=f"{name} {step}")
            else:
                mean = sum(it.double() for it in own) / world
                torch.testing.assert_close(averaged.double(), mean, equal_nan=True)


OVER_GLOO = ("int4 EF21", "steps", "gathered", "large", "large gathered", "folded", "rounded", "low rank")


@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend in backends() for name in COMPRESSORS
                          if backend == "ring" or name in OVER_GLOO]
)  # fmt: skip
def test_all_ranks_have_the_bits_of_the_simulation_and_an_overflow_leaves_no_trace(backend: str, name: str) -> None:
    world = 2 if name in ROUNDED_BY_THE_BACKEND else 3
    check_bits(COMPRESSORS[name], run_ranks(trained, name, 4, 1, world_size=world, backend=backend), 1)


@pytest.mark.parametrize(
    "world", [2, pytest.param(4, marks=pytest.mark.ci), *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))]
)
@pytest.mark.parametrize("name", ["int4", "large", "top k"])
@ON_BOTH
def test_in_other_worlds(backend: str, name: str, world: int) -> None:
    check_bits(COMPRESSORS[name], run_ranks(trained, name, 3, world_size=world, backend=backend, timeout_s=100))


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


@ON_BOTH
def test_members_of_a_group_meet_whatever_other_groups_they_are_in(backend: str) -> None:
    first, *pair = run_ranks(among_other_groups, world_size=3, backend=backend, timeout_s=20)
    assert pair[0] == pair[1]
    assert pair[0][:2] == first
    assert len(set(pair[0])) == 4


# Each of these is run by every rank of two.


def resumed_from_a_checkpoint_it_goes_on_to_the_same_bits() -> None:
    rank = dist.get_rank()

    def run(model: nn.Module, steps: range, saved: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
        ddp, hook = hooked(model, Compression("int4", [("4.weight", Random())]))
        if saved is not None:
            hook.load_state_dict(saved)
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
    assert whole == first + second


def ranks_that_load_states_of_different_steps_are_told() -> None:
    ddp, hook = hooked(build(), RandomK(0.1))
    states = []
    for step in range(2):
        loss_of(ddp, step, dist.get_rank()).backward()
        states.append(hook.state_dict())
    if dist.get_rank() == 1:
        hook.load_state_dict(states[0])
    with pytest.raises(MismatchError, match="rank 0 has compressed 2 steps before this one, rank 1 1\\."):
        loss_of(ddp, 2, dist.get_rank()).backward()


def what_bfloat16_gradients_owe_is_remembered_as_that_of_float32() -> None:
    ddp, hook = hooked(build().to(torch.bfloat16), "int4")
    another, _ = ddp_hook("int4", model=ddp)
    ddp(torch.ones(2, 50, dtype=torch.bfloat16)).float().square().sum().backward()
    another.load_state_dict(hook.state_dict())
    [mine], [theirs] = hook.state_dict()["ranks"].values(), another.state_dict()["ranks"].values()
    for name in COMPRESSED:
        assert bool(mine[name]["residual"].any())
        assert torch.equal(mine[name]["residual"], theirs[name]["residual"])


def no_sync_compresses_once_and_residuals_are_kept_without_the_loss_scale() -> None:
    states = []
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.zeros(()))
        ddp, hook = hooked(build(), "int4", scaler=scaler)
        for step in (0, 2):
            with ddp.no_sync():
                scaler.scale(loss_of(ddp, step, dist.get_rank())).backward()
            scaler.scale(loss_of(ddp, step + 1, dist.get_rank())).backward()
        state = hook.state_dict()
        assert state["steps"] == 2
        states.append(state["ranks"][str(dist.get_rank())])
    for name in COMPRESSED:
        assert torch.equal(states[0][name]["residual"], states[1][name]["residual"])


def other_types_and_strides() -> None:
    """Parameters of several dtypes, one of them complex, tied and strided ones."""
    for name in ("mixed_types", "tied"):
        model = models.build(name)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(*ddp_hook(Compression("bf16", [("*", "bf16")]), model=ddp))
        x, y = models.batch(0, dist.get_rank())
        nn.functional.cross_entropy(ddp(x), y).backward()
        exact = DistributedDataParallel(models.build(name))
        nn.functional.cross_entropy(exact(x), y).backward()
        for one, other in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-3)


def without_the_model_parameters_are_numbered() -> None:
    ddp = wrapped(build())
    hook, function = ddp_hook("int4")
    ddp.register_comm_hook(hook, function)
    for step in range(3):  # buckets are laid out anew after the first
        loss_of(ddp, step, dist.get_rank()).backward()
    [entries] = hook.state_dict()["ranks"].values()
    assert {it["residual"].numel() for it in entries.values()} == {5000, 2400}
    with pytest.raises(InvalidArgumentError):
        ddp_hook(Compression("int8", [("*.bias", None)]))


def codecs_of_the_core_are_its_own_to_exchange() -> None:
    """The compressor's own methods are not called, whatever moves the bytes."""
    with mock.patch.object(Int4, "compress", side_effect=AssertionError("in Python")):
        for dtype in (torch.float32, torch.bfloat16):
            ddp, _ = hooked(build().to(dtype), "int4")
            for _ in range(2):
                ddp(torch.ones(2, 50, dtype=dtype)).float().square().sum().backward()


def a_state_moves_between_the_hook_and_ringdp() -> None:
    for compression in ("int4", TopK(0.1)):
        moved_between_wrappers(compression)


def moved_between_wrappers(compression: Any) -> None:
    """A state of the hook goes on in a RingDP, one of that in the hook, exact and as the mean."""
    rank, rules = dist.get_rank(), [("0.weight", compression), ("*", None)]

    def start(ring_dp: bool) -> tuple[Any, Any, Any]:
        net: Any = build()
        if ring_dp:
            model: Any = RingDP(net, compression=Compression(compression, rules), bucket_cap_mb=0.004)
            return model, model.compression_state_dict, model.load_compression_state_dict
        model, hook = hooked(net, Compression(compression, rules))
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


@ON_BOTH
def test_what_a_hook_does_and_remembers(backend: str) -> None:
    run_ranks(
        each,
        resumed_from_a_checkpoint_it_goes_on_to_the_same_bits,
        ranks_that_load_states_of_different_steps_are_told,
        what_bfloat16_gradients_owe_is_remembered_as_that_of_float32,
        no_sync_compresses_once_and_residuals_are_kept_without_the_loss_scale,
        other_types_and_strides,
        without_the_model_parameters_are_numbered,
        codecs_of_the_core_are_its_own_to_exchange,
        a_state_moves_between_the_hook_and_ringdp,
        backend=backend,
    )


def consolidated() -> dict[str, Any]:
    ddp, hook = hooked(build(), "int4")
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
        ddp, hook = hooked(frozen, "int4")
        hook.load_state_dict(state)
        loss_of(ddp, 3, dist.get_rank()).backward()
        [exact], whole = hook.state_dict()["ranks"].values(), hook.state_dict(consolidated=True)["parameters"]
        assert torch.equal(whole["0.weight"]["residual"], mean["parameters"]["0.weight"]["residual"])
        assert not torch.equal(whole["2.weight"]["residual"], mean["parameters"]["2.weight"]["residual"])
        if state is own:
            mine = own["ranks"][str(dist.get_rank())]["0.weight"]
            torch.testing.assert_close(exact["0.weight"]["residual"], mine["residual"], rtol=0, atol=0)
    return mean


@ON_BOTH
def test_the_mean_over_ranks_is_the_same_on_all_and_on_both_ways(backend: str) -> None:
    means = run_ranks(consolidated, world_size=3, backend=backend)
    for mean in means:
        assert "ranks" not in mean
        for name in COMPRESSED:
            residual = mean["parameters"][name]["residual"]
            assert torch.equal(residual, means[0]["parameters"][name]["residual"])
            assert float(residual.abs().max()) > 0


# What rank 0 and rank 1 compress by, and what each of them raises.
DISAGREEMENTS: dict[str, tuple[Any, Any, list[tuple[type[Exception], str]]]] = {
    "compressor": (
        Int8(block=100), Steps(),
        [(MismatchError, r"rank 0 has \S+ \[\d+\] by Int8\(block=100.*rank 1 has \S+ \[\d+\] by Steps")] * 2,
    ),
    "block": (Int8(block=100), Int8(block=101), [(MismatchError, "block=100.*block=101")] * 2),
    "core": (
        Int8(), Steps(), [(MismatchError, r"rank 0 has \S+ \[\d+\] by Int8\(.*rank 1 has \S+ \[\d+\] by Steps")] * 2
    ),
    "exact": (
        None, Steps(), [(MismatchError, r"rank 0 has \S+ \[\d+\] exact; rank 1 has \S+ \[\d+\] by Steps")] * 2
    ),
    "size": (
        Steps(), Shrinking(),
        [(RingError, "rank 1 could not compress a bucket: InvalidArgumentError"),
         (InvalidArgumentError, "set fixed_size = False")],
    ),
    "raises": (
        Steps(), Raising(),
        [(RingError, "^rank 1 could not compress a bucket: ZeroDivisionError: nothing to"),
         (ZeroDivisionError, "^nothing to divide by")],
    ),
    "swells": (
        Large(), Swelling(),
        [(RingError, "rank 1 could not compress a bucket: "),
         (InvalidArgumentError, "more than 16 an element is not sent")],
    ),
}  # fmt: skip


def disagreeing(what: str) -> None:
    compressor = copy.copy(DISAGREEMENTS[what][dist.get_rank()])
    if what in ("size", "raises", "swells"):  # of one class, as far as the others can tell
        compressor.__class__ = type("Mine", (type(compressor),), {})
    ddp, _ = hooked(build(), compressor)
    kind, words = DISAGREEMENTS[what][2][dist.get_rank()]
    with pytest.raises(Exception) as caught:
        loss_of(ddp, 0, dist.get_rank()).backward()
    assert type(caught.value) is kind
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize("what", DISAGREEMENTS)
@ON_BOTH
def test_where_ranks_disagree_all_of_them_raise(backend: str, what: str) -> None:
    run_ranks(disagreeing, what, world_size=2, backend=backend, timeout_s=15)
