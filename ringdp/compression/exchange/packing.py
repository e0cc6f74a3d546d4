"""Payloads as bytes: the messages of a bucket between ranks, read without trust in their lengths.

A message is a header, a byte of flags for each section, and the payloads' tensors, each on a multiple of 8 bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ringdp.compression.description import describe
from ringdp.compression.exchange.section import Coder, Phase, Section
from ringdp.compression.exchange.states import States
from ringdp.compression.protocol import Payload
from ringdp.errors import InvalidArgumentError

ALIGNMENT = 8
HEADER_BYTES = 8
# Of a payload, in bytes an element and for all of it: no length from a peer makes this rank allocate more.
MOST_BYTES_AN_ELEMENT = 16
MOST_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Form:
    """A tensor of a payload: its dtype and shape; the first dimension differs where sizes do."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def with_rows(self, rows: int) -> Form:
        return Form(self.dtype, (rows, *self.shape[1:]))


Forms = tuple[Form, ...]


def forms_of(payload: Payload) -> Forms:
    return tuple(Form(it.dtype, tuple(it.shape)) for it in payload)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def room(forms: Iterable[Forms]) -> int:
    return sum(aligned(form.nbytes) for payload in forms for form in payload)


def front(sections: int) -> int:
    """Bytes before the payloads."""
    return aligned(HEADER_BYTES + sections)


class Promises:
    """The forms of payloads by the number of elements, found by compressing zeros once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, tuple[int, ...], int, str], Forms] = {}

    def of(self, section: Section, part: int, phase: Phase) -> Forms:
        """Of a part's payload; of no elements there is none."""
        numel = section.numel(part)
        if numel == 0:
            return ()
        key = (id(section.compressor), section.shape, numel, phase)
        if key not in self._known:
            coder = Coder(States(), 0, section.parts, 0, device=self._device)
            zeros = torch.zeros(numel, device=self._device, dtype=torch.float32)
            self._known[key] = forms_of(coder.compress(section, zeros, phase, part))
        return self._known[key]


def check_promise(section: Section, promised: Forms, payload: Payload, numel: int) -> None:
    """Raise InvalidArgumentError where a payload's form differs from that of zeros in a part that may not differ."""
    given = forms_of(payload)
    if getattr(section.compressor, "fixed_size", True):
        if given != promised:
            raise InvalidArgumentError(
                f"{describe(section.compressor)} gave {_text(given)} for {section.name} where {numel} zeros gave"
                f" {_text(promised)}: set fixed_size = False where payloads differ in size",
                name=section.name,
            )
        return
    same = len(given) == len(promised) and all(
        a.dtype == b.dtype and len(a.shape) == len(b.shape) >= 1 and a.shape[1:] == b.shape[1:]
        for a, b in zip(given, promised, strict=True)
    )
    if not same:
        raise InvalidArgumentError(
            f"{describe(section.compressor)} gave {_text(given)} for {section.name} where zeros gave"
            f" {_text(promised)}: the first dimension may differ, nothing else",
            name=section.name,
        )
    if room([given]) > most_bytes(numel):
        raise InvalidArgumentError(
            f"{describe(section.compressor)} made {room([given])} bytes of {numel} elements of {section.name}: more"
            f" than {MOST_BYTES_AN_ELEMENT} an element is not sent",
            name=section.name,
        )


def most_bytes(numel: int) -> int:
    return MOST_BYTES + MOST_BYTES_AN_ELEMENT * numel


def write(message: Tensor, at: int, payloads: Sequence[Payload]) -> None:
    """Copy the payloads into the uint8 `message` from byte `at` on."""
    for payload in payloads:
        for tensor in payload:
            size = tensor.numel() * tensor.dtype.itemsize
            if size:
                message[at : at + size].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            at += aligned(size)


def read(message: Tensor, at: int, forms: Forms) -> tuple[Payload, int]:
    """A payload whose tensors are views of `message`, and where the next one begins."""
    tensors = []
    for form in forms:
        tensors.append(message[at : at + form.nbytes].view(form.dtype).view(form.shape))
        at += aligned(form.nbytes)
    return tuple(tensors), at


def _text(forms: Forms) -> str:
    return ", ".join(f"{str(it.dtype).removeprefix('torch.')} {list(it.shape)}" for it in forms) or "nothing"
