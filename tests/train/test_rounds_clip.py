"""Changes that are far larger than the other ranks' count as smaller ones (`clip`)."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.errors import InvalidArgumentError
from ringdp.rounds import DiLoCo, Fragments, LocalSGD
from tests.helpers import logged
from tests.train.harness import on_ranks

SIZE, RANKS, CLIP = 1000, 3, 2.0
FAR = {2: 1, 4: 0}  # by round, who is far off


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))


def delta(rank: int, number: int) -> Tensor:
    """This rank's change in that round."""
    draw = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(SIZE, generator=draw) * (50.0 if FAR.get(number) == rank else 1.0)


def expected(last: int) -> list[Tensor]:
    """The global parameters after each round, by the definition."""
    median = 0.0
    total = torch.zeros(SIZE)
    found: list[Tensor] = []
    for number in range(1, last + 1):
        changes = [delta(rank, number) for rank in range(RANKS)]
        norms = [float(one.norm()) for one in changes]
        most = CLIP * median if median else float("inf")
        clipped = [one * min(1.0, most / norm) for one, norm in zip(changes, norms, strict=True)]
        total = torch.sub(total, torch.stack(clipped).mean(0))
        median = sorted(norms)[RANKS // 2]
        found.append(total)
    return found


def rounds_of(module: Flat, kind: type[DiLoCo], **options: Any) -> tuple[DiLoCo, torch.optim.Optimizer]:
    inner = torch.optim.SGD(module.parameters(), 0.0)
    outer: dict[str, Any] = {} if kind is LocalSGD else {"outer": {"lr": 1.0, "momentum": 0.0}}
    return kind(module, inner, every=1, clip=CLIP, **outer, **options), inner


def change(module: Flat, inner: torch.optim.Optimizer, number: int) -> None:
    with torch.no_grad():
        module.weight.sub_(delta(dist.get_rank(), number))
    module.weight.grad = torch.zeros(SIZE)
    inner.step()


WAYS: list[tuple[type[DiLoCo], dict[str, Any], float]] = [
    (DiLoCo, {}, 1e-5),
    (LocalSGD, {}, 1e-4),  # the mean is one of parameters
    (DiLoCo, {"compression": "int8"}, 0.2),
    (DiLoCo, {"quorum": 1.0}, 1e-5),
]


@pytest.mark.parametrize(("kind", "options", "error"), WAYS, ids=["exact", "local", "int8", "quorum"])
@on_ranks(RANKS)
def test_a_change_that_is_far_off_is_clipped_and_named(
    kind: type[DiLoCo], options: dict[str, Any], error: float
) -> None:
    module = Flat()
    rounds, inner = rounds_of(module, kind, **options)
    with logged("ringdp.rounds") as lines:
        for number, wanted in enumerate(expected(5), 1):
            change(module, inner, number)
            torch.testing.assert_close(module.weight.detach(), wanted, rtol=0, atol=error)
    rounds.finish()
    named = [line for line in lines if "counts as one of norm" in line]
    assert len(named) == len(FAR), lines
    for line, rank in zip(named, FAR.values(), strict=True):
        assert re.search(rf"the change of rank {rank}, of norm 1\.[56]\de\+03, counts as one of norm 6\d", line), line


@on_ranks(RANKS)
def test_a_state_between_does_not_change_what_is_named() -> None:
    """It waits for a change on its way, whose median is of the next round."""
    module = Flat()
    inner = torch.optim.SGD(module.parameters(), 0.0)
    rounds = DiLoCo(module, inner, every=2, clip=CLIP, fragments=Fragments(1, delay=1, mix=0.0), outer={"lr": 1.0})
    with logged("ringdp.rounds") as lines:
        for number in range(1, 8):
            change(module, inner, number if number % 2 == 0 else 1)
            rounds.state_dict()
        rounds.finish()
    named = [line for line in lines if "counts as one of norm" in line]
    assert len(named) == 1, lines
    assert re.search(r"the change of rank 0, of norm 1\.[56]\de\+03, counts as one of norm", named[0]), lines


@on_ranks(RANKS)
def test_a_state_has_the_median() -> None:
    module = Flat()
    rounds, inner = rounds_of(module, DiLoCo)
    change(module, inner, 1)
    saved = copy.deepcopy((module.state_dict(), rounds.state_dict()))
    change(module, inner, 2)
    again = Flat()
    its, other = rounds_of(again, DiLoCo)
    again.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    change(again, other, 2)
    assert torch.equal(module.weight, again.weight)
    torch.testing.assert_close(again.weight.detach(), expected(2)[1], rtol=0, atol=1e-5)


@on_ranks(1)
def test_arguments() -> None:
    for wrong in (0.5, -1, True, float("inf"), float("nan"), "much"):
        with pytest.raises(InvalidArgumentError, match="clip"):
            DiLoCo(module := Flat(), torch.optim.SGD(module.parameters(), 0.1), clip=wrong)  # type: ignore[arg-type]
