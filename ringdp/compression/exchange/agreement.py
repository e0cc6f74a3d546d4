"""Whether all ranks mean the same bucket and can encode it. Where not, all raise in the same step."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.exchange.packing import HEADER_BYTES, front
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, Request
from ringdp.errors import MismatchError, RingError

_TEXT_BYTES = 512
_HEADER = struct.Struct("<IB3x")
assert _HEADER.size == HEADER_BYTES

NOT_FINITE = 1


def agree(plan: Plan, rank: int) -> Generator[Request, Any, None]:
    """Before a layout's first exchange: all ranks have the same sections, compressors and sizes.

    Raises:
        MismatchError: they have not; names the first parameter that differs and what both ranks have.
    """
    mine = torch.tensor([plan.fingerprint, len(plan.lines)], dtype=torch.int64, device=plan.device)
    everybody = (yield AllGather(mine.view(torch.uint8))).view(torch.int64).tolist()
    other = next((r for r, theirs in enumerate(everybody) if theirs != everybody[0]), None)
    if other is None:
        return
    shortest = min(count for _, count in everybody)
    hashes = torch.tensor([zlib.crc32(line.encode()) for line in plan.lines[:shortest]], device=plan.device)
    rows = (yield AllGather(hashes.view(torch.uint8))).view(torch.int64).view(len(everybody), -1)
    differing = (rows != rows[:1]).any(0).nonzero().view(-1).tolist()
    at = differing[0] if differing else shortest
    line = plan.lines[at] if at < len(plan.lines) else "no further parameter"
    texts = yield from gather_text(line, plan.device)
    r = next(r for r, text in enumerate(texts) if text != texts[0])
    raise MismatchError(
        f"the ranks do not compress the same: rank 0 has {texts[0]}; rank {r} has {texts[r]}",
        rank=rank,
        peer=r if rank == 0 else 0,
    )


def gather_text(text: str, device: torch.device) -> Generator[Request, Any, list[str]]:
    """What each rank says, the first 512 bytes of it."""
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = (yield AllGather(mine)).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def fill_front(plan: Plan, message: Tensor, flags: list[int], *, failed: bool) -> None:
    """Write the header and the sections' flags."""
    begin = bytearray(_HEADER.pack(plan.fingerprint, failed) + bytes(flags)).ljust(front(len(flags)), b"\0")
    message[: len(begin)] = torch.frombuffer(begin, dtype=torch.uint8)


def open_messages(plan: Plan, messages: Mapping[int, Tensor], rank: int) -> tuple[list[int], bool]:
    """The sections' flags of all messages (by sender) together, and whether a rank says that it failed.

    Raises:
        MismatchError: a message is another bucket's.
    """
    flags, failed = [0] * len(plan.sections), False
    fronts = torch.stack([message[: front(len(flags))] for message in messages.values()])
    for sender, content in zip(messages, fronts.tolist(), strict=True):
        theirs, status = _HEADER.unpack(bytes(content[:HEADER_BYTES]))
        if theirs != plan.fingerprint:
            raise MismatchError(
                f"rank {sender} exchanges another bucket than rank {rank}, which is at {plan.lines[0]}:"
                " do all ranks run backward on the same graph?",
                rank=rank,
                peer=sender,
            )
        failed = failed or bool(status)
        flags = [a | b for a, b in zip(flags, content[HEADER_BYTES:], strict=False)]
    return flags, failed


def raise_together(error: BaseException | None, plan: Plan, rank: int) -> Generator[Request, Any, None]:
    """Some rank could not encode: that one raises its own error, the others say whose it is."""
    texts = yield from gather_text("" if error is None else f"{type(error).__name__}: {error}", plan.device)
    if error is not None:
        raise error
    culprit = next((r for r, text in enumerate(texts) if text), None)
    said = texts[culprit] if culprit is not None else "it did not say why"
    raise RingError(f"rank {culprit} could not compress a bucket: {said}", rank=rank, peer=culprit, cause=said)
