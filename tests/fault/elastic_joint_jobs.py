"""What the ranks of test_elastic_joint.py do: one backward goes through several RingDPs, and a rank dies in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdp
from tests.fault.elastic_jobs import HOOKS, Told, batch, digests, joined, telling
from tests.fault.faults import Faults

WIDTH = 40


class Part(nn.Module):
    """A network of several buckets."""

    def __init__(self, number: int, width_in: int, width_out: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first = nn.Linear(width_in, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if number == 1 else nn.Identity()
        self.last = nn.Linear(WIDTH, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def chain(models: list[Any], x: Tensor, y: Tensor, here: Callable[[str], None]) -> Tensor:
    for number, model in enumerate(models):
        x = model(x)
        if number == len(models) - 2:
            x.register_hook(lambda gradient: here("between"))
    return (x - y).square().mean()


def side_by_side(models: list[Any], x: Tensor, y: Tensor, here: Callable[[str], None]) -> Tensor:
    total = torch.zeros(())
    for model in models:
        total = total + (model(x).mean(1, keepdim=True) - y).square().mean()
    return total


def repeated(models: list[Any], x: Tensor, y: Tensor, here: Callable[[str], None]) -> Tensor:
    """The backward of the last network runs inside a node of the first one's, and is over before that one's begins."""
    h = models[0](x)
    h.register_hook(lambda gradient: here("between"))
    return (checkpoint(models[1], h, use_reentrant=True) - y).square().mean()


def repeated_inside(models: list[Any], x: Tensor, y: Tensor, here: Callable[[str], None]) -> Tensor:
    """The first network's step has begun when the other's begins and ends inside it."""
    h = checkpoint(models[1], x.requires_grad_(), use_reentrant=True)
    return (models[0](x + h[:, :6]) - y).square().mean()


def repeated_twice(models: list[Any], x: Tensor, y: Tensor, here: Callable[[str], None]) -> Tensor:
    h = models[0](x)
    twice = checkpoint(models[1], h, use_reentrant=True) + checkpoint(models[1], 2 * h, use_reentrant=True)
    return (twice - y).square().mean()


def recomputed(models: list[Any], x: Tensor, y: Tensor, here: Callable[[str], None]) -> Tensor:
    h = models[0](x)
    h.register_hook(lambda gradient: here("between"))
    return (checkpoint(models[1], h, use_reentrant=False) - y).square().mean()


SHAPES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, int]]]] = {
    "chain": (chain, [(6, 9), (9, 1)]),
    "three": (chain, [(6, 9), (9, 7), (7, 1)]),
    "side by side": (side_by_side, [(6, 2), (6, 3)]),
    "repeated": (repeated, [(6, 9), (9, 1)]),
    "repeated inside": (repeated_inside, [(6, 1), (6, 6)]),
    "repeated twice": (repeated_twice, [(6, 9), (9, 1)]),
    "recomputed": (recomputed, [(6, 9), (9, 1)]),
}


def train(
    folder: str,
    steps: range,
    faults: Faults = Faults(),  # noqa: B008
    *,
    elastic: bool = True,
    places: tuple[int, ...] | None = None,
    state: dict[str, Any] | None = None,
    shape: str = "chain",
    options: tuple[dict[str, Any], ...] = ({}, {}, {}),
    hook: str = "",
    alone: bool = False,
    keyword: dict[str, Any] | None = None,
) -> Told:
    """A step's backward reaches the last layer of one network after the other, from the last network to the first.
    Its phases: "first", "second", "third"; "between": the second one's output; "last": the first network's first layer.
    `options`: of each wrapper. `hook`: of the second one. `alone`: in odd steps the first network averages nothing.
    `keyword`: of backward."""
    loss_of, sizes = SHAPES[shape]
    with telling(folder, elastic=elastic, places=places) as (told, place):
        models = [
            ringdp.RingDP(Part(number, *size), bucket_cap_mb=0.001, **{"reproducible": True, **options[number]})
            for number, size in enumerate(sizes)
        ]
        if hook:
            HOOKS[hook](models[1])
        parameters = [one for model in models for one in model.module.parameters()]
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.5)
        if state is not None:
            for model, its in zip(models, state["models"], strict=True):
                model.load_state_dict(its)
            optimizer.load_state_dict(state["optimizer"])
            for model, residuals in zip(models, state["residuals"], strict=True):
                model.reducer.compression.give_residuals(residuals)
            for one, gradient in zip(parameters, state["left"], strict=True):
                one.grad = gradient
        for step in steps:
            here = faults.at(place, step)
            here("forward")
            x, y = batch(place, step)
            handles = [
                model.module.last.weight.register_hook(lambda gradient, here=here, phase=phase: here(phase))
                for model, phase in zip(reversed(models), ("first", "second", "third"), strict=False)
            ]
            handles.append(models[0].module.first.weight.register_hook(lambda gradient, here=here: here("last")))
            with models[0].no_sync() if alone and step % 2 else contextlib.nullcontext():
                loss = loss_of(models, x, y, here)
            loss.backward(**(keyword or {}))
            for handle in handles:
                handle.remove()
            here("after backward")
            told.gradients.append(digests([*averaged(models, alone=bool(alone and step % 2))]))
            if not (alone and step % 2):
                optimizer.step()
                optimizer.zero_grad()
            told.parameters.append(digests(parameters))
            told.sizes.append(ringdp.world_size())
        told.state = {
            "models": [{name: value.clone() for name, value in model.state_dict().items()} for model in models],
            "optimizer": optimizer.state_dict(),
            "residuals": [
                model.reducer.compression.take_residuals(list(range(len(list(model.parameters()))))) for model in models
            ],
            "left": [None if one.grad is None else one.grad.clone() for one in parameters],
        }
    return told


def averaged(models: list[Any], *, alone: bool) -> list[Tensor]:
    return [one.grad for model in models[alone:] for one in model.module.parameters() if one.grad is not None]


def left_by_an_exception(folder: str) -> dict[str, Any]:
    """All ranks raise in a backward whose inner one has ended; then each network has a step of its own."""
    with joined(folder, elastic=True) as place:
        models = [ringdp.RingDP(Part(number, 6, 1)) for number in range(3)]

        def refuse(gradient: Tensor) -> None:
            raise ValueError("of another size")

        x, y = batch(place, 0)
        h = x.requires_grad_() * 1.0
        h.register_hook(refuse)
        told: dict[str, Any] = {}
        try:
            (checkpoint(models[0], h, use_reentrant=True) - y).square().mean().backward()
        except ValueError as error:
            told["raised"] = str(error)
        (models[1](x.detach()) - y).square().mean().backward()
        told["gradient"] = digests(averaged(models[1:2], alone=False))
        try:
            models[0](x.detach())
        except RuntimeError as error:
            told["said"] = str(error)
        os.environ.pop("RINGDP_ELASTIC", None)
        return told
