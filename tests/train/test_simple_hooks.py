"""The hooks that compress nothing, or by a cast: on torch's DDP and on RingDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.errors import InvalidArgumentError
from ringdp.hooks import allreduce_hook, bf16_hook, fp16_hook, noop_hook, post_local_sgd
from tests.train.compressed import build, digest, loss_of
from tests.train.harness import backends, on_ranks, run_ranks


def wrappers() -> list[Any]:
    from ringdp.ddp.wrapper import RingDP

    return [DistributedDataParallel, RingDP]


def gradients(model: nn.Module, step: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, step, dist.get_rank()).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def averaged() -> list[str]:
    """By wrapper and hook: close to the mean without a hook; the digests."""
    digests = []
    exact = gradients(DistributedDataParallel(build()))
    for wrapper in wrappers():
        for hook, close in ((allreduce_hook, 1e-6), (fp16_hook, 2e-3), (bf16_hook, 2e-2)):
            model = wrapper(build())
            model.register_comm_hook(None, hook)
            for one, other in zip(gradients(model), exact, strict=True):
                torch.testing.assert_close(one, other, rtol=close, atol=close / 10)
                assert one.dtype == torch.float32
            digests.append(digest(gradients(model, 1)))
    return digests


@pytest.mark.parametrize("backend", backends())
def test_averaged_as_they_are_or_in_half_the_bytes(backend: str) -> None:
    first, second, third = run_ranks(averaged, world_size=3, backend=backend)
    assert first == second == third


@on_ranks(backend=backends())
def test_no_communication() -> None:
    for wrapper in wrappers():
        model = wrapper(build())
        model.register_comm_hook(None, noop_hook)
        for one, other in zip(gradients(model), gradients(build()), strict=True):
            assert torch.equal(one, other)


def drifting(ranks_together: int) -> list[list[str]]:
    """By wrapper: the parameters' digest after each of six steps; averaged after steps 2 and 4, by gradients before."""
    seen = []
    for wrapper in wrappers():
        model = wrapper(build())
        plan = post_local_sgd(warmup_steps=2, period=2, ranks_together=ranks_together)
        model.register_comm_hook(plan.state, plan.hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        digests = []
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, dist.get_rank()).backward()
            optimizer.step()
            plan.average(model)
            digests.append(digest(model.parameters()))
        seen.append(digests)
    return seen


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("ranks_together", [1, 2])
def test_local_steps_and_parameters_that_meet(backend: str, ranks_together: int) -> None:
    ranks = run_ranks(drifting, ranks_together, world_size=4, backend=backend)
    for wrapper in range(2):
        for step in range(6):
            different = len({seen[wrapper][step] for seen in ranks})
            assert different == (1 if step in (0, 1, 2, 4) else 4 // ranks_together), step


@on_ranks(backend=backends())
def test_numbers_that_cannot_be() -> None:
    for warmup_steps, period in ((-1, 2), (0, 1)):
        with pytest.raises(InvalidArgumentError):
            post_local_sgd(warmup_steps=warmup_steps, period=period)
    with pytest.raises(InvalidArgumentError):
        post_local_sgd(warmup_steps=0, period=4, ranks_together=3)
