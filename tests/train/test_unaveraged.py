"""Optimizers that apply gradients which were not averaged are told of, once, with the reason; others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringdp.errors import MismatchError
from tests.helpers import logged
from tests.train.harness import backends, default_group, errors_of, on_ranks, run_ranks
from tests.train.test_forwards import batch, plain, wrapped

UNDER_NO_SYNC, PAST = "no_sync()", "past the wrapper"


def said(how: str, steps: int = 4, **options: Any) -> list[str]:
    rank = default_group().rank()
    module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    model = wrapped(module, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.01)
    with logged("ringdp.parallel") as lines:
        for number in range(steps):
            step(how, model, optimizer, other, number, rank)
    return lines


def step(how: str, model: Any, optimizer: Any, other: Any, number: int, rank: int) -> None:
    inside = model.module
    if how in ("past the wrapper", "clipped"):
        plain(inside, number, rank).backward()
    elif how == "mixed":
        plain(model if number % 2 else inside, number, rank).backward()
    elif how == "after the mean":
        plain(model, number, rank).backward()
        plain(inside, number, rank).backward()
    elif how in ("no_sync", "no_sync by hand"):
        with model.no_sync():
            plain(model, number, rank).backward()
    elif how == "last of an epoch":
        for micro in range(3 if number == 2 else 4):
            if micro < 3:
                with model.no_sync():
                    plain(model, 10 * number + micro, rank).backward()
            else:
                plain(model, 10 * number + micro, rank).backward()
    elif how == "closure":

        def closure() -> Any:
            optimizer.zero_grad()
            loss = plain(inside, number, rank)
            loss.backward()
            return loss

        optimizer.step(closure)
        return
    # What is right.
    elif how == "accumulated":
        with model.no_sync():
            plain(model, number, rank).backward()
        plain(model, number + 50, rank).backward()
    elif how == "discarded":  # as of a discriminator, in its generator's step
        plain(inside, number, rank).backward()
        other.step()
        optimizer.zero_grad()
        plain(model, number, rank).backward()
    elif how == "zeroed":
        plain(inside, number, rank).backward()
        optimizer.zero_grad(set_to_none=False)
    elif how == "before the mean":
        plain(inside, number, rank).backward()
        plain(model, number, rank).backward()
    else:
        plain(model, number, rank).backward()
    if how == "no_sync by hand":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    if how in ("clipped", "clips"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=how != "zeroed")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("past the wrapper", PAST),
        ("clipped", PAST),
        ("mixed", PAST),
        ("after the mean", PAST),
        ("closure", PAST),
        ("no_sync", UNDER_NO_SYNC),
        ("last of an epoch", UNDER_NO_SYNC),
    ],
)
def test_each_is_told_once_with_its_reason(how: str, reason: str) -> None:
    for lines in run_ranks(said, how, backend="ring", timeout_s=30):
        assert len(lines) == 1, lines
        assert reason in lines[0]
        assert len(f"ringdp: {lines[0]}") <= 2 * 128  # of a console
        assert "0.weight" in lines[0]


@pytest.mark.parametrize("backend", backends())
def test_on_any_backend(backend: str) -> None:
    for lines in run_ranks(said, "past the wrapper", gradient_as_bucket_view=False, backend=backend, timeout_s=30):
        assert len(lines) == 1, lines


@pytest.mark.parametrize(
    "how", ["usual", "clips", "accumulated", "discarded", "zeroed", "before the mean", "no_sync by hand"]
)
def test_the_others_are_not(how: str) -> None:
    assert run_ranks(said, how, backend="ring", timeout_s=30) == [[], []]


def test_one_rank_and_a_guard_that_is_switched_off_are_silent() -> None:
    assert run_ranks(said, "past the wrapper", world_size=1, backend="ring") == [[]]
    assert run_ranks(said, "past the wrapper", guard=0, backend="ring") == [[], []]


def never_called() -> None:
    said("past the wrapper", 30, guard=5)


def test_the_guard_finds_replicas_whose_wrapper_is_never_called() -> None:
    for error in errors_of(never_called, backend="ring", timeout_s=30):
        assert isinstance(error, MismatchError), error
        assert error.operation == "divergence guard"
        assert error.step is not None
        assert error.step <= 10


@on_ranks()
def test_only_what_an_optimizer_steps_counts() -> None:
    """One optimizer of two wrappers, and another of half of one: only what an optimizer steps counts."""
    rank = default_group().rank()
    first, second = wrapped(nn.Linear(8, 8)), wrapped(nn.Linear(8, 4))
    optimizer = torch.optim.SGD([*first.parameters(), second.module.weight], lr=0.1)
    with logged("ringdp.parallel") as lines:
        for number in range(3):
            second(first(batch(number, rank))).square().mean().backward()
            second.module.bias.sum().backward()  # nobody steps it
            optimizer.step()
            optimizer.zero_grad()
        assert lines == []
        optimizer.add_param_group({"params": [second.module.bias]})
        optimizer.step()
    assert len(lines) == 1
    assert "bias" in lines[0]


@on_ranks()
def test_a_gradient_that_another_wrapper_has_averaged_is_no_reason() -> None:
    """A parameter of two wrappers, of which every other step uses one alone."""
    rank = default_group().rank()
    shared = nn.Linear(8, 8)
    first, second = wrapped(nn.Sequential(shared, nn.Linear(8, 4))), wrapped(nn.Sequential(shared, nn.Linear(8, 2)))
    optimizer = torch.optim.SGD([*first.parameters(), *second.module[1].parameters()], lr=0.1)
    with logged("ringdp.parallel") as lines:
        for number in range(4):
            plain((first, second)[number % 2], number, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert lines == []
