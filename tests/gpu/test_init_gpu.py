"""ringdp.init on a machine with a GPU: one rank, two ranks on one GPU, a rank on the CPU beside one on the GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringdp
from tests.train.harness import RankFailed, run_ranks

pytestmark = pytest.mark.gpu


class Lines(logging.Handler):
    """What the logger ringdp.process_group says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


def joins(store: str, ranks: int, choice: str, devices: list[str | None]) -> dict[str, Any]:
    """What a rank gets from init, and what an all-reduce there gives."""
    os.environ["RINGDP_CUDA"] = choice
    rank = int(os.environ["RANK"]) if ranks > 1 else 0
    logger, lines = logging.getLogger("ringdp.process_group"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    ringdp.init(rank=rank, world_size=ranks, init_method=f"file://{store}", device=devices[rank], timeout=60)
    try:
        total = torch.full((70_000,), float(rank + 1), device=ringdp.device())
        dist.all_reduce(total)
        return {
            "device": str(ringdp.device()),
            "backend": str(dist.get_backend_config()),
            "total": total[-1].item(),
            "said": [text for text in lines.texts if "CUDA tensors" in text],
        }
    finally:
        logger.removeHandler(lines)
        ringdp.shutdown()


def on_ranks(tmp_path: Path, ranks: int, choice: str = "", devices: list[str | None] | None = None) -> list[Any]:
    wanted = devices or [None] * ranks
    return run_ranks(joins, str(tmp_path / "store"), ranks, choice, wanted, world_size=ranks, backend=None)


def test_one_rank_has_its_gpu_and_nccl(tmp_path: Path) -> None:
    (only,) = on_ranks(tmp_path, 1)
    assert only["device"] == "cuda:0"
    assert "cuda:nccl" in only["backend"]
    assert only["total"] == 1
    assert only["said"] == ["INFO CUDA tensors go over NCCL: each rank has a GPU of its own"]


def test_one_rank_on_ring_where_that_is_asked_for(tmp_path: Path) -> None:
    (only,) = on_ranks(tmp_path, 1, "ring")
    assert (only["device"], only["total"]) == ("cuda:0", 1)
    assert "nccl" not in only["backend"]
    assert only["said"] == ["INFO CUDA tensors go over ring, through the host's memory: RINGDP_CUDA=ring"]


@pytest.mark.parametrize("choice", ["", "auto"])
def test_more_ranks_than_gpus_share_them_over_ring(tmp_path: Path, choice: str) -> None:
    ranks = torch.cuda.device_count() + 1
    told = on_ranks(tmp_path, ranks, choice)
    assert told[0]["device"] == told[-1]["device"] == "cuda:0"
    assert {one["total"] for one in told} == {ranks * (ranks + 1) / 2}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert f"share GPU {uuid}" in told[0]["said"][0]
    assert told[0]["said"][0].startswith("WARNING")
    assert [one["said"] for one in told[1:]] == [[]] * (ranks - 1)


def test_nccl_on_demand_names_the_ranks_it_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"RINGDP_CUDA=nccl and ranks 0 and \d on \S+ share GPU .* NCCL would refuse"):
        on_ranks(tmp_path, torch.cuda.device_count() + 1, "nccl")


def test_a_rank_on_the_cpu_and_one_on_the_gpu(tmp_path: Path) -> None:
    first, second = on_ranks(tmp_path, 2, devices=["cuda", "cpu"])
    assert (first["device"], second["device"]) == ("cuda:0", "cpu")
    assert first["total"] == second["total"] == 3
    assert "rank 1 on" in first["said"][0]
    assert "computes on the CPU" in first["said"][0]
