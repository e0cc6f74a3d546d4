"""torch.compile over RingDP: the module is compiled, what RingDP does around it is not traced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringdp import RingDP
from tests.train.harness import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def gradients(model: Any, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        model(torch.randn(8, 16)).square().mean().backward()
    return [it.grad.clone() for it in model.parameters()]


def graph_breaks(wrapper: Any) -> int:
    """Of three steps; and the gradients are those of the model that is not compiled, to the bit."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know")
        compiled = gradients(torch.compile(wrapper(net()), backend="eager"))
    assert all(map(torch.equal, compiled, gradients(wrapper(net()))))
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def as_few_as_ddp() -> tuple[int, int]:
    return graph_breaks(RingDP), graph_breaks(DistributedDataParallel)


@pytest.mark.ci  # dynamo takes seconds to import
def test_there_are_no_more_graph_breaks_than_with_ddp() -> None:
    for ours, theirs in run_ranks(as_few_as_ddp, world_size=2, backend="ring"):
        assert 0 < ours <= theirs
