"""A program that keeps a .grad's memory and only zeroes it: what it has taken there shows the mean of each backward.
Once it has let the .grad go, what it has taken stays as it was.

Programs are drawn from a seed; what each gradient's mean is, is computed by hand.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ringdp.ddp.wrapper import RingDP
from tests.fault.elastic_jobs import joined
from tests.train.harness import on_ranks

LARGE = 1 << 20  # elements of float32 from which on a gradient is reduced where autograd left it
SHAPES: list[tuple[int, ...]] = [(1024, 1024), (LARGE + 3,), (LARGE - 1,), (64, 32), (5,)]
SHAPES += [(8, 3, 4, 4), (256, 256, 4, 4)]
COUNTING = torch.arange(LARGE + 3, dtype=torch.int32)
TAKEN = ("data", "detach", "view", "numpy", "tensor", "dlpack", "flat", "nothing")
ZEROED = ("in place", "by the model", "by the optimizer", "the flat one", "to None")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False},
    {"weight": "samples"},
    {"reproducible": True},
    {"gradient_pool": False},
    {"compression": "int8"},
    {"compression": "topk"},
    {"reduce_dtype": torch.float64},
    {"hook": True},
    {"weight": "samples", "gradient_as_bucket_view": False},
]


class Net(nn.Module):
    """Its gradients are whatever `factors` holds; they arrive in an order that is not the one of registration."""

    def __init__(self, shapes: list[tuple[int, ...]], channels_last: bool) -> None:
        super().__init__()
        tensors = [torch.zeros(shape) for shape in shapes]
        if channels_last:
            tensors = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
        self.parts = nn.ParameterList(tensors)
        self.factors: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        used = [(p * c).sum() for p, c in zip(self.parts, self.factors, strict=True) if c is not None]
        random.Random(len(used)).shuffle(used)
        return torch.stack(used).sum() + 0 * x.mean()


def factor(index: int, rank: int, step: int, micro: int, shape: tuple[int, ...]) -> Tensor:
    """Small multiples of 4, so that sums and means are exact."""
    values = COUNTING[: torch.Size(shape).numel()] + (7 * rank + 5 * step + 3 * micro + index)
    return (values % 31 - 15).float().mul_(4).view(shape)


@dataclass
class Taken:
    kind: str
    what: Any
    index: int

    def now(self) -> Tensor:
        return torch.from_numpy(self.what) if self.kind == "numpy" else self.what


def take(kind: str, grad: Tensor) -> Any:
    if kind == "view":
        return grad.as_strided(grad.shape, grad.stride())
    if kind == "dlpack":
        return torch.utils.dlpack.from_dlpack(grad.__dlpack__())
    if kind == "flat":
        return grad[:]
    ways: dict[str, Callable[[], Any]] = {"data": lambda: grad.data, "detach": grad.detach, "numpy": grad.numpy}
    return ways[kind]() if kind in ways else grad


def lay_flat(parts: nn.ParameterList) -> Tensor:
    flat = torch.zeros(sum(part.numel() for part in parts) + 1)
    at = 1
    for part in parts:
        part.grad = flat.as_strided(part.shape, part.stride(), at)
        at += part.numel()
    return flat


def draw(seed: int, *, elastic: bool = False, only: dict[str, Any] | None = None) -> None:
    pick = random.Random(seed)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    usable = [one for one in OPTIONS if not (elastic and ("compression" in one or "hook" in one))]
    options = dict(pick.choice(usable) if only is None else only)
    net = Net(pick.sample(SHAPES, pick.randint(2, 4)), channels_last=pick.random() < 0.5)
    hooked, coded = options.pop("hook", False), "compression" in options
    weighted = "weight" in options
    flat = lay_flat(net.parts) if pick.random() < 0.3 else None
    model = RingDP(net, bucket_cap_mb=0.01, **options)
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    followers: list[Taken] = []  # show the mean
    keepers: list[tuple[Tensor, Tensor]] = []  # of a .grad that was let go, and what it was
    story = [f"seed {seed}", str(options), str([tuple(part.shape) for part in net.parts])]
    for step in range(4):
        micros = pick.choice([1, 1, 2])
        skipped = pick.choice([None, *range(len(net.parts))]) if not coded and not hooked and not weighted else None
        story.append(f"step {step}: {micros} micro-batches, {skipped} is not used on rank 1")
        sums: list[Any] = [0.0] * len(net.parts)
        rows = [1 + 2 * other for other in range(ranks)]
        for micro in range(micros):
            for index, part in enumerate(net.parts):
                for other in range(ranks):
                    if (index, other) != (skipped, 1):
                        share = rows[other] / micros / sum(rows) if weighted else 1 / ranks
                        sums[index] += share * factor(index, other, step, micro, tuple(part.shape)).double()
            net.factors = [
                None if (index, rank) == (skipped, 1) else factor(index, rank, step, micro, tuple(part.shape))
                for index, part in enumerate(net.parts)
            ]
            last = micro == micros - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.zeros(rows[rank], 1)).backward()
            if not last:  # what is taken before the mean shows it, too
                followers += grab(pick, net, story, among=("data", "numpy", "nothing"))
        for index, (part, mean) in enumerate(zip(net.parts, sums, strict=True)):
            assert part.grad is not None, story
            if coded:  # what a code left out comes later
                everywhere = [torch.empty_like(part.grad) for _ in range(ranks)]
                dist.all_gather(everywhere, part.grad)
                assert all(torch.equal(one, part.grad) for one in everywhere), (index, story)
            else:
                torch.testing.assert_close(part.grad.double(), mean, rtol=1e-6, atol=1e-5, msg=f"{index}: {story}")
        for one in followers:
            grad = net.parts[one.index].grad
            assert grad is not None
            assert torch.equal(one.now(), grad), (one.kind, one.index, story)
        for tensor, value in keepers:
            assert torch.equal(tensor, value), story
        followers += grab(pick, net, story)
        how = pick.choices(ZEROED, (3, 3, 3, 3, 2))[0]
        story.append(f"zeroed {how}")
        zero(how, model, optimizer, flat)
        if how == "to None":
            keepers += [(one.now(), one.now().clone()) for one in followers]
            followers.clear()
            flat = None


def grab(pick: random.Random, net: Net, story: list[str], among: tuple[str, ...] = TAKEN) -> list[Taken]:
    taken = []
    for index, part in enumerate(net.parts):
        kind = pick.choice(among)
        if kind != "nothing" and part.grad is not None:
            story.append(f"{kind} of {index}")
            taken.append(Taken(kind, take(kind, part.grad), index))
    return taken


def zero(how: str, model: RingDP, optimizer: torch.optim.Optimizer, flat: Tensor | None) -> None:
    if how == "by the model":
        model.zero_grad(set_to_none=False)
    elif how == "by the optimizer":
        optimizer.zero_grad(set_to_none=False)
    elif how == "to None":
        optimizer.zero_grad()
    else:
        if how == "the flat one" and flat is not None:
            flat.zero_()
        for part in model.parameters():
            assert part.grad is not None
            part.grad.zero_()


@pytest.mark.slow
@on_ranks((1, 2, 3), timeout_s=900)
@pytest.mark.timeout(2700)
def test_what_was_taken_of_a_gradient_shows_the_mean_in_many_programs() -> None:
    torch.set_num_threads(1)
    for seed in range(100, 130):
        draw(seed)


@on_ranks()
def test_what_was_taken_of_a_gradient_shows_the_mean_beside_each_option() -> None:
    torch.set_num_threads(1)
    for number, options in enumerate(OPTIONS):
        draw(50 + number, only=options)


@on_ranks(backend=None)
def test_an_array_of_a_small_gradient_in_an_elastic_job(tmp_path: Path) -> None:
    with joined(str(tmp_path), elastic=True) as rank:
        model = RingDP(nn.Linear(4, 4))
        arrays: list[Any] = []
        for step in range(6):
            model.zero_grad(set_to_none=False)
            model(torch.full((1, 4), float(2 * step + rank))).sum().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            arrays = arrays or [gradient.numpy() for gradient in gradients]
            assert (arrays[0] == 2 * step + 0.5).all()
            for array, gradient in zip(arrays, gradients, strict=True):
                assert torch.equal(torch.from_numpy(array), gradient)


@on_ranks(backend=None)
def test_in_an_elastic_job(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with joined(str(tmp_path), elastic=True):
        for seed in range(2):
            draw(seed, elastic=True)
