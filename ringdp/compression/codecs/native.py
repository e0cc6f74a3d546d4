"""The tensors that the core's codecs (csrc/codec) and kernels take."""

from __future__ import annotations

import torch
from torch import Tensor


def serves(x: Tensor) -> bool:
    """Those on the CPU; torch operations do others."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.uint8)


def has_kernels(x: Tensor) -> bool:
    """Whether this build has kernels for the tensor, whose indices fit 31 bits."""
    if not x.is_cuda or x.dtype != torch.float32 or not x.is_contiguous() or x.numel() >= 1 << 31:
        return False
    from ringdp import _C

    return _C.cuda_kernels()
