"""Exchanges whose messages are tampered with: every rank raises in words, and nothing outside a buffer is touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.compression import Int8, PowerSGD, RandomK, TopK, names
from ringdp.compression.exchange import AllGather, AllReduce, BucketSlice, Coder, Exchange, Layout, States
from ringdp.errors import MismatchError
from ringdp.testing.simulation import answers, simulate
from tests.train.compressed import Large, LargeGathered, Rounded, Steps

COUNT = 3000
GUARD = 64


def started(
    compressor: Any, ranks: int, *, name: str = "w", steps: Sequence[int] = (), loaded: int | None = None
) -> tuple[list[Exchange], list[Tensor]]:
    """All ranks' exchanges, and the buffers around their buckets; rank `loaded` goes on from a checkpoint."""
    generator = torch.Generator().manual_seed(0)
    around = [torch.randn(COUNT + 2 * GUARD, generator=generator) for _ in range(ranks)]
    exchanges = []
    for rank, buffer in enumerate(around):
        layout = Layout([BucketSlice(name, (COUNT,), 0, COUNT, compressor)], ranks, torch.device("cpu"))
        bucket = buffer[GUARD : GUARD + COUNT]
        coder = Coder(States(), rank, ranks, steps[rank] if steps else 0, loaded=rank == loaded)
        exchanges.append(layout.average(bucket, coder, ranks))
    return exchanges, around


def run(exchanges: list[Exchange], tamper: Callable[[int, Any], None]) -> list[Exception]:
    """All to their end, `tamper(turn, request)` changing what the last rank sends; each rank's error."""
    replies: list[Any] = [None] * len(exchanges)
    for turn in range(20):
        requests, errors, ended = [], [], 0
        for exchange, reply in zip(exchanges, replies, strict=True):
            try:
                requests.append(exchange.send(reply))
            except StopIteration:
                ended += 1
            except Exception as error:
                errors.append(error)
        if errors or ended:
            assert len(errors) in (0, len(exchanges)), "all ranks raise, or none"
            return errors
        tamper(turn, requests[-1])
        replies = answers(requests)
    raise AssertionError("no end")


def nothing(turn: int, request: Any) -> None:
    pass


@pytest.mark.parametrize("compressor", [Int8(), Steps(), Large(), LargeGathered(), Rounded()])
def test_untouched_they_end_and_leave_what_is_around_alone(compressor: Any) -> None:
    exchanges, around = started(compressor, 3)
    before = [it.clone() for it in around]
    assert run(exchanges, nothing) == []
    for one, other in zip(before, around, strict=True):
        assert torch.equal(one[:GUARD], other[:GUARD])
        assert torch.equal(one[-GUARD:], other[-GUARD:])
        assert not torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "compressor",
    [*(name for name in names() if name != "auto"), Large(), LargeGathered(), Rounded()],
    ids=lambda it: it if isinstance(it, str) else type(it).__name__,
)
def test_parameters_of_no_element_or_one_alone_in_their_bucket(
    compressor: Any, shape: tuple[int, ...], ranks: int
) -> None:
    gradients = [[torch.full(shape, 1.0 + step)] * ranks for step in range(2)]
    for step, mean in enumerate(simulate(compressor, gradients).means):
        assert mean.shape == shape
        if isinstance(compressor, str):
            wanted = 1.0 if compressor == "signsgd" and ranks > 1 else 1.0 + step
            torch.testing.assert_close(mean, torch.full(shape, wanted), rtol=0.01, atol=0)


@pytest.mark.parametrize("length", [-1, 2**40, 2**62, -(2**63)])
@pytest.mark.parametrize("compressor", [Large(), LargeGathered()])
def test_a_length_that_lies_is_refused_by_all(compressor: Any, length: int) -> None:
    def lie(turn: int, request: Any) -> None:
        if turn == 1:  # after the agreement: how long payloads are
            assert isinstance(request, AllGather)
            request.send.view(torch.int64)[0] = length

    errors = run(started(compressor, 3)[0], lie)
    assert len(errors) == 3
    assert all(isinstance(it, MismatchError) and "rank 2 announces a payload of lengths" in str(it) for it in errors)


def test_a_message_of_another_bucket_is_refused() -> None:
    def other(turn: int, request: Any) -> None:
        if turn == 2:
            assert isinstance(request, AllGather)
            request.send[0] ^= 0xFF

    errors = run(started(LargeGathered(), 2)[0], other)
    assert len(errors) == 2
    assert all(isinstance(it, MismatchError) and "rank 1 exchanges another bucket" in str(it) for it in errors)


def test_what_ranks_must_agree_on_is_compared_before_anything_moves() -> None:
    one, other = started(Int8(), 2)[0], started(Int8(), 2, name="v")[0]
    errors = run([one[0], other[1]], nothing)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, MismatchError)
        assert re.search(r"rank 0 has w \[3000\] by Int8.*; rank 1 has v \[3000\] by Int8", str(error)), error


@pytest.mark.parametrize("loaded", [0, 2])
@pytest.mark.parametrize("steps", [(4, 4, 3), (1, 2, 3), (5, 5, 5)], ids=str)
@pytest.mark.parametrize(
    "compressor",
    [Int8(rotate=True), Large(), LargeGathered(), TopK(0.1), RandomK(0.1), PowerSGD(2, warm_start=False)],
    ids=lambda it: type(it).__name__,
)
def test_ranks_that_go_on_from_other_steps_all_hear_of_it(compressor: Any, steps: tuple[int, ...], loaded: int) -> None:
    errors = run(started(compressor, 3, steps=steps, loaded=loaded)[0], nothing)
    assert len(errors) == (0 if len(set(steps)) == 1 else 3)
    other = next((rank for rank in range(3) if steps[rank] != steps[0]), 0)
    for error in errors:
        assert isinstance(error, MismatchError)
        assert f"rank 0 has compressed {steps[0]} steps before this one, rank {other} {steps[other]}." in str(error)


def test_an_all_reduce_of_payloads_carries_the_marks() -> None:
    seen: list[int] = []

    def look(turn: int, request: Any) -> None:
        if isinstance(request, AllReduce):
            seen.extend(it.numel() for it in request.tensors)

    assert run(started(Rounded(), 2)[0], look) == []
    assert seen == [COUNT, 2], "the payload, and a mark for failure and one for each parameter"
