"""The core's codecs (csrc/codec), where the extension has them and the tensor is on the CPU."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def extension() -> ModuleType | None:
    """``ringdp._C`` where it has the codecs, else None."""
    try:
        from ringdp import _C
    except ImportError:  # only built without torch, or for another one: the operations of torch do
        return None
    return _C if hasattr(_C, "codec_compress") else None


def serves(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.uint8) and extension() is not None
