"""One rank sends nothing, unless RINGDP_REDUCE_ALONE asks for it: then the group reduces its buckets."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import nn

from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError
from tests.train.harness import on_ranks, run_ranks


def in_one_bucket(setting: str) -> bool:
    with mock.patch.dict(os.environ, {"RINGDP_REDUCE_ALONE": setting}):
        model = RingDP(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    first, second = [p.grad for p in model.parameters() if p.grad is not None]
    assert torch.equal(first, torch.full((8, 8), 2.0))
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", ["ring", "gloo"])
def test_one_rank_reduces_its_buckets_where_it_is_told_to(backend: str) -> None:
    assert run_ranks(in_one_bucket, "1", world_size=1, backend=backend) == [True]
    assert run_ranks(in_one_bucket, "0", world_size=1, backend=backend) == [False]


@on_ranks(1)
def test_nonsense_is_refused() -> None:
    with (
        mock.patch.dict(os.environ, {"RINGDP_REDUCE_ALONE": "yes"}),
        pytest.raises(InvalidArgumentError, match="RINGDP_REDUCE_ALONE"),
    ):
        RingDP(nn.Linear(2, 2))
