"""A model's parameters in fragments, each of which leaves as one flat tensor.

Parameters are dealt in the model's order, each to the fragment with the fewest elements so far: fragments are about
equal, and each has layers from all depths. That depends on sizes and on the order alone, so all ranks and later runs
deal alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.parameters import ModelParameter
from ringdp.compression.tensor_parts import is_dtensor

PART = 1 << 18  # elements


def dealt(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The parameters of each fragment, by index, in order."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0)] * count  # elements, parameters
    for index, size in enumerate(sizes):
        least = min(range(count), key=lambda one: (*loads[one], one))
        fragments[least].append(index)
        loads[least] = (loads[least][0] + size, loads[least][1] + 1)
    return fragments


def local_part(parameter: Tensor) -> Tensor:
    """A real tensor on this rank's memory of the parameter: of a DTensor its own part."""
    mine: Any = parameter.detach()
    if is_dtensor(parameter):
        mine = mine._local_tensor
    return torch.view_as_real(mine) if mine.is_complex() else mine


@dataclass(frozen=True)
class Piece:
    """A parameter's place in its fragment: `count` elements from `begin` on, row by row."""

    name: str
    parameter: Tensor
    begin: int
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of a flat tensor of the fragment."""
        return flat[self.begin : self.begin + self.count]

    def shaped(self, flat: Tensor) -> Tensor:
        return self.of(flat).view(local_part(self.parameter).shape)


class Fragment:
    """Some parameters of a model, and their global values, which are equal on all ranks. One thread.

    Attributes:
        pieces: the parameters.
        total: flat, [numel]: the global parameters, in memory that stays.
        buffer: flat, [numel]: the values that leave, later the mean that arrives.
    """

    def __init__(self, parameters: Sequence[ModelParameter], dtype: torch.dtype, device: torch.device) -> None:
        self.pieces: list[Piece] = []
        numel = 0
        for one in parameters:
            count = local_part(one.parameter).numel()
            self.pieces.append(Piece(one.name, one.parameter, numel, count))
            numel += count
        self.total = torch.empty(numel, dtype=dtype, device=device)
        self.buffer = torch.empty_like(self.total)
        self.read(self.total)

    @property
    def label(self) -> str:
        first, last = self.pieces[0].name, self.pieces[-1].name
        return first if first == last else f"{first} … {last}"

    def read(self, into: Tensor) -> None:
        """This rank's parameters."""
        for piece in self.pieces:
            piece.shaped(into).copy_(local_part(piece.parameter))

    def write(self, values: Tensor, keep: float = 0.0) -> None:
        """This rank's parameters become `keep` times what they are and (1 - keep) times the values."""
        for piece in self.pieces:
            mine, new = local_part(piece.parameter), piece.shaped(values)
            if keep == 0:
                mine.copy_(new)
            else:
                mine.copy_(torch.lerp(new, mine.to(new.device, new.dtype), keep))

    def read_changes(self) -> float:
        """The buffer becomes the global parameters minus this rank's; the norm of that."""
        squares = 0.0
        for mine, place in self._parts():
            total, change = self.total[place].view(mine.shape), self.buffer[place].view(mine.shape)
            if mine.device == total.device and mine.dtype == total.dtype:
                torch.sub(total, mine, out=change)
            else:
                change.copy_(mine)
                torch.sub(total, change, out=change)
            squares += float(torch.linalg.vector_norm(change)) ** 2
        return squares**0.5

    def read_parameters(self) -> float:
        """The buffer becomes this rank's parameters; the norm of their changes."""
        squares = 0.0
        for mine, place in self._parts():
            values = self.buffer[place].view(mine.shape).copy_(mine)
            squares += float(torch.dist(self.total[place].view(mine.shape), values)) ** 2
        return squares**0.5

    def first_not_finite(self) -> int | None:
        """The index of the piece with a parameter of this rank that is an infinity or a NaN."""
        bad = (i for i, one in enumerate(self.pieces) if not bool(local_part(one.parameter).isfinite().all()))
        return next(bad, None)

    def _parts(self) -> Iterator[tuple[Tensor, slice]]:
        """This rank's parameters in parts that stay in the processor's cache, and where they are in flat tensors."""
        for piece in self.pieces:
            mine = local_part(piece.parameter)
            if not mine.is_contiguous():
                yield mine, slice(piece.begin, piece.begin + piece.count)
                continue
            flat = mine.view(-1)
            for place in parts(piece.count):
                yield flat[place], slice(piece.begin + place.start, piece.begin + place.stop)


def parts(count: int) -> Iterator[slice]:
    """Of `count` elements: several operations on each of them cost about as much memory traffic as one."""
    return (slice(begin, min(begin + PART, count)) for begin in range(0, count, PART))


def digest(flat: Tensor) -> int:
    """A 64-bit hash of the tensor's bytes."""
    from ringdp import _C

    if flat.device.type == "cpu" and flat.numel():
        return int(_C.ReplicaHash([flat]).each()[0])
    return 0
