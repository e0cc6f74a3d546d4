"""How models of the table are trained: the plain loop with its settings, and when forward and backward run."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from tests.train import models
from tests.train.parity.run import Run


def sgd(run: Run, model: nn.Module) -> Any:
    return run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01))


def plain_sgd(run: Run, model: nn.Module) -> Any:
    return run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def adam(run: Run, model: nn.Module) -> Any:
    return run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True))


def train(
    run: Run,
    model: Any,
    *,
    steps: int = 3,
    optimizer: Callable[[Run, nn.Module], Any] = sgd,
    zero: bool | str = True,
    by_model: bool = False,
    before: Callable[[Run, Any, int], None] | None = None,
    after: Callable[[Run, Any, int], None] | None = None,
) -> None:
    """The plain loop.

    Args:
        zero: set_to_none; "alternating" takes turns; "never" lets gradients add up.
        by_model: the wrapper zeroes gradients, not the optimizer.
        before: what happens before each step's forward.
        after: what happens between a step's backward and the optimizer.
    """
    chosen = optimizer(run, model)
    for step in range(steps):
        if zero != "never":
            to_none = step % 2 == 0 if zero == "alternating" else bool(zero)
            (model if by_model else chosen).zero_grad(set_to_none=to_none)
        if before is not None:
            before(run, model, step)
        run.backward(model, step)
        if after is not None:
            after(run, model, step)
        chosen.step()


# When forward and backward run.


def accumulate(
    run: Run, model: Any, *, sync_each: bool = False, set_to_none: bool = True, sync_first: bool = False
) -> None:
    """Three backwards per step; without `sync_each` the first two are under no_sync."""
    optimizer = plain_sgd(run, model)
    if sync_first:
        run.backward(model, 9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        with contextlib.nullcontext() if sync_each else model.no_sync():
            for micro in range(2):
                run.backward(model, 10 * step + micro)
        run.backward(model, 10 * step + 5)
        optimizer.step()


def end_in_no_sync(run: Run, model: Any) -> None:
    """Gradients are local at the end: the same as DDP's on every rank."""
    train(run, model, steps=2)
    with model.no_sync():
        run.backward(model, 7)


def step_in_no_sync(run: Run, model: Any) -> None:
    """Ranks part for a while: each takes a step of its own."""
    optimizer = sgd(run, model)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            run.backward(model, step)
            optimizer.step()


def no_sync_half(run: Run, model: Any, *, forward_inside: bool) -> None:
    """The forward decides whether its backward synchronises."""
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        run.backward(model, 20 + step)
        with model.no_sync() if forward_inside else contextlib.nullcontext():
            losses = list(run.losses(model, step))
        with contextlib.nullcontext() if forward_inside else model.no_sync():
            for loss in losses:
                loss.backward()
        optimizer.step()


def forwards_then_backward(run: Run, model: Any) -> None:
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for losses in zip(*(run.losses(model, step + 10 * part) for part in range(3)), strict=True):
            sum(losses[1:], losses[0]).backward()
        optimizer.step()


def forwards_then_backwards(run: Run, model: Any) -> None:
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        losses = [list(run.losses(model, step + 10 * part)) for part in range(2)]
        for loss in losses[0] + losses[1]:
            loss.backward()
        optimizer.step()


def several_roots(run: Run, model: Any) -> None:
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for losses in zip(run.losses(model, step), run.losses(model, step + 10), strict=True):
            torch.autograd.backward([*losses], [torch.tensor(1.0), torch.tensor(0.5)])
        optimizer.step()


def retain_graph(run: Run, model: Any) -> None:
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for loss in run.losses(model, step):
            loss.backward(retain_graph=True)
            loss.backward()
        optimizer.step()


def forward_without_backward(run: Run, model: Any, step: int) -> None:
    """To be run before a step."""
    for loss in run.losses(model, 30 + step):
        run.keep("loss", loss)


def evaluate(
    run: Run, model: Any, step: int, *, mode: Callable[[], Any] = torch.no_grad, evaluating: bool = True
) -> None:
    """To be run before or after a step."""
    model.train(not evaluating)
    with mode():
        for loss in run.losses(model, 40 + step):
            run.keep("loss", loss.clone())
    model.train()


def switch_mode(run: Run, model: Any, step: int) -> None:
    model.train(step % 2 == 0)


# Copies and changes in the middle of training.


def go_on_with_copy(run: Run, model: Any, *, how: str) -> None:
    """After two steps a copy goes on beside the original."""
    train(run, model, steps=2)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copied = torch.load(saved, weights_only=False)
    run.watch(copied)
    train(run, copied, steps=2)
    train(run, model, steps=1)


def go_back(run: Run, model: Any) -> None:
    """Back to an earlier state of model and optimizer."""
    optimizer = adam(run, model)
    saved: Any = None
    for step in range(4):
        optimizer.zero_grad()
        run.backward(model, step)
        optimizer.step()
        if step == 1:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 2:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


def new_data(run: Run, model: Any, step: int) -> None:
    """Parameters get other memory; some also other values."""
    for index, parameter in enumerate(model.parameters()):
        parameter.data = parameter.data.clone() if index % 2 else parameter.data * 0.9


def change_dtype(run: Run, model: Any, *, after_steps: int) -> None:
    if after_steps:
        train(run, model, steps=after_steps)
    model.zero_grad()
    model.double()
    train(run, model, steps=2)


def two_models(run: Run, first: Any, *, one_backward: bool) -> None:
    """Two wrappers in one process, one after the other or one on top of the other."""
    second = run.wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)))
    optimizer = run.optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.parts:
            x, y = models.batch(step, rank)
            hidden = first(x)
            loss = nn.functional.cross_entropy(second(hidden if one_backward else hidden.detach()), y)
            if not one_backward:
                (nn.functional.cross_entropy(hidden, y) / len(run.parts)).backward()
            (loss / len(run.parts)).backward()
        optimizer.step()


# Uneven inputs.


def uneven(
    run: Run, model: Any, *, divide_by_initial: bool = True, accumulating: bool = False, context: bool = False
) -> None:
    """Rank r has r + 2 batches."""
    optimizer = sgd(run, model)
    if run.kind == "alone":
        joining: Any = contextlib.nullcontext()
    elif context:
        joining = Join([model], divide_by_initial_world_size=divide_by_initial)
    else:
        joining = model.join(divide_by_initial_world_size=divide_by_initial)
    last = run.world + 1 if run.kind == "alone" else run.rank + 2
    with joining:
        for step in range(last):
            optimizer.zero_grad()
            alive = [rank for rank in range(run.world) if rank + 2 > step]
            divisor = 1 if run.kind != "alone" else run.world if divide_by_initial else len(alive)
            for micro in range(2 if accumulating else 1):
                quiet = accumulating and micro == 0
                with model.no_sync() if quiet else contextlib.nullcontext():
                    for rank in alive if run.kind == "alone" else [run.rank]:
                        x, y = models.batch(step + 10 * micro, rank)
                        (nn.functional.cross_entropy(model(x), y) / divisor).backward()
            optimizer.step()


def mean(run: Run, value: float) -> float:
    """Over the ranks, which then all have the same bits."""
    if run.kind == "alone":
        return value
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return sum(everybody) / len(everybody)
