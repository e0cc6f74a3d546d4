# mypy: disable-error-code="attr-defined"
"""torch's time estimation on ring: what is called inside is not run, and everything after it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)"),
    pytest.mark.skipif(
        not hasattr(torch._C._distributed_c10d.Backend, "_start_time_estimate"),
        reason="torch asks backends beside NCCL since 2.15",
    ),
]


def estimates() -> None:
    world = dist.get_world_size()
    ones = torch.ones(1 << 20)
    cpu = torch.device("cpu")
    if dist.get_rank() == 0:  # not run: the others need not take part
        with dist._time_estimator(device=cpu) as small:
            dist.all_reduce(ones[:1000])
        with dist._time_estimator(device=cpu) as large:
            dist.all_reduce(ones)
            works = [dist.all_reduce(ones, async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
                assert work.is_completed()
            dist.broadcast(ones, 0)
            dist.all_gather([torch.zeros(5) for _ in range(world)], ones[:5])
            dist.barrier()
            assert works[0].get_future().wait()[0].data_ptr() == ones.data_ptr()
        assert 0 < small.estimated_time < large.estimated_time
        with pytest.raises(RuntimeError, match="no estimate of this process group is under way"):
            dist.distributed_c10d._get_default_group()._get_backend(cpu)._end_time_estimate()
    assert (ones == 1).all()
    dist.all_reduce(ones)
    assert (ones == world).all()


def test_an_estimate_moves_nothing() -> None:
    run_ranks(estimates, world_size=3, backend="ring")
