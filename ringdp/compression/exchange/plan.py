"""The messages of a bucket's exchange: fixed by its layout, the compressors and the number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ringdp.compression.description import describe
from ringdp.compression.exchange.packing import Forms, Promises, room
from ringdp.compression.exchange.section import Phase, Section

Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One bucket's.

    Attributes:
        sections: the compressed parameters, all with the same ``aggregate``.
        ranks: how many there are.
        device: of the bucket.
    """

    sections: tuple[Section, ...]
    ranks: int
    device: torch.device

    @functools.cached_property
    def _promises(self) -> Promises:
        return Promises(self.device)

    @functools.cached_property
    def fixed_size(self) -> bool:
        return all(getattr(section.compressor, "fixed_size", True) for section in self.sections)

    @functools.cached_property
    def watched(self) -> list[bool]:
        """By section: whether the framework looks for elements that are not finite, because the code cannot carry
        them."""
        return [not getattr(section.compressor, "carries_nan", False) for section in self.sections]

    @functools.cached_property
    def rounds(self) -> dict[tuple[str, ...], Any]:
        """By sections, the rounds of their compressor: known once it was tried."""
        return {}

    def forms(self, part: int, phase: Phase) -> list[Forms]:
        """By section, of a payload of this part."""
        return [self._promises.of(section, part, phase) for section in self.sections]

    @functools.cached_property
    def lines(self) -> list[str]:
        """The text that must be equal on all ranks, a line for each section."""
        return [self._line(section) for section in self.sections]

    def _line(self, section: Section) -> str:
        aggregate = getattr(section.compressor, "aggregate", "owner")
        if aggregate == "rounds":
            return f"{section.name} {list(section.shape)} by {describe(section.compressor)}, {aggregate}"
        sizes = [room([self._promises.of(section, part, "rank")]) for part in range(section.parts)]
        return f"{section.name} [{section.count}] by {describe(section.compressor)}, {aggregate}, in {sizes} bytes"

    @functools.cached_property
    def fingerprint(self) -> int:
        return fingerprint(self.lines)


def fingerprint(lines: Sequence[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())
