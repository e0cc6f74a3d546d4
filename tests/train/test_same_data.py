"""Ranks that compute the same gradients are asked, once, whether they read the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import logged
from tests.train.harness import default_group, run_ranks
from tests.train.test_forwards import batch, wrapped


def asked(data: str, steps: int = 35, loss: str = "square", **options: Any) -> list[str]:
    rank = default_group().rank()
    model = wrapped(
        nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)), **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with logged("ringdp.divergence") as lines:
        for number in range(steps):
            same = data == "same" or (data == "at first" and number < 4)
            x = batch(number, 0 if same else rank)
            out = model(x) * (0 if data == "zeros" else 1)
            (out.sum() if loss == "sum" else out.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines


@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "int8"}, {"gradient_as_bucket_view": False}, {"weight": "samples"}, {"guard": 100}],
    ids=str,
)
def test_rank_0_asks_once(options: dict[str, Any]) -> None:
    lines, others = run_ranks(asked, "same", backend="ring", timeout_s=40, **options)
    assert others == []
    assert len(lines) == 1, lines
    assert "read the same data" in lines[0]


@pytest.mark.parametrize(
    ("data", "loss"), [("own", "square"), ("own", "sum"), ("at first", "square"), ("zeros", "square")]
)
def test_nothing_is_asked_of_ranks_with_samples_of_their_own(data: str, loss: str) -> None:
    assert run_ranks(asked, data, loss=loss, backend="ring", timeout_s=40) == [[], []]


def test_a_guard_that_is_switched_off_asks_nothing() -> None:
    assert run_ranks(asked, "same", guard=0, backend="ring", timeout_s=40) == [[], []]


def test_one_rank_asks_nothing() -> None:
    assert run_ranks(asked, "same", world_size=1, backend="ring", timeout_s=40) == [[]]
