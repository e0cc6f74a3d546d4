"""The numbers of elements in sparse codes, counted beside an exchange."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringdp.compression.exchange.section import Section
from ringdp.compression.protocol import Payload


@dataclasses.dataclass
class Sparsity:
    """Of one parameter in one step, for compressors with a method ``entries``.

    Attributes:
        numel: the parameter's elements.
        encoded: how many of them this rank encoded: all, or all but its own part.
        chosen: how many of those it sent.
        union: elements that any rank sent; None where no rank learns it, as with ``aggregate="gather"``.
        mass, dropped: sums of squares of the elements to be sent, error feedback included, and of those that were not
            sent; None in steps in which `Tally.measures` is off.
    """

    numel: int
    encoded: int = 0
    chosen: int = 0
    union: int | None = None
    mass: float | None = None
    dropped: float | None = None

    @property
    def density(self) -> float:
        """Share of the elements that this rank chose."""
        return self.chosen / self.encoded if self.encoded else 0.0

    @property
    def union_density(self) -> float | None:
        """Share of the elements that any rank chose."""
        return None if self.union is None else self.union / self.numel

    @property
    def union_over_chosen(self) -> float | None:
        """How much denser the mean is than this rank's choice: 1 where all ranks choose the same elements."""
        together = self.union_density
        return None if together is None or not self.chosen else together / self.density

    @property
    def dropped_mass(self) -> float | None:
        """`dropped` / `mass`, 0 to 1."""
        if self.mass is None or self.dropped is None:
            return None
        return self.dropped / self.mass if self.mass else 0.0


class Tally:
    """The `Sparsity` of a rank's parameters in one step, by name. One thread at a time for a parameter.

    Attributes:
        measures: whether masses are measured, which costs passes over the elements; what is counted costs nothing.
    """

    def __init__(self) -> None:
        self.measures = False
        self._of: dict[str, Sparsity] = {}

    def begin(self) -> None:
        """A step."""
        self._of = {}

    def items(self) -> dict[str, Sparsity]:
        return dict(self._of)

    def counts(self, section: Section) -> bool:
        return hasattr(section.compressor, "entries")

    def weighs(self, section: Section) -> bool:
        return self.measures and self.counts(section)

    def sent(self, section: Section, payload: Payload, part: int) -> None:
        """Called when this rank has encoded the elements of `part` as `payload`."""
        if self.counts(section):
            one = self._one(section)
            one.encoded += section.numel(part)
            one.chosen += _entries(section, payload)

    def joined(self, section: Section, payload: Payload) -> None:
        """Called with the `payload` of all ranks' elements, of a part or of all."""
        if self.counts(section):
            one = self._one(section)
            one.union = (one.union or 0) + _entries(section, payload)

    def weigh(self, section: Section, wanted: Tensor, decoded: Tensor) -> None:
        """Called with the elements `wanted` that were to be sent, and their decoded code, whose zeros were not sent."""
        one = self._one(section)
        squares = wanted.double().square()
        one.mass = (one.mass or 0.0) + float(squares.sum())
        one.dropped = (one.dropped or 0.0) + float(torch.where(decoded == 0, squares, 0.0).sum())

    def _one(self, section: Section) -> Sparsity:
        return self._of.setdefault(section.name, Sparsity(section.count))


def _entries(section: Section, payload: Payload) -> int:
    return int(section.compressor.entries(payload))  # type: ignore[attr-defined]
