"""Rows on their way between ranks: as they are, as bfloat16, or as int8 with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.errors import InvalidArgumentError

WIRES = ("exact", "bfloat16", "int8")


def check_wire(wire: str) -> None:
    if wire not in WIRES:
        raise InvalidArgumentError(f"wire must be one of {', '.join(WIRES)}, not {wire!r}")


def encode(rows: Tensor, wire: str) -> Tensor:
    """``[n, width]`` of any type for ``[n, dim]``; int8: the codes, then four bytes of scale."""
    if wire == "exact":
        return rows.contiguous()
    if wire == "bfloat16":
        return rows.to(torch.bfloat16)
    scale = rows.abs().amax(1).float() / 127 if rows.numel() else rows.new_zeros(len(rows), dtype=torch.float32)
    codes = torch.round(rows / torch.where(scale > 0, scale, 1.0).unsqueeze(1)).to(torch.int8)
    return torch.cat([codes.view(torch.uint8), scale.unsqueeze(1).view(torch.uint8)], dim=1)


def empty(count: int, dim: int, dtype: torch.dtype, wire: str) -> Tensor:
    """Memory for what `encode` makes of `count` rows."""
    if wire == "int8":
        return torch.empty(count, dim + 4, dtype=torch.uint8)
    return torch.empty(count, dim, dtype=torch.bfloat16 if wire == "bfloat16" else dtype)


def decode(encoded: Tensor, dim: int, dtype: torch.dtype, wire: str) -> Tensor:
    """``[n, dim]``."""
    if wire == "int8":
        scale = encoded[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (encoded[:, :dim].view(torch.int8).float() * scale).to(dtype)
    return encoded.to(dtype)
