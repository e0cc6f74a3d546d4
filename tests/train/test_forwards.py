"""Ranks whose backwards are of different steps: an error at the first bucket that says who left out what.

And the programs that look alike and are right.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringdp.errors import MismatchError
from tests.train.harness import default_group, errors_of, run_ranks

WHEN = 3  # the step in which rank 1 does something else


def wrapped(module: nn.Module | None = None, **options: Any) -> Any:
    import ringdp

    torch.manual_seed(1)
    return ringdp.RingDP(nn.Linear(8, 4) if module is None else module, **options)


def batch(number: int, rank: int, samples: int = 6) -> Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def plain(model: Any, number: int, rank: int) -> Tensor:
    return model(batch(number, rank)).square().mean()


# What is an error.


def skips(how: str) -> None:
    rank = default_group().rank()
    choices: dict[str, dict[str, Any]] = {
        "compression": {"compression": "int8"},
        "weight": {"weight": "samples"},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "copies": {"gradient_as_bucket_view": False},
    }
    options = choices.get(how, {})
    module: nn.Module = nn.Linear(512, 4) if how == "compression" else nn.Linear(8, 4)
    if how == "raises":
        module = AfterOutput()
    model = wrapped(Odd(module) if how == "odd" else module, **options)
    if how == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    if how == "evaluation":
        model.eval()
    for number in range(WHEN + 3):
        x = batch(number, rank) if how != "compression" else torch.ones(4, 512)
        with model.no_sync() if how == "accumulated" else contextlib.nullcontext():
            if how == "accumulated":
                model(x).square().mean().backward()
        if how == "raises":
            model.module.raises = rank == 1 and number == WHEN
        out = model(x)
        loss = (out["hidden"].value if how == "odd" else out).square().mean()
        if rank == 1 and number == WHEN:
            if how == "raises":
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            continue
        loss.backward()
        model.zero_grad()


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


class AfterOutput(nn.Module):
    """Its backward raises behind the wrapper's output, before there is any gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 4)
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.inside(x)
        return (Raises.apply(out) if self.raises else out) * 1


class Odd(nn.Module):
    """Its output is of a kind in which tensors are not found."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module

    def forward(self, x: Tensor) -> Any:
        return {"hidden": Hidden(self.inside(x))}


class Hidden:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    "how", ["plain", "hook", "compression", "unused", "static", "copies", "accumulated", "evaluation", "odd", "raises"]
)
def test_a_backward_that_one_rank_leaves_out_is_an_error_of_that_step(how: str) -> None:
    errors = errors_of(skips, how, world_size=3 if how == "plain" else 2, backend="ring", timeout_s=30)
    for rank, error in enumerate(errors):
        assert isinstance(error, MismatchError), error
        assert error.step == WHEN + 1 + (how == "raises" and rank == 1)  # it began one more
        for part in ("rank 1", "after 1 forward without a backward", "left out the backward"):
            assert part in str(error)


def skips_where_forwards_communicate(how: str) -> None:
    rank = default_group().rank()
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)) if how == "buffers" else None
    model = wrapped(module, **({"weight": "samples"} if how == "weight" else {}))
    for number in range(WHEN + 3):
        loss = plain(model, number, rank)
        if rank == 1 and number == WHEN:
            continue
        loss.backward()


@pytest.mark.parametrize("how", ["buffers", "weight"])
def test_where_forwards_communicate_their_error_says_it_too(how: str) -> None:
    for error in errors_of(skips_where_forwards_communicate, how, backend="ring", timeout_s=30):
        assert isinstance(error, MismatchError), error
        assert "after 1 forward without a backward" in str(error)


def runs_two_backwards() -> None:
    rank = default_group().rank()
    model = wrapped()
    for number in range(WHEN + 3):
        loss = plain(model, number, rank)
        loss.backward(retain_graph=True)
        if rank == 1 and number == WHEN:
            loss.backward()


def test_a_second_backward_on_one_rank_is_an_error() -> None:
    for error in errors_of(runs_two_backwards, backend="ring", timeout_s=30):
        assert isinstance(error, MismatchError), error
        assert "a second backward through one forward" in str(error)


def evaluates_unequally(searches: bool) -> Any:
    """LBFGS with a loss that grows on rank 1 alone, whose line search then goes on for longer; or with the mean."""
    rank = default_group().rank()
    model = wrapped(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=12, line_search_fn="strong_wolfe")
    evaluations = 0
    for number in range(4):

        def closure(number: int = number) -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = (1 + 40 * rank) * plain(model, number, rank)
            loss.backward()
            loss = loss.detach()
            if searches:
                return loss + 1000 * rank * evaluations
            dist.all_reduce(loss)
            return loss

        optimizer.step(closure)
    return evaluations


def test_closures_that_ranks_evaluate_unequally_often_are_an_error() -> None:
    for error in errors_of(evaluates_unequally, True, backend="ring", timeout_s=30):
        assert isinstance(error, MismatchError), error
        assert "of the optimizer's closure" in str(error)
    even = run_ranks(evaluates_unequally, False, backend="ring", timeout_s=30)
    assert even[0] == even[1] > 8


# What is none.


def legal(how: str) -> list[Tensor]:
    rank = default_group().rank()
    options: dict[str, Any] = {"find_unused_parameters": True} if how == "unused" else {}
    model = wrapped(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        step(how, model, number, rank)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def step(how: str, model: Any, number: int, rank: int) -> None:
    if how == "evaluates on rank 0" and rank == 0:
        model.eval()
        plain(model, 99, rank)
        model.train()
    if how == "no_grad on rank 0" and rank == 0:
        with torch.no_grad():
            plain(model, 99, rank)
    if how == "past the wrapper on rank 0" and rank == 0:
        plain(model.module, 99, rank)
    if how == "raises on rank 1" and rank == 1:
        with pytest.raises(RuntimeError):
            model(torch.zeros(3, 5))
    if how == "repeats on rank 1" and rank == 1:  # as BalancedSampler.out_of_memory does
        plain(model, number, rank)
        model._repeat_batch()
    if how == "unequal micro-batches":
        for micro in range(rank):
            with model.no_sync():
                plain(model, 10 * number + micro, rank).backward()
    if how == "no_sync without a backward on rank 0" and rank == 0:
        with model.no_sync():
            plain(model, 99, rank)
    if how == "without a backward on all":
        plain(model, 99, rank)
    if how == "two backwards":
        first, second = plain(model, number, rank), plain(model, number + 50, rank)
        first.backward()
        second.backward()
    elif how in ("unequal sum", "unused"):
        sum((plain(model, 10 * number + part, rank) for part in range(2 + rank)), torch.zeros(())).backward()
    elif how == "checkpoint":
        loss = checkpoint(lambda x: model(x).square().mean(), batch(number, rank), use_reentrant=False)
        loss.backward()
    elif how == "twice through one graph":
        loss = plain(model, number, rank)
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == "autograd.grad":
        x = batch(number, rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (plain(model, number, rank) + slope.square().mean()).backward()
    else:
        plain(model, number, rank).backward()


RIGHT = ["evaluates on rank 0", "no_grad on rank 0", "past the wrapper on rank 0", "raises on rank 1"]
RIGHT += ["repeats on rank 1", "unequal micro-batches", "no_sync without a backward on rank 0"]
RIGHT += ["without a backward on all", "two backwards", "unequal sum", "unused", "checkpoint"]
RIGHT += ["twice through one graph", "autograd.grad"]


@pytest.mark.parametrize("how", RIGHT)
def test_what_is_right_goes_on(how: str) -> None:
    one, other = run_ranks(legal, how, backend="ring", timeout_s=30)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def joined() -> list[Tensor]:
    from torch.distributed.algorithms.join import Join

    rank = default_group().rank()
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for number in range(3 + 2 * rank):
            loss = plain(model, number, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_ranks_that_run_out_of_input_are_not_compared() -> None:
    one, other = run_ranks(joined, backend="ring", timeout_s=30)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
