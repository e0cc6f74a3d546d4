"""A backward that is asked to synchronise after its forward was told not to, as Lightning and Accelerate do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.train.harness import run_ranks
from tests.train.models import batch, build


def demanded(*, ours: bool, find_unused: bool) -> list[list[Tensor]]:
    """Gradients after a quiet backward, after one that was asked to synchronise, and after a quiet one again."""
    from ringdp import RingDP

    wrapper: Any = RingDP if ours else DistributedDataParallel
    model = wrapper(build("mlp"), find_unused_parameters=find_unused)
    found = []
    for step, demands in enumerate([False, True, False, True]):
        with model.no_sync():
            loss = torch.nn.functional.cross_entropy(model(batch(step, dist.get_rank())[0]), batch(step, 0)[1])
            if demands:
                model.reducer._rebuild_buckets()
                model.reducer.prepare_for_backward([loss] if find_unused else [])
            loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        if demands:
            model.zero_grad()
    return found


@pytest.mark.parametrize("find_unused", [False, True])
def test_the_last_word_decides(find_unused: bool) -> None:
    ours = run_ranks(demanded, ours=True, find_unused=find_unused, backend="ring")
    theirs = run_ranks(demanded, ours=False, find_unused=find_unused, backend="gloo")
    for rank in range(2):
        for mine, reference in zip(ours[rank], theirs[rank], strict=True):
            for gradient, expected in zip(mine, reference, strict=True):
                torch.testing.assert_close(gradient, expected)
    quiet = zip(ours[0][2], ours[1][2], strict=True)
    assert not any(torch.equal(a, b) for a, b in quiet), "a backward under no_sync alone stays this rank's own"
