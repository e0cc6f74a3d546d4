"""A compressor whose code the core has too: computed by the core where it can be, elsewhere by torch operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ringdp.compression.codecs import native, rotation
from ringdp.compression.codecs.checks import check_code, native_name
from ringdp.compression.protocol import Aggregate, Info, Payload


class CoreCodec(ABC):
    """Brings `compress` and `decompress`, given `encode` and `decode`, which have the core's bits.

    Attributes:
        codec: the core's name for it.
        error_feedback: as every compressor has it.
        rotate: encode the elements rotated by `rotation`, and rotate back after decoding. In Python.
    """

    codec: ClassVar[str]
    error_feedback: Any
    rotate: bool = False
    aggregate: ClassVar[Aggregate] = "owner"
    fixed_size: ClassVar[bool] = True
    carries_nan: ClassVar[bool] = True

    @abstractmethod
    def code_bytes(self, numel: int) -> int:
        """Of the code of so many elements."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """uint8 [code_bytes(numel)] of float32 [numel]."""

    @abstractmethod
    def decode(self, code: Tensor, numel: int) -> Tensor:
        """float32 [numel] of uint8 [code_bytes(numel)]."""

    @property
    def in_core(self) -> bool:
        """Whether the core has this codec with this block size."""
        return True

    @property
    def native(self) -> str | None:
        return native_name(self.codec, self.error_feedback) if self.in_core and not self.rotate else None

    def compress(self, x: Tensor, info: Info) -> Payload:
        if self.rotate:
            x = rotation.rotate(x, info)
        if self.in_core and native.serves(x):
            from ringdp import _C

            return (_C.codec_compress(self.codec, x),)
        return (self.encode(x),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        code = check_code(type(self).__name__, payload, self.code_bytes(info.numel), info)
        if self.in_core and native.serves(code):
            from ringdp import _C

            decoded = _C.codec_decompress(self.codec, code, info.numel)
        else:
            decoded = self.decode(code, info.numel)
        return rotation.rotate_back(decoded, info) if self.rotate else decoded
