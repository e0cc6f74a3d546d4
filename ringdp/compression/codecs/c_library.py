"""Compressors in C: from a shared library that implements include/ringdp/compressor.h."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ringdp.compression.codecs.checks import check_code, native_name
from ringdp.compression.feedback import Feedback, feedback_of
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ringdp import _C


@dataclasses.dataclass(frozen=True, repr=False)
class CCompressor:
    """A compressor whose code is a shared library's. Made by `load`.

    On CPU tensors over ``ring`` the core calls it segment by segment while others are on the wire, as it does its own
    codecs; elsewhere codes travel as any compressor's. It codes in the CPU's memory: elements on a GPU are copied there
    and back.

    Attributes:
        codec: the name that the library gives itself.
        sha256: of the library's file. All ranks must have the same one.
        abi_version: of the interface that it implements.
        block: elements that are coded together.
        path: of the file, on this rank.
        error_feedback: as every compressor has it.
    """

    codec: str
    sha256: str
    abi_version: int
    block: int
    path: str = dataclasses.field(compare=False)
    error_feedback: Feedback | bool | None = False
    aggregate: ClassVar[Aggregate] = "owner"
    fixed_size: ClassVar[bool] = True
    carries_nan: ClassVar[bool] = True
    cpu_only: ClassVar[bool] = True  # the core has it, for tensors on the CPU

    @property
    def native(self) -> str | None:
        return native_name(self.codec, self.error_feedback)

    def compress(self, x: Tensor, info: Info) -> Payload:
        from ringdp import _C

        return (_C.codec_compress(self.codec, x.cpu()).to(x.device),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        code = check_code(self.codec, payload, self.code_bytes(info.numel), info)
        from ringdp import _C

        return _C.codec_decompress(self.codec, code.cpu(), info.numel).to(code.device)

    def code_bytes(self, numel: int) -> int:
        """Of the code of so many elements."""
        from ringdp import _C

        return _C.codec_bytes(self.codec, numel)

    def broken_promises(self) -> list[str]:
        """The rules of the header that its functions break, a sentence each; for `ringdp.testing.check_compressor`."""
        from ringdp import _C

        return _C.codec_broken_promises(self.codec)

    def __repr__(self) -> str:
        """The same on all ranks that have the same library, wherever it lies there."""
        bits = 8 * self.code_bytes(4096) / 4096
        return (
            f"CCompressor({self.codec!r}, {bits:.2f} bits an element, block={self.block}, abi={self.abi_version},"
            f" sha256={self.sha256[:16]}, error_feedback={self.error_feedback!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.path, self.codec, self.sha256, self.error_feedback)


def load(path: str | os.PathLike[str], *, error_feedback: Feedback | bool | None = False) -> CCompressor:
    """The compressor in the shared library at `path`, built from C.

    The library's code runs in this process and stays loaded until that ends; the same file twice is one codec. Give all
    ranks the same file, which need not lie at the same place.

    Args:
        path: of the file.
        error_feedback: True, or an object with the methods of `ErrorFeedback`: add the error to the next gradient.

    Raises:
        InvalidArgumentError: there is no such file, it is not a library, has no ``ringdp_compressor_v1`` or another
            version of the interface, lacks a function, promises impossible sizes, or has another codec's name.
    """
    feedback_of(error_feedback)
    try:
        plain = os.fspath(path)
    except TypeError:
        raise InvalidArgumentError(f"load needs the path of a shared library, not {path!r}") from None
    from ringdp import _C

    return _made(_C.load_codec(os.fsdecode(plain)), error_feedback)


def include_dir() -> str:
    """The folder to give a C compiler with ``-I``, for ``#include <ringdp/compressor.h>``."""
    return str(Path(__file__).resolve().parents[2] / "include")


def _again(path: str, codec: str, sha256: str, error_feedback: Feedback | bool | None) -> CCompressor:
    """The compressor of a pickle or copy. Raises InvalidArgumentError where the file has changed since."""
    made = _loaded(sha256, error_feedback) or load(path, error_feedback=error_feedback)
    if (made.codec, made.sha256) != (codec, sha256):
        raise InvalidArgumentError(
            f"{path} is not the library that was saved: it has codec {made.codec!r}, sha256 {made.sha256[:16]}, and"
            f" that had {codec!r}, sha256 {sha256[:16]}"
        )
    return made


def _loaded(sha256: str, error_feedback: Feedback | bool | None) -> CCompressor | None:
    """The library that was loaded before, whose file may be gone."""
    from ringdp import _C

    known = _C.find_codec(sha256)
    return None if known is None else _made(known, error_feedback)


def _made(it: _C.CodecLibrary, error_feedback: Feedback | bool | None) -> CCompressor:
    return CCompressor(it.name, it.sha256, it.abi_version, it.block, it.path, error_feedback)
