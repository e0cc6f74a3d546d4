"""Checks that all ranks exchange the same bucket and can encode it. Where not, all raise in the same step."""

from __future__ import annotations

import struct
from collections.abc import Generator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.exchange.packing import HEADER_BYTES, front
from ringdp.compression.exchange.plan import Plan, fingerprint
from ringdp.compression.exchange.requests import AllGather, Request
from ringdp.compression.exchange.section import Coder
from ringdp.errors import MismatchError, RingError

_TEXT_BYTES = 512
_HEADER = struct.Struct("<IB3x")
assert _HEADER.size == HEADER_BYTES

NOT_FINITE = 1  # a section's flag

# A rank's status in an exchange, which all ranks receive. Bits.
FAILED = 1  # it could not encode
LOADED = 2  # it goes on from a checkpoint

_LOADED_IN_SUM = 1 << 16  # where a status is added over the ranks; fewer than that can fail


def agree(lines: Sequence[str], device: torch.device, rank: int) -> Generator[Request, Any, None]:
    """Check that all ranks have the same lines, one for each parameter.

    Raises:
        MismatchError: they differ; names the first parameter that differs and both ranks' lines.
    """
    all_ranks = yield from _gather_numbers([fingerprint(lines), len(lines)], device)
    if all(theirs == all_ranks[0] for theirs in all_ranks):
        return
    text = "\0".join(lines)
    lengths = yield from _gather_numbers([len(text.encode())], device)
    texts = yield from gather_text(text, device, max(length for (length,) in lengths))
    columns = zip_longest(*(theirs.split("\0") for theirs in texts), fillvalue="no further parameter")
    column = next(of_ranks for of_ranks in columns if len(set(of_ranks)) > 1)
    r = next(r for r, line in enumerate(column) if line != column[0])
    raise MismatchError(
        f"the ranks do not compress the same: rank 0 has {column[0]}; rank {r} has {column[r]}."
        " Give all ranks the same compressors and rules.",
        rank=rank,
        peer=r if rank == 0 else 0,
    )


def _gather_numbers(numbers: list[int], device: torch.device) -> Generator[Request, Any, list[list[int]]]:
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows: list[list[int]] = (yield AllGather(mine.view(torch.uint8))).view(torch.int64).tolist()
    return rows


def gather_text(text: str, device: torch.device, room: int = _TEXT_BYTES) -> Generator[Request, Any, list[str]]:
    """Each rank's text, its first `room` bytes."""
    data = text.encode()[:room].ljust(room, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = (yield AllGather(mine)).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def fill_front(plan: Plan, message: Tensor, flags: list[int], status: int) -> None:
    """Write the header and the sections' flags."""
    begin = bytearray(_HEADER.pack(plan.fingerprint, status) + bytes(flags)).ljust(front(len(flags)), b"\0")
    message[: len(begin)] = torch.frombuffer(begin, dtype=torch.uint8)


def open_messages(plan: Plan, messages: Mapping[int, Tensor], rank: int) -> tuple[list[int], int]:
    """The sections' flags of all messages (by sender) together, and the status of all senders together.

    Raises:
        MismatchError: a message is of another bucket.
    """
    flags, status = [0] * len(plan.sections), 0
    fronts = torch.stack([message[: front(len(flags))] for message in messages.values()])
    for sender, content in zip(messages, fronts.tolist(), strict=True):
        theirs, their_status = _HEADER.unpack(bytes(content[:HEADER_BYTES]))
        if theirs != plan.fingerprint:
            raise MismatchError(
                f"rank {sender} exchanges another bucket than rank {rank}, which is at {plan.lines[0]}:"
                " do all ranks run backward on the same graph?",
                rank=rank,
                peer=sender,
            )
        status |= their_status
        flags = [a | b for a, b in zip(flags, content[HEADER_BYTES:], strict=False)]
    return flags, status


def marks(plan: Plan, status: int, flags: list[int]) -> Tensor:
    """Status and the sections' flags in a form that can be added over the ranks: int32."""
    first = bool(status & FAILED) + _LOADED_IN_SUM * bool(status & LOADED)
    return torch.tensor([first, *(flag & NOT_FINITE for flag in flags)], dtype=torch.int32, device="cpu").to(
        plan.device
    )


def read_marks(summed: Tensor) -> tuple[int, list[int]]:
    """The status and the sections' flags of all ranks together."""
    first, *non_finite = summed.tolist()
    status = FAILED * (first % _LOADED_IN_SUM > 0) | LOADED * (first >= _LOADED_IN_SUM)
    return status, [NOT_FINITE * (count > 0) for count in non_finite]


def act_on(status: int, error: BaseException | None, plan: Plan, coder: Coder) -> Generator[Request, Any, None]:
    """Raise what the status of all ranks requires, the same on each.

    Args:
        status: of all ranks together.
        error: this rank's error while encoding.

    Raises:
        BaseException: some rank could not encode: it raises its own error, the others a RingError that names it.
        MismatchError: some rank goes on from a checkpoint, and they are at different steps.
    """
    if status & FAILED:
        yield from _raise_together(error, plan, coder.rank)
    if status & LOADED:
        yield from _compare_steps(plan, coder)


def _raise_together(error: BaseException | None, plan: Plan, rank: int) -> Generator[Request, Any, None]:
    texts = yield from gather_text("" if error is None else f"{type(error).__name__}: {error}", plan.device)
    if error is not None:
        raise error
    culprit = next((r for r, text in enumerate(texts) if text), None)
    said = texts[culprit] if culprit is not None else "it gave no reason"
    raise RingError(f"rank {culprit} could not compress a bucket: {said}", rank=rank, peer=culprit, cause=said)


def _compare_steps(plan: Plan, coder: Coder) -> Generator[Request, Any, None]:
    steps = [step for (step,) in (yield from _gather_numbers([coder.step], plan.device))]
    other = next((r for r, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise MismatchError(
            f"the ranks loaded compression states of different steps: rank 0 has compressed {steps[0]} steps before"
            f" this one, rank {other} {steps[other]}. Load states that were saved after the same step on all ranks",
            rank=coder.rank,
            peer=other if coder.rank == 0 else 0,
        )
