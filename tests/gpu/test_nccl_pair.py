"""Two ranks over NCCL on one GPU: NCCL takes them for two hosts, each by its NCCL_HOSTID, and connects them by sockets.

For right and wrong, not for speed: the kernels of the two take turns.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringdp
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import MismatchError, PeerLostError, RingTimeoutError
from tests.fault.launch_jobs import wait_until
from tests.gpu.test_codes_gpu import check_against_the_cpu, remembered
from tests.gpu.test_training_gpu import NCCL, SHAPES, check_against_the_formula, gradients_of
from tests.train.given_gradients import Given, noise
from tests.train.harness import run_outcomes, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")]

NAMED_WITHIN_S = 2.0
TIMEOUT_S = 3.0
BY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def as_two_hosts() -> int:
    """Before the first collective, at which NCCL reads it; the rank."""
    rank = dist.get_rank()
    os.environ.update(BY_SOCKETS, NCCL_HOSTID=f"host-of-rank-{rank}")
    torch.cuda.set_device(0)
    return rank


def gradients_over_nccl(compression: str | None) -> list[list[Tensor]]:
    as_two_hosts()
    return gradients_of(["cuda", "cuda"], compression)


def test_exact_means() -> None:
    told = run_ranks(gradients_over_nccl, None, backend=NCCL)
    for step in range(len(told[0])):
        every = [noise(SHAPES, rank, step) for rank in range(2)]
        for number, name in enumerate(SHAPES):
            mean = (every[0][name] + every[1][name]) / 2
            for seen in told:
                torch.testing.assert_close(seen[step][number], mean, rtol=1e-6, atol=1e-6)
            assert torch.equal(told[0][step][number], told[1][step][number])


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_compressed_means_have_the_bits_of_the_formula(codec: str) -> None:
    check_against_the_formula(run_ranks(gradients_over_nccl, codec, backend=NCCL), codec)


def remembered_over_nccl(compression: str) -> dict[str, Any]:
    as_two_hosts()
    return remembered("cuda:0", compression)


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_residuals_have_the_bits_of_the_cpu(compression: str) -> None:
    """Also after a step that was not finite; and backward waits for nothing."""
    check_against_the_cpu(run_ranks(remembered_over_nccl, compression, backend=NCCL), compression)


def step_of(model: RingDP, shapes: dict[str, tuple[int, ...]], rank: int, step: int) -> None:
    model({name: one.cuda() for name, one in noise(shapes, rank, step).items()}).backward()
    torch.cuda.synchronize()
    dist.barrier()


def kill_self_in_backward(model: RingDP, after_s: float) -> None:
    def die(_: Tensor) -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    next(model.parameters()).register_hook(die)


def leave() -> None:
    """Not waiting for torch's watchdog, which sleeps for a minute where it has seen the failure first."""
    began = time.monotonic()
    ringdp.shutdown()
    assert time.monotonic() - began < NAMED_WITHIN_S


def die_in_a_step() -> float:
    rank = as_two_hosts()
    model = RingDP(Given(SHAPES).cuda())
    step_of(model, SHAPES, rank, 0)
    if rank == 1:
        kill_self_in_backward(model, 0.0)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        step_of(model, SHAPES, rank, 1)
    assert caught.value.peer == 1
    seconds = time.monotonic() - began
    leave()
    return seconds


def test_a_rank_that_is_killed_in_a_step_is_named() -> None:
    alive, dead = run_outcomes(die_in_a_step, backend=NCCL)
    assert dead.text is not None
    assert alive.text is None, alive.text
    assert alive.value < NAMED_WITHIN_S


DIES_AFTER_S = 1.0


def device_waits_for_the_dead(compression: str | None) -> float:
    """The other rank's backward has ended when this one dies: its device waits in NCCL, and it in synchronize()."""
    rank = as_two_hosts()
    model = RingDP(Given(SHAPES).cuda(), compression=compression)
    for step in range(2):
        step_of(model, SHAPES, rank, step)
    if rank == 1:
        kill_self_in_backward(model, DIES_AFTER_S)
    gradients = {name: one.cuda() for name, one in noise(SHAPES, rank, 2).items()}
    began = time.monotonic()
    model(gradients).backward()
    torch.cuda.synchronize()
    waited_s = time.monotonic() - began
    with pytest.raises(PeerLostError) as caught:
        model(gradients)
    assert caught.value.peer == 1
    [watchdog] = watchdogs(dist.group.WORLD)
    wait_until(lambda: watchdog.aborted, "the abort of NCCL")
    with pytest.raises(dist.DistBackendError, match="abort"):
        dist.all_reduce(torch.ones(1, device="cuda"))
    leave()
    return waited_s


def watchdogs(group: Any) -> list[Any]:
    from ringdp import _C

    return list(_C.watch_group(group))


@pytest.mark.parametrize("compression", [None, "int8"])
def test_an_abort_frees_the_device_that_waits_for_a_dead_rank(compression: str | None) -> None:
    alive, dead = run_outcomes(device_waits_for_the_dead, compression, backend=NCCL)
    assert dead.text is not None
    assert alive.text is None, alive.text
    assert DIES_AFTER_S / 2 < alive.value < DIES_AFTER_S + NAMED_WITHIN_S


def step_often(model: RingDP, gradients: dict[str, Tensor]) -> None:
    """Until announcements must have been answered; the host does not wait for the device."""
    for _ in range(4):
        model(gradients).backward()


def come_too_late() -> tuple[float, int | None]:
    """Rank 1 stays away from a step, and is killed in the end: torch's watchdog ends it a while after a timeout."""
    rank = as_two_hosts()
    group: Any = dist.new_group(backend=NCCL, timeout=timedelta(seconds=TIMEOUT_S))
    model = RingDP(Given(SHAPES).cuda(), process_group=group)
    gradients = {name: one.cuda() for name, one in noise(SHAPES, rank, 0).items()}
    model(gradients).backward()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RingTimeoutError) as caught:
        step_often(model, gradients)
    [watchdog] = watchdogs(group)
    wait_until(lambda: watchdog.aborted, "the abort of NCCL")
    seconds = time.monotonic() - began
    leave()
    return seconds, caught.value.peer


def test_a_rank_that_does_not_come_is_a_timeout() -> None:
    punctual, late = run_outcomes(come_too_late, backend=NCCL)
    assert late.text is not None
    assert punctual.text is None, punctual.text
    seconds, peer = punctual.value
    assert peer == 1
    assert TIMEOUT_S / 2 < seconds < TIMEOUT_S + NAMED_WITHIN_S


def other_buckets() -> str:
    """Nobody has compared the models; NCCL would wait for ever, or add up what does not belong together."""
    rank = as_two_hosts()
    shapes = {f"{name}_of_{rank}": shape for name, shape in SHAPES.items()}
    model = RingDP(Given(shapes).cuda(), init_sync=False)
    gradients = {name: one.cuda() for name, one in noise(shapes, rank, 0).items()}
    with pytest.raises(MismatchError) as caught:
        step_often(model, gradients)
    return str(caught.value)


def test_other_buckets_are_an_error_on_both() -> None:
    for text in run_ranks(other_buckets, backend=NCCL):
        assert "by nccl" in text
        assert "of_0" in text
        assert "of_1" in text


def build_and_step(shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    step_of(RingDP(Given(shapes).cuda()), shapes, rank, 0)


def disagree() -> str:
    rank = as_two_hosts()
    shapes = dict(SHAPES) if rank == 0 else {name: (*shape[:-1], shape[-1] + 1) for name, shape in SHAPES.items()}
    with pytest.raises(MismatchError) as caught:
        build_and_step(shapes, rank)
    return str(caught.value)


def test_other_shapes_are_an_error_on_both() -> None:
    assert all("weight" in text for text in run_ranks(disagree, backend=NCCL))
