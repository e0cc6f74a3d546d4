"""Codes exchanged by a group's own all-to-all and all-gather: the bits of the core's compressed all-reduce with one
rank per host, over any backend; what is not finite; what fails.
"""

from __future__ import annotations

import os
import signal
import zlib
from typing import Any

import pytest

from tests.contract.compressed_reference import all_reduce
from tests.helpers import need
from tests.registries import CODECS
from tests.train.harness import default_group, ring_is_built, run_outcomes, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

# A large parameter, one of a single unit (so parts of other ranks are empty), none at all, one short of a unit.
OFFSETS, COUNTS = [0, 20_003, 20_100, 20_400], [20_001, 40, 0, 700]
NUMEL = 21_200
OWNER_OFFSETS = [zlib.crc32(name) for name in (b"weight", b"bias", b"nothing", b"gain")]


def drawn(seed: int, scale: float = 1.0) -> Any:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * scale


def parts(x: Any) -> list[Any]:
    return [x[begin : begin + count].clone() for begin, count in zip(OFFSETS, COUNTS, strict=True)]


def reduce(
    codec: str, exchange: bool, feedback: bool, divisor: int, bad: int | None
) -> tuple[Any, list[Any], bool, int]:
    from ringdp import _C

    rank = dist.get_rank()
    buffer = drawn(rank)
    if bad is not None and rank == 1:
        buffer[bad] = float("inf")
    residuals: list[Any] = parts(drawn(rank + 100, 0.01)) if feedback else [None] * 4
    new: list[Any] = [torch.zeros_like(x) for x in residuals] if feedback else [None] * 4
    work, report = _C.all_reduce_compressed(
        default_group(), buffer, OFFSETS, COUNTS, OWNER_OFFSETS, residuals, new, codec, 8.0, divisor, exchange=exchange
    )
    work.wait()
    return buffer, new, report.finite, report.own


CASES = [
    (codec, feedback, divisor, bad)
    for codec in CODECS
    for feedback, divisor, bad in (
        (False, 0, None),
        (True, 0, None),
        (True, -1, None),
        (True, 0, 20_050),
        (False, 0, 7),
    )
]


def every_case(exchange: bool) -> list[Any]:
    world = dist.get_world_size()
    return [reduce(codec, exchange, feedback, world + less, bad) for codec, feedback, less, bad in CASES]


def same(left: Any, right: Any) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("world_size", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_the_bits_of_the_core(world_size: int) -> None:
    wanted = run_ranks(every_case, False, world_size=world_size, backend="ring")
    for backend in ("ring", "gloo"):
        got = run_ranks(every_case, True, world_size=world_size, backend=backend)
        for rank in range(world_size):
            for case, ours, core in zip(CASES, got[rank], wanted[rank], strict=True):
                assert same(ours[0], core[0]), (backend, rank, case)
                for mine, theirs in zip(ours[1], core[1], strict=True):
                    assert (mine is None and theirs is None) or same(mine, theirs), (backend, rank, case)
                assert ours[2:] == core[2:], (backend, rank, case)


def test_every_rank_is_a_host_of_its_own() -> None:
    """Also where the core would send float32 inside hosts: the reference without hosts says what comes out."""
    codec, world = "int8", 4
    got = run_ranks(reduce, codec, True, True, world, None, world_size=world, backend="ring")
    inputs = [[x.numpy() for x in parts(drawn(rank))] for rank in range(world)]
    residuals = [[x.numpy() for x in parts(drawn(rank + 100, 0.01))] for rank in range(world)]
    wanted = all_reduce(
        inputs, OWNER_OFFSETS, codec, hosts=list(range(world)), divisor=world, factor=8.0, residuals=residuals
    )
    for rank in range(world):
        for section, (begin, count) in enumerate(zip(OFFSETS, COUNTS, strict=True)):
            assert torch.equal(got[rank][0][begin : begin + count], torch.from_numpy(wanted.means[section]))
            assert torch.equal(got[rank][1][section], torch.from_numpy(wanted.residuals[rank][section]))


def many_at_once() -> list[Any]:
    """Several under way, on ring numbered by callbacks that run when they will."""
    from ringdp import _C

    buffers = [drawn(10 * dist.get_rank() + i) for i in range(12)]
    works = []
    for i, buffer in enumerate(buffers):
        work, _ = _C.all_reduce_compressed(
            default_group(),
            buffer,
            OFFSETS,
            COUNTS,
            OWNER_OFFSETS,
            [None] * 4,
            [None] * 4,
            CODECS[i % 4],
            1.0,
            2,
            exchange=True,
        )
        works.append(work)
        works.append(dist.all_reduce(torch.ones(3), async_op=True))
    for work in works:
        work.wait()
    return buffers


def test_many_at_once() -> None:
    left, right = run_ranks(many_at_once, world_size=2, backend="ring")
    for mine, theirs in zip(left, right, strict=True):
        for begin, count in zip(OFFSETS, COUNTS, strict=True):
            assert same(mine[begin : begin + count], theirs[begin : begin + count])


def dies() -> tuple[str, str]:
    from ringdp import _C

    def once() -> None:
        work, _ = _C.all_reduce_compressed(
            default_group(),
            drawn(0),
            OFFSETS,
            COUNTS,
            OWNER_OFFSETS,
            [None] * 4,
            [None] * 4,
            "int8",
            1.0,
            2,
            exchange=True,
        )
        work.wait()

    once()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(Exception, match="rank") as caught:
        once()
    return type(caught.value).__name__, str(caught.value)


def test_a_lost_rank_ends_the_work() -> None:
    outcomes = run_outcomes(dies, world_size=2, backend="ring", timeout_s=20.0)
    kind, text = outcomes[0].value
    assert kind == "PeerLostError"
    assert "rank 1" in text


def test_nothing_to_send() -> None:
    assert run_ranks(nothing, world_size=2, backend="ring") == [True, True]


def nothing() -> bool:
    from ringdp import _C

    work, report = _C.all_reduce_compressed(
        default_group(), torch.zeros(0), [], [], [], [], [], "int8", 1.0, 2, exchange=True
    )
    work.wait()
    return bool(report.finite)
