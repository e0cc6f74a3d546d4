"""CPU tensors as if on a device: a process group works with mirrors, which copies fill late and out of order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.core._core import SlowDevice


@contextmanager
def staged(seed: int) -> Iterator[SlowDevice]:
    """Meanwhile this process treats CPU tensors so; `hold` of what is given keeps the copies back."""
    from ringdp import _C

    device = SlowDevice(seed)
    _C.stage_cpu_tensors(device.queues())
    try:
        yield device
    finally:
        device.hold(False)
        _C.stage_cpu_tensors(None)
