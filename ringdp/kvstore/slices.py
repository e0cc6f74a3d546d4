"""Slices of keys as the payload of a message, and an owner's slices with their update."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp import _C
from ringdp.errors import InvalidArgumentError
from ringdp.job.byte_collectives import as_tensor, broadcast_bytes, together
from ringdp.job.whole_file import whole_file
from ringdp.kvstore.agreement import Operations
from ringdp.kvstore.keys import Cut, Key, describe
from ringdp.kvstore.messages import Message
from ringdp.kvstore.owner import Push
from ringdp.kvstore.updates import Optimizer, Update

_ALIGNED = 64
FORMAT = 1


def _padded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


@dataclasses.dataclass(frozen=True)
class Lot:
    """Slices of some keys on one owner, one after the other.

    Attributes:
        key: the number of the only key; -1: there are several.
        head: uint8; says which keys they are; None where it is one.
        place: of that key's only slice in its whole value, the first and the last byte; None: they are several.
        parts: of each key with elements there: its name, its first byte, its elements and their dtype.
        total: bytes of all slices.
        of_wholes: the slices of whole values of all keys, behind the head: packs pushes, and unpacks answers.
        of_slices: the owner's slices of the keys of `parts`: packs answers.
    """

    key: int
    head: Tensor | None
    place: slice | None
    parts: tuple[tuple[str, int, int, torch.dtype], ...]
    total: int
    of_wholes: _C.Parcel
    of_slices: _C.Parcel

    @classmethod
    def of(cls, keys: Sequence[Key], numbers: Sequence[int], place: int) -> Lot:
        """`numbers`: of the keys, the same on all ranks; `place`: of the owner among the owners."""
        parts: list[tuple[str, int, int, torch.dtype]] = []
        wholes, slices, total = [], [], 0
        for index, key in enumerate(keys):
            if numel := key.cut.numel(place):
                size, at = key.dtype.itemsize, total
                slices.append((len(parts), 0, numel * size, total))
                parts.append((key.name, total, numel, key.dtype))
                for first, count in key.cut.spans(place):
                    wholes.append((index, first * size, count * size, at))
                    at += count * size
                total += _padded(numel * size)
        head, only, span = b"", numbers[0] if len(numbers) == 1 else -1, None
        if only < 0:
            packed = struct.pack(f"<q{len(numbers)}q", len(numbers), *numbers)
            head = packed.ljust(_padded(len(packed)), b"\0")
        elif len(wholes) == 1:
            _, first, count, _ = wholes[0]
            total, span = count, slice(first, first + count)
        return cls(
            only,
            as_tensor(head) if head else None,
            span,
            tuple(parts),
            total,
            _C.Parcel(head, wholes, total),
            _C.Parcel(b"", slices, total),
        )

    def view(self, whole: Tensor) -> Tensor:
        """The slice at `place`, as a payload in the flat value's own memory."""
        assert self.place is not None
        return whole.view(torch.uint8)[self.place]

    def views(self, body: Tensor) -> dict[str, Tensor]:
        """The slices in a body, flat, by key. With a head before them, or, as in an answer, without."""
        if self.place is not None:
            name, _, _, dtype = self.parts[0]
            return {name: body.view(dtype)}
        first = body.numel() - self.total
        return {
            name: body[first + begin : first + begin + numel * dtype.itemsize].view(dtype)
            for name, begin, numel, dtype in self.parts
        }


class Slices:
    """An owner's: values by key, and the update of all of them; see `Served`. A lot of an update is a whole: none of
    its keys has been updated, or all. Guarded by the `Owner`'s lock.

    Args:
        place: of this rank among the owners.
        average: a push counts 1 over this; 1: pushes are added up.
        compensates: the rate of an update is divided by 1 + the updates of others since its worker last pulled.
    """

    def __init__(self, place: int, average: int, *, compensates: bool) -> None:
        self._place, self._average, self._compensates = place, average, compensates
        self._keys: list[Key] = []
        self.values: dict[str, Tensor] = {}
        self.update: Update | None = None
        # by head, or key, with the values that they have
        self._lots: dict[bytes | int, tuple[Lot, list[Tensor]]] = {}

    def agree(self, keys: Sequence[Key], values: Mapping[str, Tensor], update: Update) -> None:
        """Take what the ranks have agreed on."""
        self._keys, self.values, self.update = list(keys), dict(values), update
        self._lots.clear()

    def apply(self, pushes: Sequence[Push]) -> None:
        first, *others = pushes
        sums = self._lot(first.body, first.key)[0].views(first.body)
        for push in others:
            for name, view in self._lot(push.body, push.key)[0].views(push.body).items():
                if name in sums:
                    sums[name].add_(view)
                else:
                    sums[name] = view
        if self._average > 1:
            torch._foreach_div_(list(sums.values()), self._average)
        if first.scale != 1.0:
            torch._foreach_mul_(list(sums.values()), first.scale)
        assert self.update is not None
        late = first.late if self._compensates and not others else 0
        with _slower(self.update, late) if late > 0 else contextlib.nullcontext():
            self.update.apply(self.values, sums)

    def answer(self, asked: Message) -> Tensor:
        lot, values = self._lot(asked.payload, asked.key)
        if asked.into is None:
            return lot.of_slices.pack(values)
        return asked.into.copy_(values[0].view(torch.uint8))

    def set(self, body: Tensor | None) -> None:
        """The rate of the optimizer."""
        assert body is not None
        if isinstance(self.update, Optimizer):
            self.update.set_numbers({"lr": body.view(torch.float64).item()})

    def content(self, clock: int, pushes: Mapping[int, int]) -> dict[str, Any]:
        """Copies of all values and states, in numbers, text and tensors."""
        update = self.update
        content: dict[str, Any] = {
            "ringdp_async_slices": FORMAT,
            "clock": clock,
            "pushes": {str(worker): count for worker, count in pushes.items()},
            "keys": {it.name: (list(it.shape), *dataclasses.astuple(it.cut)) for it in self._keys},
            "values": {name: it.clone() for name, it in self.values.items()},
        }
        if isinstance(update, Optimizer):
            content["optimizer"], content["numbers"] = update.name, update.numbers()
            content["state"] = {
                name: {
                    field: found.clone() if isinstance(found, Tensor) else found
                    for field, found in update.state_of(it).items()
                    if found is not None
                }
                for name, it in self.values.items()
            }
        return content

    def writer(self, folder: str, clock: int, pushes: Mapping[int, int]) -> Callable[[], None]:
        content = self.content(clock, pushes)
        owners = self._keys[0].cut.ranks if self._keys else 1

        def write() -> None:
            path = Path(folder) / f"slices-clock-{clock}-owner-{self._place}-of-{owners}.pt"
            with whole_file(path, f"{path} could not be written", make_folder=True) as file:
                torch.save(content, file)

        return write

    def take(self, contents: Sequence[Mapping[str, Any]]) -> None:
        """The slices of this rank, of files of all owners that wrote, in their order.

        Raises:
            InvalidArgumentError: they do not fit the keys or the optimizer.
        """
        _check(contents[0], self._keys, self.update)
        for key in self._keys:
            if not (numel := key.cut.numel(self._place)):
                continue
            mine = _cutter(contents, key, self._place)
            value = self.values[key.name]
            value.copy_(mine([it["values"][key.name] for it in contents]))
            if not isinstance(self.update, Optimizer):
                continue
            state: dict[str, Any] = {}
            written = [it["state"].get(key.name, {}) for it in contents]
            for field in dict.fromkeys(name for one in written for name in one):
                found = next(one[field] for one in written if field in one)
                if isinstance(found, Tensor) and found.dim() == 1:
                    pieces = [one.get(field, found.new_zeros(0)) for one in written]
                    state[field] = mine(pieces).clone()
                else:
                    state[field] = found.clone() if isinstance(found, Tensor) else found
            if state:
                self.update.set_state(value, state)
            assert value.numel() == numel
        if isinstance(self.update, Optimizer):
            self.update.set_numbers(contents[0]["numbers"])

    def _lot(self, body: Tensor | None, key: int) -> tuple[Lot, list[Tensor]]:
        head: bytes | int = key
        if key < 0:
            assert body is not None
            there = memoryview(body.numpy())  # type: ignore[arg-type]
            head = there[: 8 + 8 * int.from_bytes(there[:8], "little")].tobytes()
        if (found := self._lots.get(head)) is None:
            numbers = (head,) if isinstance(head, int) else struct.unpack_from(f"<{len(head) // 8 - 1}q", head, 8)
            lot = Lot.of([self._keys[it] for it in numbers], numbers, self._place)
            found = self._lots[head] = lot, [self.values[name] for name, *_ in lot.parts]
        return found


def _cutter(contents: Sequence[Mapping[str, Any]], key: Key, place: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Puts the pieces of all owners that wrote together, and cuts this owner's slice out of them."""
    _, part, rest, owner, ranks = contents[0]["keys"][key.name]
    cut = Cut(part, rest, owner, ranks)

    def mine(pieces: Sequence[Tensor]) -> Tensor:
        whole = torch.empty(key.numel, dtype=pieces[0].dtype, device="cpu")
        for one, piece in enumerate(pieces):
            for view, part in cut.beside(whole, piece, one):
                view.copy_(part)
        return key.cut.slice_of(whole, place)

    return mine


def newest(folder: Path) -> list[Path]:
    """The files of the newest clock of which all are there, by owner.

    Raises:
        InvalidArgumentError: there is none.
    """
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("slices-clock-*-owner-*-of-*.pt"):
        _, _, clock, _, owner, _, owners = path.stem.split("-")
        found.setdefault((int(clock), int(owners)), {})[int(owner)] = path
    whole = [which for which, paths in found.items() if len(paths) == which[1]]
    if not whole:
        raise InvalidArgumentError(f"load: {folder} has no files of KVStore.save of all owners of one clock")
    best = max(whole)
    return [found[best][owner] for owner in range(best[1])]


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Raises OSError, or InvalidArgumentError where one is not a file of slices."""
    contents = []
    for path in paths:
        try:
            content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        except OSError:
            raise
        except Exception as error:
            raise InvalidArgumentError(f"load: torch.load refuses {path}: {error}") from None
        if not isinstance(content, dict) or content.get("ringdp_async_slices") != FORMAT:
            raise InvalidArgumentError(f"load: {path} is not a file of KVStore.save")
        contents.append(content)
    return contents


def load(
    folder: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    operations: Operations,
    take: Callable[[Sequence[Mapping[str, Any]]], None],
) -> int:
    """Give the newest files of all owners to `take`; on all ranks. Returns their clock; raises as `newest` and `read`,
    and what `take` raises, on all ranks."""

    def find() -> bytes:
        return "\n".join(it.name for it in newest(Path(folder))).encode()

    def take_found(found: bytes | bytearray) -> int:
        contents = read([Path(folder) / name for name in found.decode().split("\n")])
        take(contents)
        return int(contents[0]["clock"])

    def on_all(group: dist.ProcessGroup) -> int:
        found = broadcast_bytes(together(lambda: find() if group.rank() == 0 else b"", group, "load"), 0, group)
        return together(lambda: take_found(found), group, "load")

    return take_found(find()) if group is None else operations.run("loading of slices", lambda: on_all(group))


def _check(content: Mapping[str, Any], keys: Sequence[Key], update: Update | None) -> None:
    for key in keys:
        if key.name not in content["keys"]:
            raise InvalidArgumentError(f"load: the files have no key {key.name!r}")
        shape = content["keys"][key.name][0]
        saved = content["values"][key.name]
        if tuple(shape) != key.shape or saved.dtype != key.dtype:
            raise InvalidArgumentError(f"load: {describe(key.name, shape, saved.dtype)} does not fit {key.describe()}")
    if lacking := sorted(set(content["keys"]) - {it.name for it in keys}):
        raise InvalidArgumentError(f"load: the store has no key {', '.join(map(repr, lacking))}")
    mine = update.name if isinstance(update, Optimizer) else None
    if content.get("optimizer") != mine:
        raise InvalidArgumentError(f"load: the files are of {content.get('optimizer')}, and the store's is {mine}")


@contextlib.contextmanager
def _slower(update: Update, late: int) -> Iterator[None]:
    """The rate of an optimizer divided by 1 + `late`: W. Zhang, S. Gupta, X. Lian, J. Liu, Staleness-aware Async-SGD
    for Distributed Deep Learning, IJCAI 2016, section 2.2, there for ages from 1 on."""
    if not isinstance(update, Optimizer):
        yield
        return
    rate = update.numbers()["lr"]
    update.set_numbers({"lr": rate / (1 + late)})
    try:
        yield
    finally:
        update.set_numbers({"lr": rate})
