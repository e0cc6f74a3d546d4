"""Keys: their names, the tensors that belong to them, and which rank owns which elements."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringdp.errors import InvalidArgumentError

KeyName: TypeAlias = str | int
Values: TypeAlias = Any  # a tensor, or a list of them: of one key on several devices, or of several keys

UNIT = 64
"""Slices begin at multiples of so many elements: vector instructions then see the elements of a slice as those of the
whole tensor, and an optimizer gives the same bits."""
_CUT_BYTES = 4096
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The owners of a key's elements: `part` for each rank, one after the other, and the `rest` for the `owner`.

    Attributes:
        part: elements; a multiple of `UNIT`, 0 where a rank owns the whole key.
        rest: elements behind the parts.
        owner: the rank with the rest.
        ranks: how many there are.
    """

    part: int
    rest: int
    owner: int
    ranks: int

    def numel(self, rank: int) -> int:
        """Of the rank's slice: its part, then the rest where it owns that."""
        return self.part + (self.rest if rank == self.owner else 0)

    def slices(self, whole: Tensor, rank: int) -> list[Tensor]:
        """The rank's elements as views of the flat `whole`."""
        return [whole[first : first + count] for first, count in self.spans(rank)]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """The rank's elements: the first one and how many, of its part and of the rest."""
        spans = [(rank * self.part, self.part)] if self.part else []
        if self.rest and rank == self.owner:
            spans.append((self.ranks * self.part, self.rest))
        return spans

    def beside(self, whole: Tensor, slice_: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The rank's elements as views of the flat `whole`, each with its place in the rank's flat `slice_`."""
        at = 0
        for view in self.slices(whole, rank):
            yield view, slice_[at : at + view.numel()]
            at += view.numel()

    def slice_of(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's elements of the flat `whole`: a new tensor."""
        views = self.slices(whole, rank)
        return torch.cat(views) if views else whole.new_empty(0)


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the store.

    Attributes:
        name: as text: 3 and "3" are one key.
        shape: of its value.
        dtype: of its value.
        device: of its slices.
        cut: the owners of the elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cut: Cut

    @property
    def numel(self) -> int:
        return self.cut.part * self.cut.ranks + self.cut.rest

    def describe(self) -> str:
        """The description of the key, which is equal on all ranks."""
        return describe(self.name, self.shape, self.dtype)


class Owners:
    """Deals the elements of new keys to the ranks: the same on all of them, if the keys come in the same order."""

    def __init__(self, ranks: int) -> None:
        self._loads = [0] * ranks

    def cut(self, numel: int, element_bytes: int) -> Cut:
        """Keys of 4 KiB and more are cut into equal parts; smaller ones, and rests, go to the rank with least bytes."""
        ranks = len(self._loads)
        part = numel // (ranks * UNIT) * UNIT if numel * element_bytes >= _CUT_BYTES and ranks > 1 else 0
        rest = numel - part * ranks
        owner = min(range(ranks), key=self._loads.__getitem__)
        for rank in range(ranks):
            self._loads[rank] += part * element_bytes
        self._loads[owner] += rest * element_bytes
        return Cut(part, rest, owner, ranks)


def describe(name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{name!r} {describe_type(shape, dtype)}"


def describe_type(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def name_of(key: KeyName) -> str:
    """The name of a key. Raises InvalidArgumentError where it is not a text or a whole number."""
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise InvalidArgumentError(f"a key is a text that is not empty or a whole number, not {key!r}")
    return str(key)


def by_key(what: str, key: KeyName | Sequence[KeyName], values: Values) -> dict[str, list[Tensor]]:
    """The tensors of each key, from MXNet's forms: one key and a tensor or a list of them, or lists of both.

    Raises:
        InvalidArgumentError: not as many values as keys, a key twice, or a value that is not a dense tensor; `what`
            names the method.
    """
    if isinstance(key, str | int):
        name = name_of(key)
        return {name: tensors_of(what, name, values)}
    if isinstance(key, Tensor) or not isinstance(key, Iterable):
        raise InvalidArgumentError(f"{what}: a key is a text or a whole number, or keys are a list, not {key!r}")
    names = [name_of(one) for one in key]
    if isinstance(values, Tensor) or not isinstance(values, Sequence) or len(values) != len(names):
        given = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise InvalidArgumentError(f"{what}: {len(names)} keys need a list of as many values, not {given}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(f"{what}: key {twice!r} is given twice")
    return {name: tensors_of(what, name, one) for name, one in zip(names, values, strict=True)}


def tensors_of(what: str, name: str, value: Values) -> list[Tensor]:
    """A key's tensors; several are those of several devices. Raises InvalidArgumentError."""
    if type(value) in _PLAIN and value.layout is torch.strided:
        return [value.detach() if value.requires_grad else value]
    tensors = [value] if isinstance(value, Tensor) else value
    if not isinstance(tensors, Sequence) or not tensors or not all(isinstance(it, Tensor) for it in tensors):
        raise InvalidArgumentError(f"{what}: the value of key {name!r} must be a tensor, not {type(value).__name__}")
    for tensor in tensors:
        if hasattr(tensor, "full_tensor"):
            raise InvalidArgumentError(f"{what}: the value of key {name!r} is a DTensor; give its local tensor")
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{what}: the value of key {name!r} is {str(tensor.layout).removeprefix('torch.')}, and the store takes"
                " dense tensors: make it dense, or put the table into a module that moves rows only"
            )
    return [tensor.detach() for tensor in tensors]


def check(what: str, key: Key, tensors: Sequence[Tensor]) -> None:
    """Raise InvalidArgumentError where a tensor does not fit the key."""
    for tensor in tensors:
        if tensor.shape != key.shape or tensor.dtype != key.dtype:
            raise InvalidArgumentError(
                f"{what}: key {key.describe()} cannot take {describe(key.name, tensor.shape, tensor.dtype)}"
            )


def check_number(what: str, value: Any, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """`value` as a float. Raises InvalidArgumentError where it is not a finite number from `at_least` on and above
    `above`."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < at_least or number <= above:
        least = f" from {at_least:g} on" if at_least > -math.inf else f" above {above:g}" if above > -math.inf else ""
        raise InvalidArgumentError(f"{what} must be a finite number{least}, not {value!r}")
    return number


def check_priority(what: str, priority: Any) -> int:
    """Raises InvalidArgumentError where it is not a whole number; `what` names the method."""
    try:
        return operator.index(priority)
    except TypeError:
        raise InvalidArgumentError(f"{what}: a priority is a whole number, not {priority!r}") from None


def check_rows(name: str, shape: Sequence[int], ids: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise InvalidArgumentError where rows `ids` of a key of that shape cannot be put into `outputs`."""
    what = f"row_sparse_pull: key {name!r} {list(shape)}"
    if len(ids) != len(outputs):
        raise InvalidArgumentError(f"{what}: {len(outputs)} tensors need as many row_ids, not {len(ids)}")
    for rows, tensor in zip(ids, outputs, strict=True):
        if rows.dtype not in (torch.int32, torch.int64):
            raise InvalidArgumentError(f"{what}: row_ids are int32 or int64, not {str(rows.dtype).split('.')[-1]}")
        if not shape or tensor.shape != (rows.numel(), *shape[1:]):
            raise InvalidArgumentError(f"{what}: {rows.numel()} rows of it do not fit into {list(tensor.shape)}")
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < shape[0]):
            raise InvalidArgumentError(f"{what} has rows 0 to {shape[0] - 1} only")


def flat(tensor: Tensor) -> Tensor:
    """Its elements in one dimension: a view where it is contiguous, else a copy."""
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)


def summed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of one key's tensors, flat; of a single one no copy is made where it is contiguous and there."""
    total = flat(tensors[0] if tensors[0].device == device else tensors[0].to(device))
    if len(tensors) > 1:
        total = total + flat(tensors[1].to(device))
        for tensor in tensors[2:]:
            total += flat(tensor.to(device))
    return total


def unknown(what: str, name: str, known: Mapping[str, object]) -> InvalidArgumentError:
    """The error for a key that was never initialised."""
    some = ", ".join(map(repr, list(known)[:5])) or "none"
    return InvalidArgumentError(f"{what}: key {name!r} is not in the store: call init for it first (there are {some})")
