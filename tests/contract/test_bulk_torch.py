"""Operations named as bulk give way: what is small does not wait behind them on the same connection."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

import ringdp
from tests.train.harness import folder, run_ranks

VARIABLES = {"RINGDP_TRANSPORT": "tcp", "RINGDP_RATE": "400mbit"}
BULK_BYTES = 16 << 20  # 0.33 s at that rate


def rank_measures(store: str, bulk: bool) -> tuple[float, float, bool]:
    """Seconds of the slowest small all-reduce beside a large one, of that one, and whether it was still under way."""
    os.environ.update(VARIABLES)
    try:
        rank = int(os.environ["RANK"])
        dist.init_process_group("ring", init_method=f"file://{store}", rank=rank, world_size=2)
        large, small = torch.ones(BULK_BYTES // 4), torch.ones(1024)
        other = dist.new_group()
        assert isinstance(other, dist.ProcessGroup)
        dist.all_reduce(small, group=other)
        dist.barrier()
        began = time.monotonic()
        with ringdp.named("large", bulk=bulk):
            work = dist.all_reduce(large, async_op=True)
        assert work is not None
        took = []
        for _ in range(5):
            time.sleep(0.01)
            at = time.monotonic()
            dist.all_reduce(small, group=other)
            took.append(time.monotonic() - at)
        beside = not work.is_completed()
        work.wait()
        assert torch.equal(large, torch.full_like(large, 2.0))
        all_s = time.monotonic() - began
        dist.destroy_process_group()
        return max(took), all_s, beside
    finally:
        for name in VARIABLES:
            os.environ.pop(name)


def measured(name: str, bulk: bool) -> Sequence[tuple[float, float, bool]]:
    store = os.path.join(folder(2), name)
    return run_ranks(rank_measures, store, bulk, world_size=2, backend=None)


@pytest.mark.timeout(60)
def test_what_is_small_does_not_wait_behind_bulk() -> None:
    behind = measured("behind", False)
    beside = measured("beside", True)
    assert all(one[2] for one in beside), "the large one was over before the small ones were"
    assert max(one[0] for one in beside) < 0.15
    assert max(one[0] for one in behind) > 0.3  # so it is without
    assert max(one[1] for one in beside) < 1.5 * max(one[1] for one in behind)
