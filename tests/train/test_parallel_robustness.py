"""Wrappers in each other's way: two in one backward, one inside another, shared parameters, threads, exceptions."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.harness import backends, on_ranks, run_outcomes


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(12, 12)


def inputs(step: int, rank: int) -> Tensor:
    return models.batch(step, rank)[0]


def mean_over_ranks(loss_of: Callable[[int], Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """The mean of all ranks' gradients, computed here; `loss_of(rank)` is that rank's loss."""
    ranks = dist.get_world_size()
    return [
        sum(per_rank) / ranks
        for per_rank in zip(*(torch.autograd.grad(loss_of(rank), parameters) for rank in range(ranks)), strict=True)
    ]


def check(parameters: list[nn.Parameter], expected: list[Tensor]) -> None:
    for parameter, mean in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-6)


@on_ranks(backend=backends())
def test_two_wrappers() -> None:
    """One loss through both; then one of them alone; buckets small enough that they leave in turn."""
    one, two = linear(0), linear(1)
    a, b = RingDP(one, bucket_cap_mb=0.0001), RingDP(two, bucket_cap_mb=0.0001)
    both = [*one.parameters(), *two.parameters()]
    for step in range(4):
        a.zero_grad()
        b.zero_grad()
        expected = mean_over_ranks(lambda rank: two(one(inputs(step, rank)).tanh()).pow(2).sum(), both)  # noqa: B023
        b(a(inputs(step, dist.get_rank())).tanh()).pow(2).sum().backward()
        check(both, expected)
        a.zero_grad()
        b.zero_grad()
        a(inputs(step, dist.get_rank())).sum().backward()
        assert two.weight.grad is None
        check(
            [*one.parameters()],
            mean_over_ranks(lambda rank: one(inputs(step, rank)).sum(), [*one.parameters()]),  # noqa: B023
        )


class Scaled(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = linear(0)
        self.scale = nn.Parameter(torch.ones(size) / size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.scale.sum()
        return result


class Both(nn.Module):
    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(self.own(x).tanh())
        return result


@on_ranks(backend=backends())
def test_shared_by_two() -> None:
    """A layer in two wrapped models: both in one loss, each alone, and after one of them is gone."""
    shared, one, two = linear(0), linear(1), linear(2)
    first = RingDP(Both(shared, one), bucket_cap_mb=0.0001)
    first(inputs(9, dist.get_rank())).sum().backward()  # .grad is a part of the first one's bucket by now
    second = RingDP(Both(shared, two), bucket_cap_mb=0.0001)
    everything = [*shared.parameters(), *one.parameters(), *two.parameters()]
    for step in range(4):
        for parameter in everything:
            if step == 0 and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

        def both(a: nn.Module, b: nn.Module, rank: int) -> Tensor:
            x = inputs(step, rank)  # noqa: B023
            return a(x).pow(2).sum() + b(x).sum()

        expected = mean_over_ranks(lambda rank: both(first.module, second.module, rank), everything)
        both(first, second, dist.get_rank()).backward()
        check(everything, expected)
    for parameter in everything:
        parameter.grad = None
    first(inputs(5, dist.get_rank())).sum().backward()
    mine = [*shared.parameters(), *one.parameters()]
    check(mine, mean_over_ranks(lambda rank: first.module(inputs(5, rank)).sum(), mine))
    assert two.weight.grad is None
    second = None  # type: ignore[assignment]
    gc.collect()
    first.zero_grad()
    first(inputs(6, dist.get_rank())).sum().backward()
    check(mine, mean_over_ranks(lambda rank: first.module(inputs(6, rank)).sum(), mine))


@on_ranks(backend=backends())
def test_in_another_thread() -> None:
    """Forward here, backward there; and two threads with a wrapper each, on groups of their own."""
    model = RingDP(linear(0), bucket_cap_mb=0.0001)
    parameters = [*model.parameters()]
    for step in range(3):
        model.zero_grad()
        loss = model(inputs(step, dist.get_rank())).pow(2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        check(parameters, mean_over_ranks(lambda rank: model.module(inputs(step, rank)).pow(2).sum(), parameters))  # noqa: B023
    groups = [dist.new_group() for _ in range(2)]
    wrapped = [RingDP(linear(i), process_group=group) for i, group in enumerate(groups)]
    failures: list[BaseException] = []

    def train(one: RingDP) -> None:
        try:
            for step in range(5):
                one.zero_grad()
                one(inputs(step, dist.get_rank())).pow(2).sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(one,)) for one in wrapped]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for one in wrapped:
        mine = [*one.parameters()]
        check(mine, mean_over_ranks(lambda rank: one.module(inputs(4, rank)).pow(2).sum(), mine))  # noqa: B023


@on_ranks(backend=backends())
def test_deleted_in_the_middle() -> None:
    """A wrapper that goes while its graph lives, after a step has laid out its buckets; another takes its place."""
    module = linear(0)
    model = RingDP(module, bucket_cap_mb=0.0001)
    model(inputs(0, 0)).sum().backward()
    loss = model(inputs(1, dist.get_rank())).sum()
    del model
    gc.collect()
    module.zero_grad()
    again = RingDP(module, bucket_cap_mb=0.0001)
    loss.backward()  # the old graph: its forward was not the new wrapper's
    local = torch.autograd.grad(module(inputs(1, dist.get_rank())).sum(), [*module.parameters()])
    for parameter, value in zip(module.parameters(), local, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, value)
    again.zero_grad()
    again(inputs(2, dist.get_rank())).sum().backward()
    parameters = [*module.parameters()]
    check(parameters, mean_over_ranks(lambda rank: module(inputs(2, rank)).sum(), parameters))


@pytest.mark.parametrize("large", [False, True])
@on_ranks(backend=backends())
def test_one_inside_another(large: bool) -> None:
    """The inner one's parameters are averaged by both, at the same time: the mean of equal means."""
    inner, outer = Scaled(1 << 20 if large else 4), linear(1)  # the large one is a bucket by itself
    wrapped = RingDP(nn.Sequential(outer, nn.Tanh(), RingDP(inner)), bucket_cap_mb=0.0001)
    parameters = [*outer.parameters(), *inner.parameters()]
    accumulated: list[Tensor] = []
    for step in range(5):
        if step != 3:
            wrapped.zero_grad(set_to_none=step != 2)
            accumulated = []
        expected = mean_over_ranks(
            lambda rank: inner(outer(inputs(step, rank)).tanh()).pow(2).sum(),  # noqa: B023
            parameters,
        )
        wrapped(inputs(step, dist.get_rank())).pow(2).sum().backward()
        accumulated = [a + b for a, b in zip(accumulated, expected, strict=True)] if accumulated else expected
        check(parameters, accumulated)
    assert {"0.weight", "2.module.layer.weight"} <= {name for name, _ in wrapped.module.named_parameters()}


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.raises:
            raise KeyError("mine")
        return grad, None


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(0), linear(1)

    def forward(self, x: Tensor, raises: bool) -> Tensor:
        result: Tensor = self.last(Raise.apply(self.first(x), raises))
        return result


def one_rank_raises() -> tuple[str, str]:
    """Rank 0's backward is left by an exception after a bucket has gone, and rank 0 goes on: the others do not hang."""
    model = RingDP(Fragile(), bucket_cap_mb=0.00001)
    x = inputs(0, dist.get_rank())
    try:
        model(x, False).sum().backward()
        try:
            model(x, dist.get_rank() == 0).sum().backward()
        except KeyError:
            model(x, False)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_one_rank_leaves_its_backward() -> None:
    """On ring: gloo's operations have no names, and the other ranks wait."""
    first, *others = run_outcomes(one_rank_raises, world_size=3, backend="ring")
    assert first.text is None, first.text
    assert first.value[0] == "RuntimeError"
    assert "The backward of step 2 did not come to its end on rank 0: an exception left it" in first.value[1]
    assert "It had sent 2 of 4 buckets. The other ranks were notified, but are in another operation:" in first.value[1]
    assert "wait" not in first.value[1].partition("another operation:")[0]
    assert "first.weight, first.bias" in first.value[1]
    for other in others:
        assert other.text is None, other.text
        kind, text = other.value
        assert kind == "MismatchError"
        assert "rank 0" in text
        assert "backward of step 2 did not end: no gradient for first.weight, first.bias" in text


@on_ranks(backend=backends())
def test_gradients_in_memory_of_their_own() -> None:
    """gradient_as_bucket_view=False: no step writes into what an earlier one left; .grad stays the tensor it was."""
    model = RingDP(models.build("mlp"), gradient_as_bucket_view=False, bucket_cap_mb=0.001)
    parameters = [*model.parameters()]

    def step(number: int) -> None:
        x, y = models.batch(number, dist.get_rank())
        nn.functional.cross_entropy(model(x), y).backward()

    step(0)
    kept = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    values = [tensor.clone() for tensor in kept]
    for number in (1, 2, 3):
        model.zero_grad()
        step(number)
    for tensor, value in zip(kept, values, strict=True):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0)
    # A flat buffer of the user's, of which every .grad is a part, gets the means.
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    step(0)
    torch.testing.assert_close(flat, torch.cat([value.reshape(-1) for value in values]), rtol=1e-5, atol=1e-7)
    model.zero_grad(set_to_none=False)
    assert not flat.any()
    step(0)
    torch.testing.assert_close(flat, torch.cat([value.reshape(-1) for value in values]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [None, True])
@on_ranks(backend=backends())
def test_gradients_that_are_parts_of_their_bucket(value: bool | None) -> None:
    """The default. What was made of a .grad shows the next step's as long as it is only zeroed; let go, it stays."""
    model = RingDP(linear(0)) if value is None else RingDP(linear(0), gradient_as_bucket_view=value)

    def step(number: int) -> torch.Tensor:
        model(inputs(number, dist.get_rank())).sum().backward()
        assert model.module.weight.grad is not None
        return model.module.weight.grad

    grad = step(0)
    assert grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    seen = grad.detach()
    before = seen.clone()
    model.zero_grad(set_to_none=False)
    assert not torch.equal(step(1), before)
    torch.testing.assert_close(seen, grad, rtol=0, atol=0)
    before = seen.clone()
    del grad
    model.zero_grad()
    assert not torch.equal(step(2), before)
    torch.testing.assert_close(seen, before, rtol=0, atol=0)
