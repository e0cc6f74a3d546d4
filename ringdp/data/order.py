"""The samples of each global batch: a function of length, seed and epoch, never of ranks or speeds; and of what lost
ranks have left over (elastic jobs)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_SEED_BYTES = 8


@dataclass(frozen=True)
class GlobalBatches:
    """How the samples of an epoch are cut into global batches.

    Attributes:
        length: samples of the dataset.
        size: samples of a global batch.
        seed: of the order.
        shuffle: False: the order is that of the dataset in every epoch.
        drop_last: whether samples that do not fill a batch at the end of an epoch are left out.
    """

    length: int
    size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def count(self) -> int:
        """Batches of an epoch."""
        return self.count_of(self.length)

    def count_of(self, samples: int) -> int:
        """Batches of so many samples."""
        return samples // self.size if self.drop_last else -(-samples // self.size)

    @property
    def last_size(self) -> int:
        """Samples of the last batch of an epoch; 0 where there is no batch."""
        if self.count == 0:
            return 0
        return self.size if self.drop_last else self.length - (self.count - 1) * self.size

    def order(self, epoch: int) -> Tensor:
        """int64 ``[length]``: the samples in the order of this epoch."""
        if not self.shuffle:
            return torch.arange(self.length, dtype=torch.int64, device="cpu")
        digest = hashlib.sha256(f"ringdp order {self.seed} {epoch}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:_SEED_BYTES], "little") >> 1)
        return torch.randperm(self.length, generator=generator, dtype=torch.int64, device="cpu")

    def batch(self, order: Tensor, position: int) -> list[int]:
        """The samples of batch `position` of the epoch with this order."""
        return order[position * self.size : (position + 1) * self.size].tolist()


class Epochs:
    """The batches of all epochs, numbered from 0 over all of them.

    Invariant: a batch that some rank has drawn keeps its samples. What a lost rank has left over of an epoch comes
    behind the other samples of that epoch.
    """

    def __init__(self, batches: GlobalBatches) -> None:
        self._batches = batches
        self._left_over: dict[int, list[int]] = {}  # by epoch
        self._orders: dict[int, Tensor] = {}  # of the epoch that is drawn

    def count(self, epoch: int) -> int:
        """Batches of this epoch."""
        return self._batches.count_of(self._batches.length + len(self._left_over.get(epoch, ())))

    def first(self, epoch: int) -> int:
        """The number of its first batch."""
        usual = self._batches.count
        return epoch * usual + sum(self.count(one) - usual for one in self._left_over if one < epoch)

    def at(self, index: int) -> tuple[int, int]:
        """The epoch of batch `index`, and its position there."""
        epoch = index // self._batches.count
        while self.first(epoch) > index:
            epoch -= 1
        return epoch, index - self.first(epoch)

    def batch(self, index: int) -> list[int]:
        """The samples of batch `index`."""
        epoch, position = self.at(index)
        if epoch not in self._orders:
            more = torch.tensor(self._left_over.get(epoch, []), dtype=torch.int64, device="cpu")
            self._orders = {epoch: torch.cat([self._batches.order(epoch), more])}
        return self._batches.batch(self._orders[epoch], position)

    def left_over(self, epoch: int) -> list[int]:
        """The samples that come behind the others of this epoch."""
        return self._left_over.get(epoch, [])

    def leave_over(self, epoch: int, samples: list[int]) -> None:
        """Some batches of this epoch are not drawn yet."""
        if samples:
            self._left_over[epoch] = [*self.left_over(epoch), *samples]
            self._orders.pop(epoch, None)

    def begin(self, epoch: int, left_over: list[int]) -> None:
        """It is drawn from its beginning, or from where a state was saved in which this was left over of it."""
        self._left_over = {one: samples for one, samples in self._left_over.items() if one < epoch}
        self._orders.clear()
        self.leave_over(epoch, left_over)
