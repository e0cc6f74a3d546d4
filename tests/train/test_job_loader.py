"""A Job that is not elastic: its loader where a batch has fewer samples than there are ranks, and its rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringdp
from ringdp import refusals
from ringdp.errors import InvalidArgumentError
from tests.train.harness import run_ranks


def last_gradient(weight: str) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = ringdp.RingDP(torch.nn.Linear(3, 1), weight=weight)
    job = ringdp.elastic.Job(model, torch.optim.SGD(model.parameters(), 0.1))
    data = torch.utils.data.TensorDataset(torch.arange(21.0).reshape(7, 3))
    loader = job.loader(data, 3, shuffle=False)
    rows = 0
    for _ in job.epochs(1):
        for (x,) in loader:
            if weight == "call":
                model.set_weight(len(x))
            model.zero_grad()
            model(x).square().mean().backward()
            rows += len(x)
    assert model.module.weight.grad is not None
    return rows, model.module.weight.grad.flatten().tolist()


def gradient_where_one_rank_has_validated() -> list[float]:
    model = ringdp.RingDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    # As after a forward without gradients, which a newcomer has not run: then no buffers are sent.
    model.require_forward_param_sync = ringdp.rank() == 1
    model.begin_again(7)
    model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
    gradient = model.module[0].weight.grad
    assert gradient is not None
    return gradient.flatten().tolist()


def test_ranks_that_begin_again_send_the_same_buffers() -> None:
    first, second = run_ranks(gradient_where_one_rank_has_validated, world_size=2, backend="ring")
    assert first == second


def test_a_rank_without_a_sample_counts_nothing_in_the_mean() -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1)
    alone(torch.arange(21.0).reshape(7, 3)[6:]).square().mean().backward()
    assert alone.weight.grad is not None
    expected = alone.weight.grad.flatten().tolist()
    for weight in ("samples", "call"):
        for rows, gradient in run_ranks(last_gradient, weight, world_size=3, backend="ring"):
            assert (rows, gradient) == (3, expected)


def rounds_of_an_epoch(steps: int, saved: Any = None) -> tuple[list[int], dict[str, Any], list[float]]:
    """Trains so many steps. The samples that this rank had, the job's state behind them, and the global parameters."""
    torch.manual_seed(0)
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.5)
    rounds = ringdp.DiLoCo(module, optimizer, every=4, compression="int8")
    job = ringdp.elastic.Job(rounds, optimizer)
    loader = job.loader(torch.utils.data.TensorDataset(torch.arange(24.0).reshape(24, 1) / 24), 4, seed=2)
    if saved is not None:
        job.load_state_dict(saved)
    seen: list[int] = []
    for _ in job.epochs(1):
        for (x,) in loader:
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += (x.flatten() * 24).round().int().tolist()
            if job.step == steps:
                break
        break
    with rounds.global_parameters():
        parameters = [float(it) for it in module.parameters()]
    return seen, job.state_dict(), parameters


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_job_of_rounds_goes_on_within_a_round_at_another_number_of_ranks(ranks: int) -> None:
    first = run_ranks(rounds_of_an_epoch, 3, world_size=2, backend="ring")
    states = [state for _, state, _ in first]
    assert states[0]["ringdp"] == states[1]["ringdp"]
    assert states[0]["ringdp"]["step"] == 3
    following = run_ranks(rounds_of_an_epoch, 6, states[0], world_size=ranks, backend="ring")
    assert sorted(sample for seen, _, _ in [*first, *following] for sample in seen) == list(range(24))
    assert len({tuple(parameters) for _, _, parameters in following}) == 1
    assert {state["DiLoCo"]["schedule"]["step"] for _, state, _ in following} == {6}


def interrupted() -> list[int]:
    sampler = ringdp.data.BalancedSampler(24, 4, balance="equal", shuffle=False)
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    sampler.watch(rounds := ringdp.DiLoCo(module, optimizer, every=4))
    seen: list[int] = []
    for stop in (3, 2, 10):
        for number, batch in enumerate(sampler):
            if number == stop:
                break  # this one was drawn, and no forward has had it
            module(torch.zeros(len(batch), 1)).sum().backward()
            optimizer.step()
            seen += batch
    measured = ringdp.data.BalancedSampler(24, 4)
    with pytest.raises(InvalidArgumentError, match="balance='speed' measures the steps of a RingDP"):
        measured.watch(rounds)
    return seen


def test_an_interrupted_epoch_goes_on_behind_the_steps_that_were_made() -> None:
    """Also those of a round that has not ended: the model has seen them."""
    assert run_ranks(interrupted, world_size=1, backend="ring") == [list(range(24))]


def refused() -> list[str]:
    module, told = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    by_time = ringdp.DiLoCo(module, optimizer, every=4, unequal=True)
    for parts in ([by_time, optimizer], [optimizer], [by_time, ringdp.RingDP(torch.nn.Linear(1, 1))]):
        with pytest.raises(InvalidArgumentError) as caught:
            ringdp.elastic.Job(*parts)
        told.append(str(caught.value))
    by_time.detach()
    inside = ringdp.RingDP(module)
    with pytest.raises(InvalidArgumentError) as caught:
        ringdp.elastic.Job(ringdp.DiLoCo(inside, optimizer), inside, optimizer)
    return [*told, str(caught.value)]


def test_a_job_says_which_rounds_it_does_not_take() -> None:
    for told in run_ranks(refused, world_size=2, backend="ring"):
        assert told == [
            refusals.explain("job", "unequal rounds"),
            "ringdp.elastic.Job needs one RingDP or one DiLoCo among its parts, not 0",
            "ringdp.elastic.Job needs one RingDP or one DiLoCo among its parts, not 2",
            refusals.explain("job", "sites"),
        ]
