"""RingDP with codes that go by the group's own collectives, as for GPUs, here between CPU tensors: the same bits, the
same memory and the same verdicts as by the core's compressed all-reduce.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

OVERFLOW_IN = 2


def module() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 30))


def steps(exchange: bool, compression: str) -> dict[str, Any]:
    """Gradients of every step, what is remembered in the end, and what was finite."""
    from ringdp.ddp.compression.choice import GradientCompression
    from ringdp.ddp.wrapper import RingDP
    from tests.train.compressed_training import codes_exchanged

    with codes_exchanged(exchange):
        model: Any = RingDP(module(), compression=compression, bucket_cap_mb=0.004)
        rank = dist.get_rank()
        gradients, finite = [], []
        for step in range(5):
            model.zero_grad()
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * rank + step))
            loss = model(x).square().sum()
            if step == OVERFLOW_IN and rank == 1:
                loss = loss * float("inf")
            loss.backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            finite.append(model.reducer.overflow.finite())
        own = model.compression_state_dict()["ranks"][str(rank)]
        mean = model.compression_state_dict(consolidated=True)["parameters"]
        model.load_compression_state_dict(model.compression_state_dict())
        again = model.compression_state_dict()["ranks"][str(rank)]
        in_core = model.ringdp_features[GradientCompression].attached("test").in_core(0)
        rows = model.compression_stats()
    return {
        "gradients": gradients,
        "finite": finite,
        "own": {name: entry.get("residual") for name, entry in own.items()},
        "again": {name: entry.get("residual") for name, entry in again.items()},
        "mean": {name: entry.get("residual") for name, entry in mean.items()},
        "culprit": model.reducer.overflow.own_non_finite(),
        "in_core": in_core,
        "rows": rows is not None,
    }


def same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left.nan_to_num(nan=7e37), right.nan_to_num(nan=7e37))  # NaNs differ in bits that mean nothing


@pytest.mark.parametrize("compression", ["int4", "int8", pytest.param("int6", marks=pytest.mark.slow), "nf4"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_same_as_by_the_core(world_size: int, compression: str) -> None:
    core = run_ranks(steps, False, compression, world_size=world_size, backend="ring")
    for rank in core:
        assert rank["finite"] == [True, True, False, True, True]
    for backend in ("ring", "gloo"):
        exchanged = run_ranks(steps, True, compression, world_size=world_size, backend=backend)
        for ours, theirs in zip(exchanged, core, strict=True):
            assert ours["in_core"]
            assert ours["finite"] == theirs["finite"]
            for step, (mine, wanted) in enumerate(zip(ours["gradients"], theirs["gradients"], strict=True)):
                for index, (one, other) in enumerate(zip(mine, wanted, strict=True)):
                    if one.dim() > 1 or backend == "ring":  # gloo adds exact gradients in an order of its own
                        assert same(one, other), (backend, step, index)
            for what in ("own", "again", "mean"):
                assert ours[what].keys() == theirs[what].keys()
                for name, residual in ours[what].items():
                    if what == "mean" and backend == "gloo" and residual is not None:  # an exact all-reduce, too
                        torch.testing.assert_close(residual, theirs[what][name])
                    else:
                        assert same(residual, theirs[what][name]), (backend, what, name)
            assert ours["rows"]
