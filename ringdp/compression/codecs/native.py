"""Which tensors the core's codecs (csrc/codec) and kernels take."""

from __future__ import annotations

import torch
from torch import Tensor


def serves(x: Tensor) -> bool:
    """Those on the CPU; torch operations do others."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.uint8)
