"""A function on several real processes with a process group, as `ringdp.launch`, with a time limit for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ringdp.errors import InvalidArgumentError, RankError
from ringdp.job.local_ranks import launch

__all__ = ["RankError", "run_ranks"]

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result],
    n: int,
    *args: Any,
    backend: str = "ring",
    timeout_s: float = 120.0,
    **kwargs: Any,
) -> list[Result]:
    """Call ``function(*args, **kwargs)`` on n processes of this host that form one job, and return the n results.

    As `ringdp.launch`, on the CPU and within `timeout_s`.

    Raises:
        RankError: a rank failed; all are ended.
        InvalidArgumentError: n below 1.
    """
    if n < 1:
        raise InvalidArgumentError(f"run_ranks needs at least one rank, not {n}")
    return launch(function, args, kwargs, nprocs=n, backend=backend, device="cpu", timeout=timeout_s)
