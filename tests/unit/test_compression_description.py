"""Compressors in words: what tells them apart is there, what differs from process to process is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ringdp.compression import DGC, Int4, Int8, TopK
from ringdp.compression.description import describe


class Plain:
    """A user's own."""

    def __init__(self, bits: int = 3, error_feedback: Any = None) -> None:
        self.bits, self.error_feedback = bits, error_feedback
        self.table = object()

    def compress(self, x: Any, info: Any) -> Any: ...

    def decompress(self, payload: Any, info: Any) -> Any: ...


class Decaying:
    """A user's error feedback."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = keep

    def before(self, x: Any, state: Any) -> Any: ...

    def after(self, x: Any, decoded: Any, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Around:
    """A compressor in another one."""

    inner: Any
    tables: tuple[Any, ...] = ()

    def compress(self, x: Any, info: Any) -> Any: ...

    def decompress(self, payload: Any, info: Any) -> Any: ...


class Wordy(Plain):
    def __repr__(self) -> str:
        return f"Wordy with\n  {self.error_feedback}"


class Slotted:
    __slots__ = ("bits",)


def looped() -> Plain:
    one = Plain()
    one.error_feedback = Around(one)
    return one


@pytest.mark.parametrize(
    ("compressor", "words"),
    [
        (Int8(block=64), "Int8(block=64, error_feedback=False, rotate=False)"),
        (TopK(0.5, error_feedback=DGC(0.8)),
         "TopK(fraction=0.5, ramp_steps=0, error_feedback=DGC(momentum=0.8, clip=None, masking=True))"),
        (Int4(error_feedback=Decaying(0.5)), "Int4(block=64, error_feedback=Decaying(keep=0.5), rotate=False)"),
        (Plain(), "Plain(bits=3, error_feedback=None)"),
        (Plain(4, Decaying()), "Plain(bits=4, error_feedback=Decaying(keep=0.9))"),
        (Around(Plain(4, Decaying())),
         "Around(inner=Plain(bits=4, error_feedback=Decaying(keep=0.9)), tables=())"),
        (Around(None, (Slotted(),)), "Around(inner=None, tables=(<"),
        (Wordy(3, Decaying()), "Wordy with Decaying(keep=0.9)"),
        (Slotted(), "Slotted()"),
        (looped(), "Plain(bits=3, error_feedback=Around(inner=Plain, tables=()))"),
    ],
    ids=lambda it: type(it).__name__,
)  # fmt: skip
def test_settings_are_told_and_addresses_are_not(compressor: Any, words: str) -> None:
    text = describe(compressor)
    assert text.startswith(words), text
    assert " at 0x" not in text
    assert "\n" not in text
