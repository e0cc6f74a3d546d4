"""The samples of each global batch: a function of length, seed and epoch, never of ranks or speeds."""

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
        return self.length // self.size if self.drop_last else -(-self.length // self.size)

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
        return order[position * self.size : min((position + 1) * self.size, self.length)].tolist()
