"""Codes without bias: elements are rounded at random, to either neighbour, so that they are right on average.

Such a code can be further from a gradient than zero is, the more so the larger its block. Error feedback would add that
up without end, so with it the code of each block is scaled to where it is nearest. The residual is then never larger
than the input, and on average at most 1 - 1/(1 + ω) of the squared norm, where the code adds a variance of ω of it: the
residual of an unbiased code times 1/(1 + ω) (Beznosikov et al., "On Biased Compression for Distributed Learning", arXiv
2002.12410).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ringdp import values
from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.arguments import check_block, check_clip
from ringdp.compression.codecs.bits import pack, packed_bytes, packed_slice, unpack
from ringdp.compression.codecs.checks import check_code
from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.compression.registry import register


class _Stochastic(ABC):
    """Blocks of whole numbers from -levels to levels, times a scale / levels of their own."""

    aggregate: ClassVar[Aggregate] = "owner"
    carries_nan: ClassVar[bool] = True  # as the scale

    block: int
    bits: int
    error_feedback: Feedback | bool | None

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @abstractmethod
    def scale_of(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """``[blocks]``; not finite where an element of the block is not. Larger elements are cut.

        Args:
            rows: ``[blocks, block]``, zeros behind the last element.
            lengths: how many of a block are elements, ``[blocks]``.
        """

    def compress(self, x: Tensor, info: Info) -> Payload:
        code = torch.empty(self._code_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        scales, numbers = self._split(code, x.numel())
        scales = scales.view(torch.float32)
        for piece in blocks.pieces(x.numel(), self.block, x.device):
            of_blocks, of_bytes = self._places(piece)
            scales[of_blocks], numbers[of_bytes] = self._encode(x[piece], info.private_generator)
        return (code,)

    def _encode(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Scales by block, and packed numbers."""
        rows = blocks.in_blocks(x, self.block)
        scale = self.scale_of(rows, blocks.lengths(x.numel(), self.block, x.device))
        finite = scale.isfinite()
        step = torch.where(finite & (scale > 0), scale, 1.0).unsqueeze(1)
        position = (rows / step).mul_(self.levels)
        dither = torch.rand(rows.shape, generator=generator, device=x.device, dtype=torch.float32)
        whole = dither.add_(position).floor_().clamp_(-self.levels, self.levels)
        if blocks.on_gpu(x) or not bool(finite.all()):
            whole.masked_fill_(finite.logical_not().unsqueeze(1), 0.0)
        if self.error_feedback:
            scale = scale * _nearest(position, whole)
        numbers = whole.add_(self.levels).to(torch.uint8).view(-1)[: x.numel()]
        return scale, pack(numbers, self.bits)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        code = check_code(type(self).__name__, payload, self._code_bytes(info.numel), info)
        scales, packed = self._split(code, info.numel)
        scales = scales.clone().view(torch.float32)  # a message's bytes may lie anywhere
        x = torch.empty(info.numel, device=code.device, dtype=torch.float32)
        for piece in blocks.pieces(info.numel, self.block, code.device):
            of_blocks, of_bytes = self._places(piece)
            numbers = unpack(packed[of_bytes], self.bits, piece.stop - piece.start).to(torch.float32)
            fractions = blocks.in_blocks(numbers.sub_(self.levels).div_(self.levels), self.block)
            x[piece] = fractions.mul_(scales[of_blocks].unsqueeze(1)).view(-1)[: piece.stop - piece.start]
        return x

    def _code_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + packed_bytes(numel, self.bits)

    def _split(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The bytes of the scales, and the packed numbers: views."""
        scale_bytes = 4 * -(-numel // self.block)
        return code[:scale_bytes], code[scale_bytes:]

    def _places(self, piece: slice) -> tuple[slice, slice]:
        """Of a piece's scales and of its bytes."""
        return blocks.rows_of(piece, self.block), packed_slice(piece, self.bits)


def _nearest(rows: Tensor, code: Tensor) -> Tensor:
    """``[blocks]``: how many times each block of `code` is nearest to that of `rows`; 1 where it has nothing."""
    squares = code.square().sum(1)
    return torch.where(squares > 0, rows.mul_(code).sum(1) / squares, 1.0)


@register("qsgd")
@dataclasses.dataclass(frozen=True)
class QSGD(_Stochastic):
    """Levels of each block's Euclidean norm, rounded at random: right on average, so error feedback is not needed.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017, arXiv
    1610.02132, section 3.1, with codes of fixed length. At 4 bits and block 512 an element takes 4.06 bits. The
    variance added to a block of B elements is at most min(B / s², √B / s) of its squared norm for s = 2^(bits-1) - 1
    levels: int8 and int4 add far less, but are biased. With error feedback each block's code is scaled to where it is
    nearest, and is biased too.

    Args:
        bits: of an element: 2, 4 or 8.
        block: elements that share a norm.
        error_feedback: False, True, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: other bits, or a block out of 1 to 2^20.
    """

    bits: int = 4
    block: int = 512
    error_feedback: Feedback | bool | None = False

    def __post_init__(self) -> None:
        check_block("QSGD", self.block, multiple_of=1)
        values.choice("QSGD", "bits", self.bits, (2, 4, 8))

    def scale_of(self, rows: Tensor, lengths: Tensor) -> Tensor:
        largest = blocks.absmax(rows)
        within = torch.where(largest > 0, largest, 1.0).unsqueeze(1)
        return (rows / within).square_().sum(1).sqrt_().mul_(largest)  # no square leaves the range


@register("terngrad")
@dataclasses.dataclass(frozen=True)
class TernGrad(_Stochastic):
    """-1, 0 or 1 times each block's largest magnitude, at random: 2.06 bits an element at block 512.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017, arXiv
    1705.07878. Its gradient clipping is `clip`, in standard deviations of the block: fewer outliers, less variance, and
    some bias. A block's scale is the paper's "layer-wise" one, for fewer elements. With error feedback each block's
    code is scaled to where it is nearest.

    Args:
        clip: magnitudes are cut at so many standard deviations; None leaves them.
        block: elements that share a scale.
        error_feedback: False, True, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a clip that is not positive and finite, or a block out of 1 to 2^20.
    """

    clip: float | None = 2.5
    block: int = 512
    error_feedback: Feedback | bool | None = False
    bits: int = dataclasses.field(default=2, init=False, repr=False)

    def __post_init__(self) -> None:
        check_block("TernGrad", self.block, multiple_of=1)
        check_clip("TernGrad", self.clip)

    def scale_of(self, rows: Tensor, lengths: Tensor) -> Tensor:
        largest = blocks.absmax(rows)
        if self.clip is None:
            return largest
        within = torch.where(largest > 0, largest, 1.0).unsqueeze(1)
        deviation = (rows / within).square_().sum(1).div_(lengths).sqrt_().mul_(largest)
        return torch.where(largest.isfinite(), torch.minimum(largest, deviation * self.clip), largest)
