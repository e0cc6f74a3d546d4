"""A gradient scaler's scale as a Python number, without waiting for a device where that can be avoided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Copy:
    memory: Tensor  # pinned
    done: torch.cuda.Event
    scale: Tensor  # of which
    version: int


class LossScale:
    """Reads the scale of any `torch.amp.GradScaler`.

    On the CPU that is a plain read. On an accelerator the scale is the result of queued work: `prefetch` queues a copy
    of it behind that work and returns at once, and `read` waits for that copy alone, not for what was queued since.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._copy: _Copy | None = None

    def prefetch(self) -> None:
        """Call when the scale has just changed, or before a forward: `read` is then cheap in its backward."""
        scale = self._scaler._get_scale_async() if self._scaler.is_enabled() else None
        if scale is None or scale.device.type != "cuda":
            return
        memory = (
            torch.empty((), dtype=scale.dtype, pin_memory=True, device="cpu")
            if self._copy is None
            else self._copy.memory
        )
        memory.copy_(scale, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(scale.device))
        self._copy = _Copy(memory, done, scale, scale._version)

    def read(self) -> float:
        """The scale; 1.0 where scaling is disabled."""
        scale = self._scaler._get_scale_async() if self._scaler.is_enabled() else None
        copy = self._copy
        if scale is not None and copy is not None and copy.scale is scale and copy.version == scale._version:
            copy.done.synchronize()
            return float(copy.memory)
        return float(self._scaler.get_scale())
