"""mixed_precision: what computes in which dtype, what is sent in which, and that everything outside stays as it was."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ringdp.ddp.wrapper import RingDP
from tests.train.harness import backends, run_ranks

pytestmark = pytest.mark.parametrize("backend", backends())

HALF = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Kinds(nn.Module):
    """Layers that keep their parameters elsewhere too, use a child's directly, or share one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.last = nn.Linear(8, 3)
        self.tied = nn.Linear(8, 3)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor, checkpointing: str = "no") -> Tensor:
        assert {p.dtype for p in self.parameters()} == {x.dtype}
        assert self.last.weight is self.tied.weight
        y = self.first(x)
        if checkpointing == "no":
            y = self.attention(y, y, y)[0]
        else:
            y = checkpoint(self.attention, y, y, y, use_reentrant=checkpointing == "reentrant")[0]
        y = self.recurrent(y)[0][:, -1] * self.frozen
        return self.last(self.norm(y)) + self.tied(y)


def built() -> Kinds:
    torch.manual_seed(0)
    return Kinds()


def data() -> Tensor:
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def gradients(model: nn.Module, *arguments: Any) -> list[Tensor]:
    model.zero_grad()
    model(data(), *arguments).float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def as_one_process_in_low_precision() -> None:
    """A module that is bfloat16 throughout computes the same; its gradients averaged in bfloat16 are what arrives."""
    ours = RingDP(built(), mixed_precision=HALF)
    assert ours.module.norm.running_mean.dtype == torch.bfloat16
    assert ours.module.norm.num_batches_tracked.dtype == torch.int64
    found = gradients(ours)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert {one.dtype for one in found} == {torch.float32}
    low = built().bfloat16()
    low(data().bfloat16()).float().square().sum().backward()
    expected = [p.grad for p in low.parameters() if p.grad is not None]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        averaged = other.clone()
        dist.all_reduce(averaged)
        averaged.div_(dist.get_world_size())
        # The ring adds in float32 and rounds once, gloo rounds the sum: at most one step of bfloat16.
        torch.testing.assert_close(one, averaged.float(), rtol=2**-7, atol=1e-4)
        assert torch.equal(one, one.bfloat16().float())  # what was sent had no more bits
        everybody = [torch.zeros_like(one) for _ in range(2)]
        dist.all_gather(everybody, one)
        assert torch.equal(everybody[0], everybody[1])


def reduced_in_full_precision() -> None:
    """reduce_dtype above param_dtype: the average of both ranks' rounded gradients is not rounded again."""
    ours = RingDP(
        nn.Linear(1, 1, bias=False),
        mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    ours(torch.tensor([[1.0 if dist.get_rank() else 2.0**-8]])).sum().backward()
    assert ours.module.weight.grad.item() == (1 + 2.0**-8) / 2  # bfloat16 has 8 bits


def checkpointing() -> None:
    ours = RingDP(built(), mixed_precision=HALF)
    expected = gradients(ours)
    for kind in ("non-reentrant", "reentrant"):
        for one, other in zip(gradients(ours, kind), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-2)


def accumulation_and_copies() -> None:
    """Gradients add up in float32; copies of the wrapper compute alike; the module by itself computes in full."""
    ours = RingDP(built().eval(), mixed_precision=HALF)
    expected = gradients(ours)
    ours.zero_grad()
    with ours.no_sync():
        ours(data()).float().square().sum().backward()
    ours(data()).float().square().sum().backward()
    for parameter, once in zip([p for p in ours.parameters() if p.grad is not None], expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * once, rtol=2**-6, atol=1e-2)
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False)):
        for one, again in zip(gradients(other), expected, strict=True):
            torch.testing.assert_close(one, again, rtol=0, atol=0)
    assert {tensor.dtype for name, tensor in ours.state_dict().items() if "norm" not in name} == {torch.float32}
    with torch.no_grad():
        assert ours(data()).dtype == torch.bfloat16
    assert ours.module.first(data()).dtype == torch.float32


def ignored_and_failing() -> None:
    """Parameters that DDP ignores are not cast; a forward that raises leaves full precision behind."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    RingDP._set_params_and_buffers_to_ignore_for_model(module, ["1.weight", "1.bias"])
    ours = RingDP(module, mixed_precision=HALF)
    with pytest.raises(RuntimeError, match="dtype"):
        ours(torch.ones(2, 4))  # the second layer is float32
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    with pytest.raises(RuntimeError, match="cannot be combined"):
        ours.register_comm_hook(None, lambda state, bucket: None)


CASES = [
    as_one_process_in_low_precision,
    reduced_in_full_precision,
    checkpointing,
    accumulation_and_copies,
    ignored_and_failing,
]


@pytest.mark.parametrize("case", CASES)
def test_mixed_precision(backend: str, case: Any) -> None:
    run_ranks(case, backend=backend)
