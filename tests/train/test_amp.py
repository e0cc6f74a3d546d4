"""Loss scaling in real training: all ranks skip the same steps, hold the same scale and the same weights, whatever
overflows where; beside torch's scaler to the bit; and nothing looks at gradients twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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
from tests.helpers import logged
from tests.train.harness import backends, each, run_outcomes, run_ranks, same_everywhere
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
        scaler.scale(loss(model, step)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        history.append((stepped(model, scaler, optimizer), scaler.get_scale()))
    return history


def loss(model: nn.Module, step: int) -> Tensor:
    x, y = data(step)
    return nn.functional.mse_loss(model(x), y)


def stepped(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler let the optimizer step."""
    before = next(model.parameters()).detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(before, next(model.parameters()))


def bits(model: nn.Module) -> list[list[int]]:
    return [parameter.detach().view(-1).view(torch.int16).tolist() for parameter in model.parameters()]


def as_torchs(run: Callable[[Any], tuple[nn.Module, Any]], **options: Any) -> tuple[Any, Any]:
    """`run` with our scaler and with torch's: the same history, weights and state, on all ranks. Returns the first's
    history and state."""
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler = kind("cpu", **options)
        model, history = run(scaler)
        results.append((history, bits(model), scaler.state_dict()))
    assert results[0] == results[1]
    assert same_everywhere(results)
    return results[0][0], results[0][2]


# Skipping together.

PLACES = [
    (0, 1, 2, math.inf),  # the first step
    (3, 1, 0, math.nan),  # the last bucket
    (5, 0, 5, -math.inf),  # the first bucket
    *((step, step % 2, step % 6, math.inf) for step in range(8, 13)),  # many in a row
    (16, 0, 0, math.inf),  # two ranks, two parameters
    (16, 1, 4, math.nan),
]


def every_rank_skips_the_same_steps(clip: bool) -> None:
    def run(scaler: Any) -> tuple[nn.Module, Any]:
        model = wrapped(built())
        return model, train(model, scaler, Faults(model, *PLACES), 20, clip=clip)

    history, _ = as_torchs(run, growth_interval=3)
    assert [step for step, (taken, _) in enumerate(history) if not taken] == sorted({it[0] for it in PLACES})


class Branches(nn.Module):
    """Each rank uses the common part and its own branch."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(12, 5)
        self.branches = nn.ModuleList(nn.Linear(12, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.common(x) + self.branches[dist.get_rank()](x)
        return output


def a_parameter_that_one_rank_uses() -> None:
    torch.manual_seed(0)
    model = RingDP(Branches())
    faults = Faults(model, (2, 1, 4, math.inf))  # branches.1.weight, which rank 1 alone uses
    history = train(model, GradScaler("cpu"), faults, 5)
    assert [taken for taken, _ in history] == [True, True, False, True, True]
    assert same_everywhere(history, bits(model))


def the_parameter_and_the_ranks_are_named_once_per_change() -> None:
    with logged("ringdp.amp") as lines:
        model = wrapped(built())
        third = (4, dist.get_rank() % 2, 1, math.inf)  # not on rank 2
        faults = Faults(model, (1, 2, 4, math.nan), (2, 2, 4, math.nan), third)
        train(model, GradScaler("cpu", init_scale=1024.0), faults, 6)
    wanted = [
        "step skipped: the gradient of '4.weight' was not finite on rank 2 of 3; 1 of the last 2 steps were skipped; "
        "the loss scale is now 512",
        "step skipped: the gradient of '0.bias' was not finite on ranks 0, 1 of 3; 3 of the last 5 steps were skipped; "
        "the loss scale is now 128",
    ]
    assert lines == (wanted if dist.get_rank() == 0 else [])


def a_sum_that_overflows_is_of_no_rank() -> None:
    """Both ranks' gradients are finite; float32 has no room for twice as much."""
    with logged("ringdp.amp") as lines:
        model = wrapped(built())
        history = train(model, GradScaler("cpu"), Faults(model, (1, dist.get_rank(), 3, 3e38)), 3)
    assert [taken for taken, _ in history] == [True, False, True]
    assert len(lines) == (dist.get_rank() == 0)
    assert all("'2.bias' was finite on each of 2 ranks, but their sum is not" in line for line in lines)


def never_finite() -> None:
    model = wrapped(built())
    train(model, GradScaler("cpu"), Faults(model, *[(step, 1, 2, math.nan) for step in range(60)]), 60)


def test_fifty_in_a_row_raise_on_every_rank() -> None:
    outcomes = run_outcomes(never_finite, world_size=2, backend="ring")
    texts = {str(outcome.error) for outcome in outcomes}
    assert [type(outcome.error) for outcome in outcomes] == [GradientOverflowError] * 2
    assert len(texts) == 1
    assert "50 steps in a row were skipped: the gradient of '2.weight' was not finite on rank 1 of 2" in texts.pop()


# What is looked at, and what is sent.


def keys(call: Any) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key: event.count for event in profile.key_averages()}


def no_pass_over_gradients_and_no_collective() -> None:
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


def torchs_check_where_no_reducer_looked(kind: str) -> None:
    """Another backend, a communication hook, torch's own wrapper."""

    def run(scaler: Any) -> tuple[nn.Module, Any]:
        model: nn.Module = DistributedDataParallel(built()) if kind == "ddp" else wrapped(built())
        if kind == "hook":
            model.register_comm_hook(None, halved)  # type: ignore[operator]
        return model, train(model, scaler, Faults(model, (1, 1, 2, math.inf), (4, 0, 0, math.nan)), 8)

    history, _ = as_torchs(run, growth_interval=3)
    assert [taken for taken, _ in history] == [step not in (1, 4) for step in range(8)]


def halved(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.skipif("gloo" not in backends(), reason="gloo is not asked for")
def test_where_no_reducer_looked() -> None:
    run_ranks(torchs_check_where_no_reducer_looked, "another backend", backend="gloo")


# Ways to train.


def accumulation() -> None:
    """`no_sync`: an overflow of a step that did not synchronise is found by the one that does."""

    def run(scaler: Any) -> tuple[nn.Module, Any]:
        model = wrapped(built())
        faults = Faults(model, (4, 1, 2, math.inf))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        taken = []
        for step in range(9):
            faults.step = step
            last = step % 3 == 2
            with nullcontext() if last else model.no_sync():
                (scaler.scale(loss(model, step)) / 3).backward()
            if last:
                taken.append(stepped(model, scaler, optimizer))
                optimizer.zero_grad()
        return model, taken

    assert as_torchs(run)[0] == [True, False, True]


def several_optimizers_and_losses() -> None:
    """Only the optimizer whose gradients overflowed skips, as with torch's."""

    def run(scaler: Any) -> tuple[nn.Module, Any]:
        model = wrapped(built())
        faults = Faults(model, (1, 1, 4, math.inf))  # the last layer's weight
        first = torch.optim.SGD([*model.module[0].parameters(), *model.module[2].parameters()], lr=0.05)
        second = torch.optim.SGD(model.module[4].parameters(), lr=0.05)
        changed = []
        for step in range(4):
            faults.step = step
            x, y = data(step)
            output = model(x)
            losses = [nn.functional.mse_loss(output, y), output.abs().mean()]
            torch.autograd.backward(list(scaler.scale(losses)))
            before = bits(model)
            if step % 2 == 0:
                scaler.unscale_(second)
            for optimizer in (first, second):
                scaler.step(optimizer)
            scaler.update()
            changed.append([a != b for a, b in zip(before, bits(model), strict=True)])
            for optimizer in (first, second):
                optimizer.zero_grad()
        return model, changed

    assert as_torchs(run)[0] == [[True] * 4 + [step != 1] * 2 for step in range(4)]


def an_overflow_after_gradients_that_torch_has_not_written_to(case: str) -> None:
    """No torch operation has written to these gradients since: the next backward's are the same tensors."""

    def run(scaler: Any) -> tuple[nn.Module, Any]:
        model = wrapped(built())
        faults = Faults(model, (3, 1, 0, math.inf), (3, 1, 4, math.inf))
        fused = case in ("fused", "loss without a scale")
        first = torch.optim.SGD(model.module[0].parameters(), lr=0.05, fused=fused)
        second = torch.optim.SGD(model.module[4].parameters(), lr=0.05, fused=fused)
        for step in range(6):
            faults.step = step
            model.zero_grad()
            scaled = scaler.scale(loss(model, step))
            (loss(model, step) if case == "loss without a scale" and step == 3 else scaled).backward()
            if case == "step left out" and step == 2:
                continue
            scaler.step(first)
            if case != "second steps less often" or step % 2:
                scaler.step(second)
            scaler.update()
        assert all(bool(weight.isfinite().all()) for weight in model.parameters())
        return model, None

    assert as_torchs(run)[1]["scale"] == 32768.0


def two_backwards_before_a_step() -> None:
    """What the first one brought is still there after the second, which synchronises too."""
    model, scaler = wrapped(built()), GradScaler("cpu")
    faults = Faults(model, (0, 1, 2, math.inf))
    for step in range(2):
        faults.step = step
        scaler.scale(loss(model, step)).backward()
    assert not stepped(model, scaler, torch.optim.SGD(model.parameters(), lr=0.05))


def uneven_inputs() -> None:
    model, scaler = wrapped(built()), GradScaler("cpu")
    faults = Faults(model, (1, 1, 2, math.inf), (3, 1, 2, math.inf))
    with model.join():
        history = train(model, scaler, faults, 3 + 2 * dist.get_rank())
    scales = [scale for _, scale in history]
    assert scales == [65536.0, 32768.0, 32768.0, 16384.0, 16384.0][: len(scales)]
    assert same_everywhere(bits(model))


def resuming_is_exact() -> None:
    """The state in the middle of a growth interval, loaded into a new scaler: to the bit as without a break."""
    faults = [(2, 0, 3, math.inf), (6, 1, 0, math.nan)]

    def begin(steps: int) -> tuple[RingDP, GradScaler]:
        model = wrapped(built())
        scaler = GradScaler("cpu", init_scale=3e4, growth_factor=1.3, growth_interval=3)
        train(model, scaler, Faults(model, *faults), steps)
        return model, scaler

    (model, scaler), (half, before) = begin(10), begin(5)
    again, after = wrapped(built()), GradScaler("cpu")
    again.load_state_dict(half.state_dict())
    after.load_state_dict(before.state_dict())
    train(again, after, Faults(again, *faults), 5, start=5)
    assert after.state_dict() == scaler.state_dict()
    assert bits(again) == bits(model)


def low_precision(dtype: torch.dtype, parameters_too: bool) -> None:
    """Under autocast, or with such parameters."""

    def run(scaler: Any) -> tuple[nn.Module, Any]:
        model = wrapped(built().to(dtype) if parameters_too else built())
        faults = Faults(model, (2, 1, 2, math.inf))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        taken = []
        for step in range(4):
            faults.step = step
            x, y = data(step)
            with nullcontext() if parameters_too else torch.autocast("cpu", dtype):
                value = nn.functional.mse_loss(model(x.to(dtype) if parameters_too else x).float(), y)
            scaler.scale(value).backward()
            taken.append(stepped(model, scaler, optimizer))
            optimizer.zero_grad()
        return model, taken

    assert as_torchs(run)[0] == [True, True, False, True]


# With compression.


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 5))


def an_overflow_leaves_nothing_in_compressed_runs(compression: Any, number: int) -> None:
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


# What torch's PowerSGD does with one overflow.


def one_overflow_poisons_torchs_power_sgd_and_not_this() -> None:
    for hook in (False, True):
        model: nn.Module = DistributedDataParallel(built()) if hook else wrapped(built())
        if hook:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[operator]
        scaler = (torch.amp.GradScaler if hook else GradScaler)("cpu", init_scale=1024.0)
        scales = [scale for _, scale in train(model, scaler, Faults(model, (5, 1, 2, math.inf)), 12)]
        after = [1024.0 / 2**power for power in range(1, 8)] if hook else [512.0] * 7
        assert scales == [1024.0] * 5 + after


def test_two_ranks() -> None:
    run_ranks(
        each,
        partial(every_rank_skips_the_same_steps, False),
        a_sum_that_overflows_is_of_no_rank,
        no_pass_over_gradients_and_no_collective,
        *(partial(torchs_check_where_no_reducer_looked, kind) for kind in ("hook", "ddp")),
        accumulation,
        several_optimizers_and_losses,
        *(
            partial(an_overflow_after_gradients_that_torch_has_not_written_to, case)
            for case in ("fused", "second steps less often", "step left out", "loss without a scale")
        ),
        two_backwards_before_a_step,
        uneven_inputs,
        resuming_is_exact,
        *(partial(low_precision, dtype, False) for dtype in (torch.bfloat16, torch.float16)),
        partial(low_precision, torch.bfloat16, True),
        one_overflow_poisons_torchs_power_sgd_and_not_this,
        backend="ring",
    )


def test_three_ranks() -> None:
    run_ranks(
        each,
        partial(every_rank_skips_the_same_steps, True),
        a_parameter_that_one_rank_uses,
        the_parameter_and_the_ranks_are_named_once_per_change,
        *(
            partial(an_overflow_leaves_nothing_in_compressed_runs, compression, number)
            for compression, number in (
                ("int8", 0),
                ("int8", 5),
                ("int4", 2),
                (Int8(block=128), 0),
                (Int8(block=128), 2),
            )
        ),
        world_size=3,
        backend="ring",
    )
