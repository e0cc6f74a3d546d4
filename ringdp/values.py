"""Checks of arguments. An error names the caller, the argument, the values that it takes, and the one that was given.

Each returns the value, and raises InvalidArgumentError. `who` is the class or function that the user called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NoReturn, ParamSpec, TypeVar

from ringdp.errors import InvalidArgumentError

_MOST_SHOWN = 80  # characters of a value
Given = ParamSpec("Given")
Result = TypeVar("Result")


def whole(who: str, name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    """A Python int from `least` to `most`; True is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limits = f"{f' from {least} on' if least > -math.inf else ''}{f', at most {most}' if most < math.inf else ''}"
        refuse(who, name, value, f"a whole number{limits}")
    return value


def number(who: str, name: str, value: Any, allowed: str, fits: Callable[[float], bool]) -> float:
    """A finite number for which `fits` holds, which `allowed` describes; no bool, no text, no tensor."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or not fits(float(value)):
        refuse(who, name, value, f"a number {allowed}")
    return float(value)


def flag(who: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(who, name, value, "True or False")
    return value


def choice(who: str, name: str, value: Any, choices: Iterable[Any]) -> Any:
    """Of the same type, too: 4.0 and True are not whole numbers."""
    choices = list(choices)
    if not any(type(value) is type(it) and value == it for it in choices):
        refuse(who, name, value, f"one of {', '.join(map(str, choices))}")
    return value


def refuse(who: str, name: str, value: Any, allowed: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > _MOST_SHOWN:
        shown = type(value).__name__
    raise InvalidArgumentError(f"{who}: {name} must be {allowed}, not {shown}")


def moved(who: str, places: dict[str, str]) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator of a function with fewer arguments than it had: for one that it had a TypeError names its place.

    Args:
        places: by the old argument's name, the expression that has it now.
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*positional: Given.args, **named: Given.kwargs) -> Result:
            for name in named:
                if name in places:
                    raise TypeError(f"{who} has no argument {name!r}: {places[name]} has it")
            return function(*positional, **named)

        return call

    return decorate
