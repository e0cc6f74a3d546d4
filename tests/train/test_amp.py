"""Loss scaling in real training: all ranks skip the same steps, hold the same scale and the same weights, whatever
overflows where; beside torch's scaler to the bit; and nothing looks at gradients twice."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ringdp.amp import GradScaler
from ringdp.compression import Int8
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import GradientOverflowError
from tests.train.harness import backends, run_outcomes, run_ranks
from tests.train.models import mlp

CHECK = "aten::_amp_foreach_non_finite_check_and_unscale_"


def data(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(6, 12, generator=generator), torch.randn(6, 5, generator=generator)


class Faults:
    """Puts a value into a parameter's own gradient on one rank in some steps: (step, rank, parameter, value)."""

    def __init__(self, model: nn.Module, *places: tuple[int, int, int, float]) -> None:
        self.step = 0
        self._places = {(step, number): (rank, value) for step, rank, number, value in places}
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda gradient, number=number: self._change(gradient, number))

    def _change(self, gradient: Tensor, number: int) -> Tensor:
        rank, value = self._places.get((self.step, number), (-1, 0.0))
        if rank != dist.get_rank():
            return gradient
        changed = gradient.clone()
        changed.view(-1)[-1] = value
        return changed


def wrapped(net: nn.Module, **options: Any) -> RingDP:
    return RingDP(net, bucket_cap_mb=0.002, **options)  # several buckets


def built() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def train(
    model: nn.Module, scaler: Any, faults: Faults, steps: int, *, clip: bool = False, start: int = 0
) -> list[tuple[bool, float]]:
    """Whether each step was taken, and the scale after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = []
    for step in range(start, start + steps):
        faults.step = step
        optimizer.zero_grad()
        x, y = data(step)
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = next(model.parameters()).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        history.append((not torch.equal(before, next(model.parameters())), scaler.get_scale()))
    return history


def same_everywhere(*what: Any) -> bool:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, what)
    return all(one == everybody[0] for one in everybody)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def bits(model: nn.Module) -> list[list[int]]:
    return [weight.view(-1).view(torch.int32).tolist() for weight in weights(model)]


# Skipping together.

PLACES = {
    "first step": [(0, 1, 2, math.inf)],
    "last bucket": [(3, 1, 0, math.nan)],
    "first bucket": [(3, 0, 5, -math.inf)],
    "many in a row": [(step, step % 2, step % 6, math.inf) for step in range(2, 7)],
    "two ranks, two parameters": [(2, 0, 0, math.inf), (2, 1, 4, math.nan)],
}


def skips_agree(places: list[tuple[int, int, int, float]], clip: bool) -> None:
    """Ours and torch's scaler on the same RingDP give the same, which is the same on all ranks."""
    expected = sorted({step for step, _, _, _ in places})
    results = []
    for scaler in (GradScaler("cpu", growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)):
        model = wrapped(built())
        history = train(model, scaler, Faults(model, *places), 10, clip=clip)
        assert same_everywhere(history, bits(model))
        results.append((history, weights(model), scaler.state_dict()))
    (history, ours, state), (their_history, theirs, their_state) = results
    assert [step for step, (taken, _) in enumerate(history) if not taken] == expected
    assert history == their_history
    assert state == their_state
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("name", PLACES)
def test_every_rank_skips_the_same_steps(name: str, world_size: int) -> None:
    run_ranks(skips_agree, PLACES[name], world_size == 3, world_size=world_size, backend="ring")


class Branches(nn.Module):
    """Each rank uses the common part and its own branch."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(12, 5)
        self.branches = nn.ModuleList(nn.Linear(12, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.common(x) + self.branches[dist.get_rank()](x)
        return output


def parameter_of_one_rank() -> None:
    torch.manual_seed(0)
    model = RingDP(Branches())
    scaler = GradScaler("cpu")
    faults = Faults(model, (2, 1, 4, math.inf))  # branches.1.weight, which rank 1 alone uses
    history = train(model, scaler, faults, 5)
    assert [taken for taken, _ in history] == [True, True, False, True, True]
    assert same_everywhere(history, bits(model))


def test_a_parameter_that_one_rank_uses() -> None:
    run_ranks(parameter_of_one_rank, world_size=3, backend="ring")


def only_the_sum_overflows() -> list[str]:
    """Both ranks' gradients are finite; float32 has no room for twice as much."""
    records = Records("ringdp.amp")
    model = wrapped(built())
    history = train(model, GradScaler("cpu"), Faults(model, (1, dist.get_rank(), 3, 3e38)), 3)
    assert [taken for taken, _ in history] == [True, False, True]
    return records.messages


class Records(logging.Handler):
    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_a_sum_that_overflows_is_nobodys() -> None:
    first, second = run_ranks(only_the_sum_overflows, backend="ring")
    assert "'2.bias' was finite on each of 2 ranks, but their sum is not" in first[-1]
    assert second == []


def names_who() -> list[str]:
    records = Records("ringdp.amp")
    model = wrapped(built())
    third = (4, dist.get_rank() % 2, 1, math.inf)  # not on rank 2
    faults = Faults(model, (1, 2, 4, math.nan), (2, 2, 4, math.nan), third)
    train(model, GradScaler("cpu", init_scale=1024.0), faults, 6)
    return records.messages


def test_the_parameter_and_the_ranks_are_named_once_per_change() -> None:
    messages, *others = run_ranks(names_who, world_size=3, backend="ring")
    assert messages == [
        "step skipped: the gradient of '4.weight' was not finite on rank 2 of 3; 1 of the last 2 steps were skipped; "
        "the loss scale is now 512",
        "step skipped: the gradient of '0.bias' was not finite on ranks 0, 1 of 3; 3 of the last 5 steps were skipped; "
        "the loss scale is now 128",
    ]
    assert others == [[], []]


def never_finite() -> None:
    model = wrapped(built())
    train(model, GradScaler("cpu"), Faults(model, *[(step, 1, 2, math.nan) for step in range(60)]), 60)


def test_fifty_in_a_row_raise_on_every_rank() -> None:
    outcomes = run_outcomes(never_finite, world_size=3, backend="ring")
    texts = {str(outcome.error) for outcome in outcomes}
    assert [type(outcome.error) for outcome in outcomes] == [GradientOverflowError] * 3
    assert len(texts) == 1
    assert "50 steps in a row were skipped: the gradient of '2.weight' was not finite on rank 1 of 3" in texts.pop()


# What is looked at, and what is sent.


def keys(call: Any) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key: event.count for event in profile.key_averages()}


def no_pass_and_no_collective() -> None:
    counts = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu"), GradScaler("cpu", enabled=False)):
        model = wrapped(built())
        faults = Faults(model)
        train(model, scaler, faults, 3)  # buckets are laid out anew in the first steps
        counts.append(keys(lambda s=scaler, m=model, f=faults: train(m, s, f, 1)))
    ours, torchs, without = counts
    assert CHECK not in ours
    assert CHECK in torchs
    assert "aten::isfinite" not in ours
    sent = [{name: count for name, count in one.items() if name.startswith("ring:")} for one in counts]
    assert sent[0] == sent[2]
    assert sent[0]
    assert "aten::_foreach_mul_" in ours
    assert "aten::_foreach_mul_" not in without


def test_nothing_looks_at_gradients_and_nothing_more_is_sent() -> None:
    run_ranks(no_pass_and_no_collective, backend="ring")


def as_torchs_where_nobody_looks(kind: str) -> None:
    """Another backend, a communication hook, torch's own wrapper: torch's check, the same results."""
    results = []
    for scaler in (GradScaler("cpu", growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)):
        if kind == "ddp":
            model: nn.Module = DistributedDataParallel(built())
        else:
            model = wrapped(built())
        if kind == "hook":
            model.register_comm_hook(None, halved)  # type: ignore[operator]
        history = train(model, scaler, Faults(model, (1, 1, 2, math.inf), (4, 0, 0, math.nan)), 8)
        assert [taken for taken, _ in history] == [step not in (1, 4) for step in range(8)]
        assert same_everywhere(history, bits(model))
        results.append((history, bits(model), scaler.state_dict()))
    assert results[0] == results[1]


def halved(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize(("kind", "backend"), (("ring", "gloo"), ("hook", "ring"), ("ddp", "ring")))
def test_where_no_reducer_looked(kind: str, backend: str) -> None:
    if backend in backends():
        run_ranks(as_torchs_where_nobody_looks, kind, backend=backend)


# Ways to train.


def accumulated() -> None:
    """`no_sync`: an overflow of a step that did not synchronise is found by the one that does."""
    results = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        model = wrapped(built())
        faults = Faults(model, (4, 1, 2, math.inf))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        taken = []
        for step in range(9):
            faults.step = step
            last = step % 3 == 2
            with nullcontext() if last else model.no_sync():
                x, y = data(step)
                (scaler.scale(nn.functional.mse_loss(model(x), y)) / 3).backward()
            if last:
                before = weights(model)[0]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                taken.append(not torch.equal(before, weights(model)[0]))
        assert taken == [True, False, True]
        results.append((bits(model), scaler.state_dict()))
    assert results[0] == results[1]
    assert same_everywhere(results)


def test_accumulation() -> None:
    run_ranks(accumulated, backend="ring")


def several_optimizers_and_losses() -> None:
    """Only the optimizer whose gradients overflowed skips, as with torch's."""
    results = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        model = wrapped(built())
        faults = Faults(model, (1, 1, 4, math.inf))  # the last layer's weight
        first = torch.optim.SGD([*model.module[0].parameters(), *model.module[2].parameters()], lr=0.05)
        second = torch.optim.SGD(model.module[4].parameters(), lr=0.05)
        for step in range(4):
            faults.step = step
            x, y = data(step)
            output = model(x)
            losses = [nn.functional.mse_loss(output, y), output.abs().mean()]
            torch.autograd.backward(list(scaler.scale(losses)))
            before = weights(model)
            if step % 2 == 0:
                scaler.unscale_(second)
            for optimizer in (first, second):
                scaler.step(optimizer)
            scaler.update()
            changed = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
            assert changed == ([True] * 4 + [False] * 2 if step == 1 else [True] * 6)
            for optimizer in (first, second):
                optimizer.zero_grad()
        results.append((bits(model), scaler.state_dict()))
    assert results[0] == results[1]
    assert same_everywhere(results)


def test_several_optimizers_and_losses() -> None:
    run_ranks(several_optimizers_and_losses, backend="ring")


def losses_without_a_step(case: str) -> None:
    """Gradients that no torch operation has written to since: the next backward's are the same tensors."""
    results = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        model = wrapped(built())
        faults = Faults(model, (3, 1, 0, math.inf), (3, 1, 4, math.inf))
        fused = case in ("fused", "loss without a scale")
        first = torch.optim.SGD(model.module[0].parameters(), lr=0.05, fused=fused)
        second = torch.optim.SGD(model.module[4].parameters(), lr=0.05, fused=fused)
        for step in range(6):
            faults.step = step
            model.zero_grad()
            x, y = data(step)
            scaled = scaler.scale(nn.functional.mse_loss(model(x), y))
            if case == "loss without a scale" and step == 3:
                nn.functional.mse_loss(model(x), y).backward()
            else:
                scaled.backward()
            if case == "step left out" and step == 2:
                continue
            scaler.step(first)
            if case != "second steps less often" or step % 2:
                scaler.step(second)
            scaler.update()
        assert all(bool(weight.isfinite().all()) for weight in weights(model))
        results.append((bits(model), scaler.state_dict()))
    assert results[0] == results[1]
    assert results[0][1]["scale"] == 32768.0


@pytest.mark.parametrize("case", ("fused", "second steps less often", "step left out", "loss without a scale"))
def test_an_overflow_after_gradients_that_nobody_wrote_to(case: str) -> None:
    run_ranks(losses_without_a_step, case, backend="ring")


def two_backwards_before_a_step() -> None:
    """What the first one brought is still there after the second, which synchronises too."""
    model, scaler = wrapped(built()), GradScaler("cpu")
    faults = Faults(model, (0, 1, 2, math.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = bits(model)
    for step in range(2):
        faults.step = step
        x, y = data(step)
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    assert bits(model) == before


def test_two_backwards_before_a_step() -> None:
    run_ranks(two_backwards_before_a_step, backend="ring")


def uneven_inputs() -> None:
    model, scaler = wrapped(built()), GradScaler("cpu")
    faults = Faults(model, (1, 1, 2, math.inf), (3, 1, 2, math.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales = []
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            faults.step = step
            x, y = data(step)
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales == [65536.0, 32768.0, 32768.0, 16384.0, 16384.0][: len(scales)]
    assert same_everywhere(bits(model))


def test_join() -> None:
    run_ranks(uneven_inputs, backend="ring")


def resumed() -> None:
    """The state in the middle of a growth interval, loaded into a new scaler: to the bit as without a break."""
    model = wrapped(built())
    faults = [(2, 0, 3, math.inf), (6, 1, 0, math.nan)]
    scaler = GradScaler("cpu", init_scale=3e4, growth_factor=1.3, growth_interval=3)
    train(model, scaler, Faults(model, *faults), 10)
    half = wrapped(built())
    before = GradScaler("cpu", init_scale=3e4, growth_factor=1.3, growth_interval=3)
    train(half, before, Faults(half, *faults), 5)
    again, after = wrapped(built()), GradScaler("cpu")
    again.load_state_dict(half.state_dict())
    after.load_state_dict(before.state_dict())
    train(again, after, Faults(again, *faults), 5, start=5)
    assert after.state_dict() == scaler.state_dict()
    assert bits(again) == bits(model)


def test_resuming_is_exact() -> None:
    run_ranks(resumed, backend="ring")


def under_autocast(dtype: torch.dtype, low_parameters: bool) -> None:
    results = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        model = wrapped(built().to(dtype) if low_parameters else built())
        faults = Faults(model, (2, 1, 2, math.inf))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            faults.step = step
            x, y = data(step)
            context = nullcontext() if low_parameters else torch.autocast("cpu", dtype)
            with context:
                loss = nn.functional.mse_loss(model(x.to(dtype) if low_parameters else x).float(), y)
            scaler.scale(loss).backward()
            before = weights(model)[0]
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weights(model)[0]) is (step == 2)
            optimizer.zero_grad()
        results.append(([weight.tolist() for weight in weights(model)], scaler.state_dict()))
    assert results[0] == results[1]
    assert same_everywhere(results)


@pytest.mark.parametrize(
    ("dtype", "low_parameters"), ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True))
)
def test_autocast_and_low_precision_parameters(dtype: torch.dtype, low_parameters: bool) -> None:
    run_ranks(under_autocast, dtype, low_parameters, backend="ring")


# With compression.


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 5))


def nothing_is_left_of_it(compression: Any, number: int) -> None:
    """A run with an overflow in step 3 is to the bit the run that has no step 3: no residual has seen it, and halving
    the scale changes no code."""
    skipping, without = (RingDP(wide(), compression=compression) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=1024.0)
    history = train(skipping, scaler, Faults(skipping, (3, 1, number, math.inf)), 8)
    assert [scale for _, scale in history] == [1024.0] * 3 + [512.0] * 5
    other = GradScaler("cpu", init_scale=1024.0)
    train(without, other, Faults(without), 3)
    train(without, other, Faults(without), 4, start=4)
    assert bits(skipping) == bits(without)
    assert same_everywhere(bits(skipping))


@pytest.mark.parametrize("number", (0, pytest.param(2, marks=pytest.mark.ci), 5), ids=("first", "second", "exact"))
@pytest.mark.parametrize(
    "compression",
    ("int8", pytest.param("int4", marks=pytest.mark.ci), Int8(block=128)),
    ids=("int8", "int4", "in Python"),
)
def test_an_overflow_leaves_nothing_in_compressed_runs(compression: Any, number: int) -> None:
    run_ranks(nothing_is_left_of_it, compression, number, world_size=3, backend="ring")


# What torch's PowerSGD does with one overflow.


def poisoned(hook: bool) -> list[float]:
    """The scale after each step, with an overflow in the sixth."""
    if hook:
        model: nn.Module = DistributedDataParallel(built())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[operator]
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    else:
        model, scaler = wrapped(built()), GradScaler("cpu", init_scale=1024.0)
    return [scale for _, scale in train(model, scaler, Faults(model, (5, 1, 2, math.inf)), 12)]


def test_one_overflow_poisons_torchs_power_sgd_and_not_this() -> None:
    assert run_ranks(poisoned, False, backend="ring") == [[1024.0] * 5 + [512.0] * 7] * 2
    theirs = run_ranks(poisoned, True, backend="ring")[0]
    assert theirs == [1024.0] * 5 + [1024.0 / 2**power for power in range(1, 8)]
