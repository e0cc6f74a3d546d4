"""The state that newcomers of an elastic job get, between ranks of a job that is not one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.elastic import transfer
from ringdp.errors import MismatchError
from tests.train.harness import default_group, ring_is_built, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

NEWCOMER = 2


def state(rank: int) -> dict[str, Any]:
    """As of a model and an optimizer: large, small, empty, of another type, not contiguous; and what is no tensor."""
    generator = torch.Generator().manual_seed(7)
    large = torch.randn(1_500_000, generator=generator)  # in huge pages on the newcomer
    return {
        "model": {"large": large, "small": torch.randn(3, 5, generator=generator).t(), "none": torch.empty(0)},
        "optimizer": {"state": [{"step": torch.tensor(3.0), "mask": torch.arange(9) > 4}], "lr": 0.1},
        "ringdp": {"step": 12, "places": (1, 2), "buffers": torch.full((4,), float(rank))},
    }


def sent(change: str, into: bool) -> Any:
    rank, group = dist.get_rank(), default_group()
    mine = state(rank)
    if rank == 1 and change == "shape":
        mine["optimizer"]["state"][0]["mask"] = torch.ones(4)
    if rank == 1 and change == "more":
        mine["optimizer"]["more"] = torch.ones(4)
    if rank == 1 and change == "value":
        mine["model"]["large"][-1] = 0.5
    target = torch.zeros(1_500_000)
    try:
        got = transfer.send(
            None if rank == NEWCOMER else mine,
            group,
            [NEWCOMER],
            into={"model/large": target} if into else None,
            of_one="ringdp/buffers".__eq__,
        )
    except MismatchError as error:
        return str(error)
    if into and rank == NEWCOMER:
        assert got["model"]["large"].data_ptr() == target.data_ptr()
    return got


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("into", [False, True])
def test_the_newcomer_has_what_the_lowest_member_has(into: bool) -> None:
    got = run_ranks(sent, "", into, world_size=3, backend="ring")[NEWCOMER]
    assert equal(got, state(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", r"rank 1 cannot send .*optimizer/state/0/mask \(4,\) of torch.float32, where rank 0 has .*\(9,\)"),
        ("more", r"rank 1 cannot send .*optimizer/more"),
        ("value", r"model/large has other values than on rank 0; ranks 0 to 1 sent it"),
    ],
)
def test_members_that_differ_end_the_newcomer_alone(change: str, words: str) -> None:
    told = run_ranks(sent, change, False, world_size=3, backend="ring")
    assert re.search(words, told[NEWCOMER]), told[NEWCOMER]
    for rank in (0, 1):
        assert told[rank]["ringdp"]["step"] == 12
