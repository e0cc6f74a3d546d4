"""Checks of the compressors' arguments: the error names class, argument, the allowed values, and the given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NoReturn

from ringdp.errors import InvalidArgumentError

MOST_IN_BLOCK = 1 << 20  # a parameter's last block is filled up while it is encoded


def check_number(what: str, name: str, value: Any, allowed: str, fits: Callable[[Any], bool]) -> None:
    """No bool, no text, no tensor."""
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
        refuse(what, name, value, f"a number {allowed}")


def check_fraction(what: str, value: Any) -> None:
    check_number(what, "fraction", value, "above 0 and at most 1", lambda it: 0 < it <= 1)


def check_clip(what: str, value: Any) -> None:
    if value is not None:
        check_number(what, "clip", value, "above 0 that is not infinite, or None", lambda it: 0 < it < math.inf)


def check_whole(what: str, name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        refuse(what, name, value, f"a whole number from {least} on")


def check_block(what: str, block: Any, *, multiple_of: int) -> None:
    fits = isinstance(block, int) and not isinstance(block, bool) and multiple_of <= block <= MOST_IN_BLOCK
    if not fits or block % multiple_of:
        kinds = {1: "a whole number from 1 on", 2: "an even number from 2 on"}
        kind = kinds.get(multiple_of, f"a multiple of {multiple_of}")
        refuse(what, "block", block, f"{kind}, at most {MOST_IN_BLOCK}")


def check_flag(what: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(what, name, value, "True or False")


def check_choice(what: str, name: str, value: Any, choices: Iterable[Any]) -> None:
    """Of the same type, too: 4.0 and True are not whole numbers."""
    choices = list(choices)
    if not any(type(value) is type(it) and value == it for it in choices):
        refuse(what, name, value, f"one of {', '.join(map(str, choices))}")


def refuse(what: str, name: str, value: Any, allowed: str) -> NoReturn:
    raise InvalidArgumentError(f"{what}: {name} must be {allowed}, not {value!r}")
