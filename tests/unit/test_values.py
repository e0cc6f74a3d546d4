"""The checks of arguments: what they take, and what they say."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from ringdp import values
from ringdp.errors import InvalidArgumentError

TAKEN: tuple[tuple[Callable[[Any], Any], tuple[Any, ...], tuple[Any, ...], str], ...] = (
    (lambda it: values.whole("X", "n", it), (0, -5, 2**70), (True, 1.0, "1", None), "a whole number"),
    (lambda it: values.whole("X", "n", it, 0), (0, 7), (-1, False), "a whole number from 0 on"),
    (lambda it: values.whole("X", "n", it, 1, 9), (1, 9), (0, 10), "a whole number from 1 on, at most 9"),
    (
        lambda it: values.number("X", "n", it, "above 0", lambda value: value > 0),
        (1, 0.5, numpy.float32(2)),
        (0, -1.0, math.nan, math.inf, True, "1", torch.tensor(1.0)),
        "a number above 0",
    ),
    (lambda it: values.flag("X", "n", it), (True, False), (0, 1, None, "yes"), "True or False"),
    (lambda it: values.choice("X", "n", it, (2, "a")), (2, "a"), (2.0, "b", None, [2]), "one of 2, a"),
)


@pytest.mark.parametrize(("check", "good", "bad", "allowed"), TAKEN)
def test_what_is_taken_and_what_is_said(
    check: Callable[[Any], Any], good: tuple[Any, ...], bad: tuple[Any, ...], allowed: str
) -> None:
    for value in good:
        assert check(value) == value
    for value in bad:
        with pytest.raises(InvalidArgumentError) as caught:
            check(value)
        assert str(caught.value) == f"X: n must be {allowed}, not {value!r}"


def test_an_argument_that_moved_names_its_place() -> None:
    @values.moved("X", {"old": "new=Y(old=…)"})
    def call(one: int, *, new: int = 0) -> int:
        return one + new

    assert call(1, new=2) == 3
    assert list(inspect.signature(call).parameters) == ["one", "new"]
    with pytest.raises(TypeError, match=re.escape("X has no argument 'old': new=Y(old=…) has it")):
        call(1, old=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        call(1, other=2)  # type: ignore[call-arg]


def test_a_long_value_is_named_by_its_type() -> None:
    with pytest.raises(InvalidArgumentError, match=r"not Tensor$"):
        values.whole("X", "n", torch.zeros(100))
