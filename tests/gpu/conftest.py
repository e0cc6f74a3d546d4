"""Tests marked gpu are skipped, with the reason, where torch sees no GPU or the build has no kernels."""

from __future__ import annotations

from functools import cache

import pytest


@cache
def missing() -> str | None:
    """Why the tests here cannot run; None where they can."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    from ringdp import _C

    return None if _C.has_device_codec("cuda") else "this build of ringdp has no CUDA kernels"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (why := missing()):
        pytest.skip(why)
