"""Arguments of public functions, checked: another type is an InvalidArgumentError that names the argument."""

from __future__ import annotations

import math
import numbers
import operator
from datetime import timedelta

from ringdp.errors import InvalidArgumentError


def whole_number(name: str, value: object) -> int:
    """`value` as an int; NumPy's integers are some, True and "2" are not.

    Raises:
        InvalidArgumentError: another type.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InvalidArgumentError(f"{name} must be a whole number, not {name}={value!r}")


def duration(name: str, value: object) -> timedelta:
    """Seconds, or a timedelta, above 0.

    Raises:
        InvalidArgumentError: another type, not above 0, or more than a timedelta holds.
    """
    if isinstance(value, timedelta):
        length = value
    elif isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value):
        try:
            length = timedelta(seconds=float(value))
        except OverflowError:
            raise InvalidArgumentError(f"{name} must be seconds below 10**14, not {value!r}") from None
    else:
        raise InvalidArgumentError(f"{name} must be a number of seconds or a timedelta, not {value!r}")
    if length <= timedelta(0):
        raise InvalidArgumentError(f"{name} must be above 0, not {length.total_seconds()} s")
    return length


def text_or_none(name: str, value: object) -> None:
    """Raises InvalidArgumentError where `value` is neither None nor a text that is not empty."""
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise InvalidArgumentError(f"{name} must be a text that is not empty, or None, not {value!r}")
