"""What a GPU has and the host has not: a caching allocator, few queues for many streams, errors that show later."""

from __future__ import annotations

import os
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringdp import _C
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import PeerLostError, RingError
from tests.gpu.test_training_gpu import NCCL
from tests.train.harness import on_ranks, run_outcomes, run_ranks

pytestmark = pytest.mark.gpu

STEPS = 24
SETTLED_AFTER = 2
CLASSES, WIDTH = 20_000, 1024
SEGMENT_BYTES = 20 << 20  # what torch's allocator reserves for a block of 1 to 10 MiB
SLEEP_S = 0.5
CYCLES_PER_S = 2_000_000_000
ENDS_WITHIN_S = 10.0


# --- memory


def reserved_by_steps(compression: str | None) -> list[int]:
    """The bytes that the allocator has from the device after each step."""
    os.environ["RINGDP_REDUCE_ALONE"] = "1"
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    layers = [
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.ReLU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.Linear(WIDTH, CLASSES, bias=False),
    ]
    model = RingDP(nn.Sequential(*layers).cuda(), compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        seen.append(torch.cuda.memory_reserved())
    return seen


@pytest.mark.parametrize("ranks, backend", [(2, "ring"), (1, NCCL)])
@pytest.mark.parametrize("compression", [None, "int8", "topk"])
def test_reserved_memory_stays_after_the_first_steps(compression: str | None, ranks: int, backend: str) -> None:
    """But for one code of the largest bucket: the steps before may have had one less in flight."""
    code = _C.codec_bytes("int8", CLASSES * WIDTH) if compression == "int8" else 0
    for seen in run_ranks(reserved_by_steps, compression, world_size=ranks, backend=backend):
        assert seen[-1] - seen[SETTLED_AFTER - 1] <= max(code, SEGMENT_BYTES), seen


# --- streams


@on_ranks()
def test_copies_do_not_wait_behind_streams_of_the_users() -> None:
    """A GPU has fewer queues than there are streams, and what shares a queue waits; those of a higher priority have
    others, as the copies' streams do. So has the caller's here, or its own would wait."""
    world = dist.get_world_size()
    x = torch.ones(25 << 18, device="cuda")
    dist.all_reduce(x)  # which makes streams and pinned memory
    torch.cuda.synchronize()
    dist.barrier()
    streams = [torch.cuda.Stream() for _ in range(40)]
    for one in streams:
        with torch.cuda.stream(one):
            torch.cuda._sleep(int(SLEEP_S * CYCLES_PER_S))
    began = time.monotonic()
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        dist.all_reduce(x)
        torch.cuda.current_stream().synchronize()
    seconds = time.monotonic() - began
    still_asleep = not streams[-1].query()
    torch.cuda.synchronize()
    assert still_asleep
    assert seconds < SLEEP_S / 2
    assert bool((x == world**2).all())


# --- an assert in a kernel


def assert_on_rank_0(compression: str | None) -> None:
    """A kernel's assert leaves nothing of the process's context; the script ends by the error that it gets."""
    rank = dist.get_rank()
    model = RingDP(
        nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).cuda(), bucket_cap_mb=0.5, compression=compression
    )
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    began = time.monotonic()
    try:
        for step in range(3):
            loss = model(torch.ones(4, 512, device="cuda")).sum()
            if rank == 0 and step == 1:
                torch._assert_async(torch.zeros((), device="cuda"))
            loss.backward()
            torch.cuda.synchronize()
    except Exception:
        assert time.monotonic() - began < ENDS_WITHIN_S
        if rank == 0:
            traceback.print_exc()
            os._exit(3)
        raise


@pytest.mark.parametrize("compression", [None, "int8"])
def test_an_assert_in_a_kernel_is_an_error_on_all_ranks(compression: str | None) -> None:
    broken, other = run_outcomes(
        assert_on_rank_0, compression, backend="ring", timeout_s=2 * ENDS_WITHIN_S, others_stay=True
    )
    assert broken.died
    assert broken.text is not None
    assert broken.text.startswith("died with code 3"), "it ended otherwise than by the error that it got"
    assert "assert" in broken.text
    assert isinstance(other.error, RingError), other
    assert "rank 0" in str(other.error)
    assert not isinstance(other.error, PeerLostError) or other.error.peer == 0
