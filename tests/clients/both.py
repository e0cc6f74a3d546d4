"""Run a case on ring and on gloo and compare what the ranks return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers import need
from tests.train.harness import run_ranks

torch: Any = need("torch")


def on_both(
    case: Callable[..., Any], *args: Any, world_size: int = 2, tolerance: float | None = None, **kwargs: Any
) -> list[Any]:
    """What every rank returned on ring, after comparing it with what it returned on gloo.

    `tolerance`: relative and absolute, for results that depend on the order of a sum. None: bit for bit, which two
    ranks must reach, because a + b has one answer.
    """
    ring = run_ranks(case, *args, world_size=world_size, backend="ring", **kwargs)
    gloo = run_ranks(case, *args, world_size=world_size, backend="gloo", **kwargs)
    for rank, (mine, theirs) in enumerate(zip(ring, gloo, strict=True)):
        assert_same(mine, theirs, tolerance, f"rank {rank}")
    return ring


def assert_same(mine: Any, theirs: Any, tolerance: float | None, where: str) -> None:
    """Compare nested lists, tuples and dicts of tensors and plain values."""
    assert type(mine) is type(theirs), where
    if isinstance(mine, torch.Tensor):
        limit = 0.0 if tolerance is None else tolerance
        torch.testing.assert_close(
            mine, theirs, rtol=limit, atol=limit, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_same(mine[key], theirs[key], tolerance, f"{where}, {key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), where
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(one, other, tolerance, f"{where}, {index}")
    else:
        assert mine == theirs, where
