"""What tensors take under RingDP: at the peak no more than under DDP, between steps nothing for large ones.

In one process, with a group of two of which nobody plays the second and a hook that gives buckets back at once: torch's
profiler does not see what other threads free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringdp.ddp.wrapper import RingDP

LARGE_BYTES = 4 << 20  # from here on a gradient is reduced where autograd left it
PER_PARAMETER_BYTES = 256  # alignment within a bucket, and a mark that it was used


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def memory_of(action: Callable[[], Any]) -> tuple[int, int]:
    """(the most that tensors made during `action` took at once, what they take after it), in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = action()
    events: Any = seen.profiler.kineto_results.events()
    live = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += change
        peak = max(peak, live)
    del kept
    return peak, live


def build() -> nn.Module:
    torch.manual_seed(0)
    small = [nn.Linear(256, 256) for _ in range(12)]
    return nn.Sequential(*small, nn.Linear(256, 4608), nn.ReLU(), nn.Linear(4608, 512), nn.Linear(512, 4))


def train(wrapped: DistributedDataParallel, set_to_none: bool) -> nn.Module:
    wrapped.register_comm_hook(None, noop_hook)
    for step in range(3):
        wrapped.zero_grad(set_to_none=set_to_none)
        x = torch.randn(2, 256, generator=torch.Generator().manual_seed(step))
        wrapped(x).sum().backward()
    return wrapped


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_peak_is_not_above_that_of_ddp_with_views(set_to_none: bool) -> None:
    modules = build(), build()
    sizes = [4 * parameter.numel() for parameter in modules[0].parameters()]
    assert sum(size >= LARGE_BYTES for size in sizes) == 2
    slack = PER_PARAMETER_BYTES * len(sizes)
    theirs, _ = memory_of(lambda: train(DistributedDataParallel(modules[0], gradient_as_bucket_view=True), set_to_none))
    ours, left = memory_of(lambda: train(RingDP(modules[1]), set_to_none))
    assert ours <= theirs + slack, f"{ours} bytes, DDP {theirs}"
    assert sum(sizes) <= left <= sum(sizes) + slack, f"{left} bytes between steps, {sum(sizes)} of gradients"
    for mine, other in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_large_gradients_take_nothing_between_steps() -> None:
    module = build()
    small = sum(4 * p.numel() for p in module.parameters() if 4 * p.numel() < LARGE_BYTES)

    def steps() -> nn.Module:
        wrapped = train(RingDP(module), True)
        wrapped.zero_grad()
        return wrapped

    _, left = memory_of(steps)
    slack = PER_PARAMETER_BYTES * len(list(module.parameters()))
    assert left <= small + slack, f"{left} bytes where no parameter has a gradient; the small ones take {small}"
