"""The keys of a store and this rank's slices of their values: sums pushes, runs updates, gathers values.

In an elastic job each rank has all values and the whole state of the optimizer, so that none is lost with a rank: it
adds up the pushes as a unit, and all ranks make the same updates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.errors import InvalidArgumentError
from ringdp.job.byte_collectives import device_for
from ringdp.job.elastic import is_elastic
from ringdp.kvstore.agreement import Operations, compare_settings, describe_keys, describe_names
from ringdp.kvstore.compressed import CompressedPushes, means_to_slices
from ringdp.kvstore.keys import Key, Owners, check, describe, describe_type, flat, summed, unknown
from ringdp.kvstore.small_sum import small_sum
from ringdp.kvstore.transfer import Transfer
from ringdp.kvstore.updates import Assign, Optimizer, Update

_SMALL_BYTES = 64 << 10
_PLANS = 32  # sets of keys whose plans and buffers are kept


@dataclasses.dataclass(frozen=True)
class Lot:
    """Keys of one dtype and device that move together.

    Attributes:
        label: the keys, for the names of operations.
    """

    names: tuple[str, ...]
    transfer: Transfer
    label: str


class Table:
    """Of one store. Used by one thread at a time, and in the same order of calls on all ranks.

    Args:
        group: whose ranks own the slices; None: this rank owns everything.
        average: pushes are averaged over the ranks, not added.
        description: the description of the store, which must be equal on all ranks.
        owners: the ranks of the group that own slices, on the CPU, in their order: of an asynchronous store. None: all,
            on the devices of the keys, or each by itself in an elastic job.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        average: bool,
        description: str,
        owners: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.replicated = owners is None and group is not None and is_elastic(group)
        self._owning = None if self.replicated else group  # the ranks that own slices; None: this one owns everything
        self._on_cpu = owners is not None
        if owners is None:
            owners = range(1 if self._owning is None else self._owning.size())
        self.rank = _place(0 if self._owning is None else self._owning.rank(), owners)
        self.ranks = len(owners)
        self.average = average
        self.update: Update = Assign()
        self.compression: CompressedPushes | None = None
        self.keys: dict[str, Key] = {}
        self.slices: dict[str, Tensor] = {}
        self.operations = Operations(group)
        self._description = description
        self._owners = Owners(self.ranks)
        self._new: dict[str, Tensor] = {}
        self._stale = True  # the ranks have not compared since something changed
        self._plans: dict[tuple[str, ...], list[Lot]] = {}
        self._extra: dict[str, str] = {}
        self._small_sums: dict[str, Any] = {}

    # Keys and settings.

    def add(self, name: str, value: Tensor) -> None:
        """A new key. The ranks compare it, and it becomes rank 0's, when the table is used next.

        Raises:
            InvalidArgumentError: it is there already, or cannot be averaged.
        """
        if name in self.keys or name in self._new:
            raise InvalidArgumentError(f"init: key {name!r} is in the store already")
        if self.average and not (value.is_floating_point() or value.is_complex()):
            raise InvalidArgumentError(
                f"init: key {describe(name, value.shape, value.dtype)} cannot be averaged: create the store with"
                ' reduce="sum"'
            )
        self._new[name] = value.clone(memory_format=torch.contiguous_format)
        self._stale = True

    def shape(self, what: str, name: str) -> tuple[int, ...]:
        """Raises InvalidArgumentError where the key is not there."""
        return tuple(self._new[name].shape) if name in self._new else self.key(what, name).shape

    def empty(self, name: str) -> Tensor:
        """Memory for a whole value."""
        like = self._new.get(name)
        if like is not None:
            return torch.empty_like(like)
        key = self.keys[name]
        return torch.empty(key.shape, dtype=key.dtype, device=key.device)

    def set_update(self, update: Update) -> None:
        """Set the update that owners run from now on; the ranks compare it."""
        self.update = update
        self._stale = True

    def compress(self, compressor: Any) -> None:
        """Send pushes as codes from now on; None: exactly. The ranks compare it."""
        self.compression = None
        if compressor is not None and self.group is not None and self.group.size() > 1:
            self.compression = CompressedPushes(compressor, self.group)
        self._stale = True

    @property
    def settled(self) -> bool:
        """The ranks have compared everything."""
        return not self._stale

    def compare_later(self, name: str, text: str) -> None:
        """Have the ranks compare this text before the table is used next."""
        self._extra[name] = text
        self._stale = True

    def knows(self, name: str) -> bool:
        """Whether this rank has made the key."""
        return name in self.keys or name in self._new

    def key(self, what: str, name: str) -> Key:
        """Raises InvalidArgumentError where the key is not there; after `settle`."""
        if name not in self.keys:
            raise unknown(what, name, dict.fromkeys([*self.keys, *self._new]))
        return self.keys[name]

    def check(self, what: str, name: str, tensors: Sequence[Tensor]) -> None:
        """Raise InvalidArgumentError where the key is not there, or a tensor does not fit it."""
        if name in self._new:
            new = self._new[name]
            if any(it.shape != new.shape or it.dtype != new.dtype for it in tensors):
                raise InvalidArgumentError(
                    f"{what}: key {describe(name, new.shape, new.dtype)} cannot take "
                    f"{describe(name, tensors[0].shape, tensors[0].dtype)}"
                )
            return
        check(what, self.key(what, name), tensors)

    def check_all(self, what: str, values: Mapping[str, Sequence[Tensor]]) -> None:
        """As `check`, of some keys."""
        for name, tensors in values.items():
            key, first = self.keys.get(name), tensors[0]
            if key is None or len(tensors) > 1 or first.dtype is not key.dtype or first.shape != key.shape:
                self.check(what, name, tensors)

    def settle(self) -> None:
        """Compare keys and settings with the other ranks, if they changed, and take rank 0's values of new keys.

        Raises:
            MismatchError: the ranks differ; names the key or setting and what two ranks have.
        """
        if not self._stale:
            return
        compare_settings(self._lines, lambda lines: lines, self.group, doing="use its key-value store")
        if isinstance(self.update, Optimizer):
            for name, value in (self._new | self.slices).items():
                if not (value.is_floating_point() or value.is_complex()):
                    raise InvalidArgumentError(f"{self.update.name} cannot update key {name!r} of {value.dtype}")
        self._stale = False
        self._small_sums.clear()
        if not self._new:
            return
        new = {name: self._new[name] for name in sorted(self._new)}
        self._new = {}
        by_type: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, value in new.items():
            cut = self._owners.cut(value.numel(), value.dtype.itemsize)
            device = value.device if self.group is None else device_for(self.group, value.device)
            if self._on_cpu:
                device = torch.device("cpu")
            self.keys[name] = Key(name, tuple(value.shape), value.dtype, device, cut)
            by_type.setdefault((value.dtype, device), []).append(name)
        for (_, device), names in by_type.items():
            together = self._of_first_rank(names, torch.cat([flat(new[name]).to(device) for name in names]))
            for name, value in zip(names, together.split([new[name].numel() for name in names]), strict=True):
                self.slices[name] = (
                    value.new_empty(0) if self.rank < 0 else self.keys[name].cut.slice_of(value, self.rank)
                )

    def _of_first_rank(self, names: Sequence[str], mine: Tensor) -> Tensor:
        group = self.group
        if group is None or not mine.numel():
            return mine

        def broadcast() -> Tensor:
            values = mine.clone()
            dist.broadcast(values, group=group, group_src=0)
            return values

        return self.operations.run(f"values of new keys {describe_names(names)}", broadcast)

    def deal_again(self, owners: Sequence[int], rank: int) -> None:
        """Cut all keys for other owners: the slices begin without values, and the update without a state."""
        self.rank = _place(rank, owners)
        self.ranks = len(owners)
        self._owners = Owners(self.ranks)
        self._plans.clear()
        self.update = self.update.renewed() if isinstance(self.update, Optimizer) else self.update
        for name, key in self.keys.items():
            cut = self._owners.cut(key.numel, key.dtype.itemsize)
            self.keys[name] = dataclasses.replace(key, cut=cut)
            numel = 0 if self.rank < 0 else cut.numel(self.rank)
            self.slices[name] = torch.empty(numel, dtype=key.dtype, device=key.device)

    # Operations of all ranks.

    @property
    def overlaps(self) -> bool:
        """Whether sums may be on their way while backward goes on."""
        return self.compression is None and not self.replicated

    def push(self, inputs: Mapping[str, Sequence[Tensor]], scale: float = 1.0) -> None:
        """Add up, or average, the ranks' pushes, and let the owners update their slices.

        Args:
            inputs: by name, in the order that all ranks have.
            scale: the sums are multiplied by this.
        """
        sums: dict[str, Tensor] = {}
        if self.compression is not None:
            sums |= self._push_codes(inputs, scale)
        exact = tuple(name for name in inputs if name not in sums) if sums else tuple(inputs)
        for lot in self.lots(exact):
            flats = [summed(inputs[name], self.keys[name].device) for name in lot.names]
            if self.update.assigns and scale == 1.0:
                targets = [self.slices[name] for name in lot.names]
            else:
                targets = [torch.empty_like(self.slices[name]) for name in lot.names]
            self.operations.run(
                f"push {lot.label}{self.purpose(scale)}",
                functools.partial(lot.transfer.reduce_scatter, flats, targets, self.average),
            )
            if scale != 1.0:
                torch._foreach_mul_(targets, scale)
            sums |= zip(lot.names, targets, strict=True)
        self.apply(sums)

    def apply(self, sums: Mapping[str, Tensor]) -> None:
        """Let this rank update its slices of these keys; its error is raised on the other ranks too, at the next
        operation."""
        try:
            self.update.apply(self.slices, sums)
        except Exception as error:
            self.operations.refuse(error)
            raise

    def pushpull(
        self, inputs: Mapping[str, Sequence[Tensor]], outputs: Mapping[str, Sequence[Tensor]], scale: float
    ) -> None:
        """`push`, then `pull` of the same keys."""
        if len(inputs) == 1 and self.update.assigns and scale == 1.0 and self.overlaps:
            (name,) = inputs
            key = self.keys[name]
            if self.group is not None and 0 < key.numel * key.dtype.itemsize <= _SMALL_BYTES:
                self._sum_small(key, self.group, inputs[name], outputs[name])
                return
        self.push(inputs, scale)
        self.pull(outputs)

    def small_sum(self, name: str) -> Any:
        """For a key whose last pushpull was a small one, while nothing is to be compared: see `small_sum.small_sum`."""
        return None if self._stale else self._small_sums.get(name)

    def pull(self, outputs: Mapping[str, Sequence[Tensor]]) -> None:
        """Copy the values into tensors of this rank, by name in the order that all ranks have."""
        for lot in self.lots(tuple(outputs)):
            targets = [self.target(name, outputs[name]) for name in lot.names]
            slices = [self.slices[name] for name in lot.names]
            self.operations.run(f"pull {lot.label}", functools.partial(lot.transfer.all_gather, slices, targets))
            for name, target in zip(lot.names, targets, strict=True):
                hand_out(target, outputs[name])

    def gather(self, what: str, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, each gathered from the ranks' slices, of one dtype: for saved states. On all ranks."""
        keys = [dataclasses.replace(self.keys[name], dtype=piece.dtype) for name, piece in pieces.items()]
        outputs = {key.name: torch.empty(key.numel, dtype=key.dtype, device=key.device) for key in keys}
        transfer = Transfer(keys, self._owning)
        self.operations.run(
            f"{what} {describe_names(list(pieces))}",
            lambda: transfer.all_gather(list(pieces.values()), list(outputs.values())),
        )
        return {name: it.view(self.keys[name].shape) for name, it in outputs.items()}

    def purpose(self, scale: float) -> str:
        """The owners' treatment of a push, for its name."""
        times = f", times {scale}" if scale != 1.0 else ""
        return f"{times}, by {self.update.describe()}"

    def lots(self, names: tuple[str, ...]) -> list[Lot]:
        """The plan by which these keys move; the plans of the sets used last are kept."""
        if (lots := self._plans.get(names)) is None:
            if len(self._plans) >= _PLANS:
                self._plans.pop(next(iter(self._plans)))
            by_type: dict[Any, list[str]] = {}
            for name in names:
                by_type.setdefault((self.keys[name].dtype, self.keys[name].device), []).append(name)
            lots = self._plans[names] = [self.lot(some) for some in by_type.values()]
        return lots

    def lot(self, names: Sequence[str]) -> Lot:
        """Keys of one dtype and device."""
        keys = [self.keys[name] for name in names]
        transfer = Transfer(keys, self._owning, summed_by=self.group if self.replicated else None)
        return Lot(tuple(names), transfer, describe_keys(keys))

    def target(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Flat memory for the value: a tensor's own where it is contiguous and there."""
        key = self.keys[name]
        first = tensors[0]
        if first.is_contiguous() and first.device == key.device:
            return flat(first)
        return torch.empty(key.numel, dtype=key.dtype, device=key.device)

    # Private methods.

    def _sum_small(
        self, key: Key, group: dist.ProcessGroup, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """A small sum at once: one message each way in place of two."""
        if key.name not in self._small_sums:
            operation = f"pushpull {self.lot([key.name]).label}{self.purpose(1.0)}"
            self._small_sums[key.name] = small_sum(
                key, self.slices[key.name], group, self.average, self.operations, operation
            )
        target = torch.empty(key.shape, dtype=key.dtype, device=key.device)
        target.view(-1).copy_(summed(inputs, key.device))
        self._small_sums[key.name](target, None)
        hand_out(target, outputs)

    def _push_codes(self, inputs: Mapping[str, Sequence[Tensor]], scale: float) -> dict[str, Tensor]:
        assert self.compression is not None
        names = [name for name in inputs if self.compression.serves(self.keys[name])]
        if not names:
            return {}
        keys = [self.keys[name] for name in names]
        flats = [summed(inputs[name], key.device) for name, key in zip(names, keys, strict=True)]
        means = self.operations.run(
            f"push of codes {describe_keys(keys)}{self.purpose(scale)}",
            functools.partial(self.compression.average, keys, flats),
        )
        self.compression.commit()
        return means_to_slices(keys, means, self.rank, scale if self.average else scale * self.compression.ranks)

    def _lines(self) -> list[str]:
        lines = [f"the store: {self._description}", f"the update: {self.update.describe()}"]
        lines.append(f"compression: {'none' if self.compression is None else self.compression.describe()}")
        lines += [f"{name}: {words}" for name, words in sorted(self._extra.items())]
        for key in sorted(self.keys.values(), key=lambda it: it.name):
            lines.append(f"key {key.name!r}: {describe_type(key.shape, key.dtype)}")
        for name, value in sorted(self._new.items()):
            lines.append(f"key {name!r}: {describe_type(value.shape, value.dtype)}, new")
        return lines


def _place(rank: int, owners: Sequence[int]) -> int:
    """Of the rank among the owners; -1: it is none of them."""
    return list(owners).index(rank) if rank in owners else -1


def hand_out(value: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat value into all tensors of its key but the one whose memory it is."""
    for tensor in tensors:
        if tensor.data_ptr() != value.data_ptr():
            tensor.copy_(value.view(tensor.shape))
