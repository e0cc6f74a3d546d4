"""A backward whose communication fails: what it raises, which names it says, and what the next forward says."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringdp
from ringdp import Compression
from ringdp.compression import TopK
from ringdp.ddp.wrapper import RingDP
from tests.train.harness import backends, on_ranks, run_outcomes


def peer_dies(how: str) -> dict[str, object]:
    torch.manual_seed(0)
    rules = [("*", TopK(0.5))] if how == "in Python" else []
    model = RingDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), compression=Compression(rules=rules))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    value = model(x).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failure:
        value.backward()
    with pytest.raises(ringdp.InvalidStateError) as afterwards:
        model(x)
    fields = {name: getattr(failure.value, name, None) for name in ("bucket", "name", "step", "peer")}
    return {
        "type": type(failure.value).__name__,
        "text": str(failure.value),
        "afterwards": str(afterwards.value),
        "fields": fields,
    }


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("how", ["in C++", "in Python"])
def test_a_rank_dies(backend: str, how: str) -> None:
    alive, dead = run_outcomes(peer_dies, how, backend=backend)
    assert dead.text is not None
    assert "code -9" in dead.text
    assert alive.text is None, alive.text
    story = alive.value
    assert "step 2" in story["text"]
    assert "bucket 0: 1.bias, 1.weight, 0.bias, 0.weight" in story["text"]
    assert "failed in step 2" in story["afterwards"]
    assert "bucket 0" in story["afterwards"]
    if backend == "ring":
        assert story["type"] == "PeerLostError"
        assert story["fields"] == {"bucket": 0, "name": story["fields"]["name"], "step": 2, "peer": 1}
        assert story["fields"]["name"].startswith("bucket 0: 1.bias")


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")


@on_ranks(backend=backends())
def test_backward_is_left_by_an_exception_before_any_bucket() -> None:
    """The next step works as if nothing had been."""
    model = RingDP(nn.Linear(4, 2))
    with pytest.raises(KeyError, match="mine"):
        Raise.apply(model(torch.ones(1, 4))).sum().backward()
    value = model(torch.full((1, 4), float(dist.get_rank()))).sum()
    value.backward()
    assert model.module.weight.grad is not None
    torch.testing.assert_close(model.module.weight.grad, torch.full((2, 4), 0.5))


@on_ranks(backend=backends())
def test_backward_is_left_by_an_exception_after_a_bucket() -> None:
    """The ranks no longer agree, and the next forward says so."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(Raise.apply(self.first(x)))
            return result

    model = RingDP(Model(), bucket_cap_mb=0.00001)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(torch.ones(1, 4))
    assert "first.weight, first.bias" in str(caught.value)
    assert "1 of 3 buckets" in str(caught.value)
