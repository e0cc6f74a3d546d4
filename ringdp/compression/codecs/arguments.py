"""Checks of arguments that several compressors have; see `ringdp.values`."""

from __future__ import annotations

from typing import Any

from ringdp import values

MOST_IN_BLOCK = 1 << 20  # a parameter's last block is filled up while it is encoded


def check_fraction(what: str, value: Any) -> None:
    values.number(what, "fraction", value, "above 0 and at most 1", lambda it: 0 < it <= 1)


def check_clip(what: str, value: Any) -> None:
    if value is not None:
        values.number(what, "clip", value, "above 0 that is not infinite, or None", lambda it: it > 0)


def check_block(what: str, block: Any, *, multiple_of: int) -> None:
    fits = isinstance(block, int) and not isinstance(block, bool) and multiple_of <= block <= MOST_IN_BLOCK
    if not fits or block % multiple_of:
        kinds = {1: "a whole number from 1 on", 2: "an even number from 2 on"}
        kind = kinds.get(multiple_of, f"a multiple of {multiple_of}")
        values.refuse(what, "block", block, f"{kind}, at most {MOST_IN_BLOCK}")
