"""A random rotation that makes heavy tails Gaussian: by the core on the CPU, by torch operations with the same bits.

y = H·D·x / 16 in blocks of 256 elements, with H the Hadamard matrix, by sums and differences in a fixed order, and D a
diagonal of random signs: Vargaftik et al., "DRIVE", NeurIPS 2021, arXiv 2105.08339, and "EDEN", ICML 2022, arXiv
2108.08842. Signs are drawn for each parameter, part, phase and step, and are the same in all blocks: 32 bytes of a
hash. Elements behind the last full block stay as they are.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ringdp.compression.codecs import native
from ringdp.compression.protocol import Info

BLOCK = 256
_SHRINK = 1 / 16  # 1 / √256


def rotate(x: Tensor, info: Info) -> Tensor:
    """float32 ``[numel]``, new. An infinity or NaN makes its block neither finite."""
    return _turn(x, info, back=False)


def rotate_back(y: Tensor, info: Info) -> Tensor:
    """The inverse of `rotate`, but for rounding."""
    return _turn(y, info, back=True)


def _turn(x: Tensor, info: Info, *, back: bool) -> Tensor:
    signs = torch.frombuffer(bytearray(_signs(info)), dtype=torch.uint8)
    if native.serves(x):
        from ringdp import _C

        return _C.rotate(x, signs, back)
    bits = (signs.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).view(-1)
    factors = (1.0 - 2.0 * bits.to(torch.float32)).to(x.device)
    out = x.clone()
    whole = x.numel() // BLOCK * BLOCK
    rows = x[:whole].view(-1, BLOCK)
    if back:
        out[:whole] = (_hadamard(rows * _SHRINK) * factors).view(-1)
    else:
        out[:whole] = _hadamard(rows * (factors * _SHRINK)).view(-1)
    return out


def _hadamard(rows: Tensor) -> Tensor:
    """``[rows, 256]``, not scaled."""
    half = BLOCK // 2
    while half:
        a, b = rows.view(-1, BLOCK // (2 * half), 2, half).unbind(2)
        rows = torch.stack((a + b, a - b), 2)
        half //= 2
    return rows.view(-1, BLOCK)


def _signs(info: Info) -> bytes:
    """A bit for each element of a block. From the seed, not from the generator: a GPU's gives other numbers."""
    seed = info.generator.initial_seed()
    return hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=BLOCK // 8).digest()
