"""Error feedback: nothing is lost for good, overflow leaves no trace, loss scales change no bit, checkpoints fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.compression import DGC, EF21, Bfloat16, ErrorFeedback, Int4, Int8, saved
from ringdp.compression.exchange import Section, States
from ringdp.errors import InvalidArgumentError
from ringdp.testing import Simulation, simulate

COUNT = 5000


def gradients(ranks: int, steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [[torch.randn(COUNT, generator=generator) * 1e-3 for _ in range(ranks)] for _ in range(steps)]


def section(compressor: Any, ranks: int) -> Section:
    return Section("simulated", (COUNT,), 0, COUNT, compressor, ranks)


def owed(compressor: Any, states: Sequence[States]) -> Tensor:
    """The deferred mean: an n-th of what ranks owe, all of what owners owe."""
    ranks = len(states)
    total = torch.zeros(COUNT)
    for rank, state in enumerate(states):
        held = saved.save(section(compressor, ranks), state.of("simulated"))
        total += saved.share(section(compressor, ranks), "residual", held["residual"], rank, ranks)
    return total


def exact(steps: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(list(step)).mean(0) for step in steps]).sum(0)


def test_the_residual_is_what_was_lost() -> None:
    """As others call it: the exchange has a way of its own for this plug-in, which makes no copy."""
    feedback = ErrorFeedback()
    state: dict[str, Any] = {}
    x = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(feedback.before(x, state), x)
    feedback.after(x, torch.tensor([1.5, -2.0, 2.0]), state)
    assert state["residual"].tolist() == [-0.5, 0.0, 1.0]
    assert feedback.before(x, state).tolist() == [0.5, -2.0, 4.0]


class Mine(ErrorFeedback):
    """Not that class: the exchange calls its methods."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plug_in_that_does_the_same_gives_the_same_bits(ranks: int) -> None:
    steps = gradients(ranks, 4)
    own = simulate(Int4(error_feedback=Mine()), steps)
    assert all(torch.equal(*both) for both in zip(own.means, simulate(Int4(), steps).means, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("compressor", [Int4(), Int8(error_feedback=True)], ids=repr)
def test_what_was_sent_and_what_is_owed_is_the_sum(compressor: Any, ranks: int) -> None:
    steps = gradients(ranks, 5)
    done = simulate(compressor, steps)
    total = torch.stack(done.means).sum(0) + owed(compressor, done.states)
    torch.testing.assert_close(total, exact(steps), rtol=0, atol=1e-7)


def test_without_feedback_errors_grow_and_with_it_they_do_not() -> None:
    once = gradients(4, 1)[0]
    steps = [once] * 30
    off = {}
    for feedback in (False, True):
        done = simulate(Int4(error_feedback=feedback), steps)
        off[feedback] = float((torch.stack(done.means).mean(0) - torch.stack(once).mean(0)).norm())
    assert off[True] < off[False] / 8


@pytest.mark.parametrize(
    "one", [ErrorFeedback(), EF21(), DGC(0.8), DGC(0.9, clip=1.0), DGC(0.9, masking=False)], ids=repr
)
def test_plug_ins_with_the_same_settings_are_equal(one: Any) -> None:
    assert Int4(error_feedback=copy.deepcopy(one)) == Int4(error_feedback=pickle.loads(pickle.dumps(one)))
    assert {one: 1}[copy.copy(one)] == 1
    assert one != DGC()


def test_ef21_comes_to_the_gradient_of_a_quiet_problem() -> None:
    """Gradients that stay where they are: the difference, and so the error, shrinks by the code's own factor."""
    once = gradients(3, 1)[0]
    done = simulate(Int4(error_feedback=EF21()), [once] * 8)
    mean = torch.stack(once).mean(0)
    errors = [float((it - mean).norm() / mean.norm()) for it in done.means]
    assert errors[0] > 0.05
    assert errors[4] < 1e-4
    assert errors[-1] < 1e-6


@pytest.mark.parametrize("compressor", [Int4(), Int4(error_feedback=EF21()), Int8(block=100, error_feedback=True)])
def test_an_overflow_leaves_no_trace(compressor: Any) -> None:
    steps = gradients(3, 4)
    hit = [it.clone() for it in gradients(3, 1)[0]]
    hit[1][77] = torch.nan
    clean = simulate(compressor, steps)
    disturbed = simulate(compressor, [*steps[:2], hit, *steps[2:]])
    assert not disturbed.means[2].isfinite().all()
    for one, other in zip(clean.means, disturbed.means[:2] + disturbed.means[3:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compressor", [Int8(error_feedback=True), Int4(), Int4(block=32), Int4(error_feedback=EF21())])
def test_a_loss_scale_that_changes_changes_no_bit(compressor: Any) -> None:
    steps = gradients(3, 3)
    plain = simulate(compressor, steps)
    after: Simulation | None = None
    for step, scale, expected in zip(steps, (2.0**16, 2.0**15, 1.0), plain.means, strict=True):
        after = simulate(compressor, [it * scale for it in step], scale=scale, after=after)
        assert torch.equal(after.mean, expected * scale)


@pytest.mark.parametrize("compressor", [Int4(), Int4(error_feedback=EF21()), Bfloat16(error_feedback=True)])
def test_saved_and_loaded_it_goes_on_to_the_same_bits(compressor: Any) -> None:
    ranks, steps = 3, gradients(3, 6)
    whole = simulate(compressor, steps)
    half = simulate(compressor, steps[:3])
    states = []
    for rank, state in enumerate(half.states):
        held = saved.save(section(compressor, ranks), state.of("simulated"))
        assert all(it.shape == (COUNT,) for it in held.values())
        fresh = States()
        fresh.put("simulated", saved.load(section(compressor, ranks), held, rank))
        states.append(fresh)
    rest = simulate(compressor, steps[3:], after=Simulation(half.means, states, half.steps))
    for one, other in zip(whole.means[3:], rest.means, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks, later", [(4, 2), (2, 5), (3, 3)])
def test_the_mean_over_ranks_loads_at_any_world_size_and_nothing_owed_is_lost(ranks: int, later: int) -> None:
    compressor = Int4()
    done = simulate(compressor, gradients(ranks, 3))
    before = owed(compressor, done.states)
    states = []
    for rank in range(later):
        fresh = States()
        fresh.put("simulated", saved.load(section(compressor, later), {"residual": before}, rank, consolidated=True))
        states.append(fresh)
        residual = fresh.residual("simulated")
        assert residual is not None
        residual = residual.clone()
        own = section(compressor, later).part_of(residual, rank)
        assert torch.equal(own, section(compressor, later).part_of(before, rank))
        own.zero_()
        assert not residual.any(), "what is owed is the owner's to pay"
    steps = gradients(later, 2)
    resumed = simulate(compressor, steps, after=Simulation([], states, 3))
    total = torch.stack(resumed.means).sum(0) + owed(compressor, resumed.states)
    torch.testing.assert_close(total, exact(steps) + before, rtol=0, atol=1e-7)


def test_a_checkpoint_of_another_parameter_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"residual of 'simulated' is float32 \[7\], not float32 \[5000\]"):
        saved.load(section(Int4(), 2), {"residual": torch.zeros(7)}, 0)


def test_an_entry_is_row_by_row() -> None:
    parameter = torch.zeros(3, 4, 2, 2).to(memory_format=torch.channels_last)
    memory = torch.arange(48.0)
    by_row = memory.as_strided(parameter.shape, parameter.stride()).reshape(-1)
    one = Section("w", tuple(parameter.shape), 0, 48, Int4(), 2)
    entry = saved.entry_of(one, parameter, {"residual": memory, "compressor/rank/0/calls": 3})
    assert torch.equal(entry["residual"], by_row)
    assert not torch.equal(by_row, memory)
    held = saved.from_entry(parameter, entry)
    assert held.keys() == {"residual", "compressor/rank/0/calls"}
    assert torch.equal(held["residual"], memory)
