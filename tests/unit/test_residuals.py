"""What compression left out, from step to step: `ringdp._C.Residuals`, which the reducer and hooks use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import need

torch: Any = need("torch")
_C: Any = pytest.importorskip("ringdp._C", reason="ringdp is not built (make build)")

CPU = torch.device("cpu")


def step(residuals: Any, value: float, *, finite: bool = True, unused: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Write `value` everywhere; the two buffers."""
    current, following = residuals.write("w", 5, CPU)
    following.fill_(value)
    residuals.commit(finite, unused)
    return current, following


def test_two_buffers_take_turns_and_only_a_step_that_counts_turns_them() -> None:
    residuals = _C.Residuals()
    first, second = step(residuals, 1.0)
    assert first.tolist() == [0.0] * 5
    assert residuals.current("w").data_ptr() == second.data_ptr()
    for lost in ({"finite": False}, {"unused": ("v", "w")}):
        current, following = step(residuals, 2.0, **lost)
        assert (current.data_ptr(), following.data_ptr()) == (second.data_ptr(), first.data_ptr())
        assert residuals.current("w").tolist() == [1.0] * 5
    step(residuals, 3.0, unused=("v",))
    assert residuals.current("w").data_ptr() == first.data_ptr()
    assert residuals.current("w").tolist() == [3.0] * 5


def test_nothing_counts_that_no_step_has_left() -> None:
    residuals = _C.Residuals()
    assert residuals.current("w") is None
    step(residuals, 1.0, finite=False)
    assert residuals.current("w") is None


def test_a_commit_is_of_what_was_written_since_the_last() -> None:
    residuals = _C.Residuals()
    step(residuals, 1.0)
    residuals.commit(True)
    residuals.write("w", 5, CPU)[1].fill_(2.0)
    residuals.commit(False)
    residuals.commit(True)
    assert residuals.current("w").tolist() == [1.0] * 5


def test_what_is_set_is_a_copy_and_counts() -> None:
    residuals, given = _C.Residuals(), torch.arange(6.0).view(2, 3)
    residuals.set("w", given)
    given.zero_()
    assert residuals.current("w").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    residuals.drop("w")
    assert residuals.current("w") is None


def test_another_size_begins_with_zeros() -> None:
    residuals = _C.Residuals()
    step(residuals, 1.0)
    current, following = residuals.write("w", 7, CPU)
    assert current.tolist() == following.tolist() == [0.0] * 7
    assert residuals.current("w") is None
