"""A pushpull of one small key without an optimizer: an all-reduce, with as little Python around it as can be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.kvstore.agreement import Operations
from ringdp.kvstore.keys import Key
from ringdp.kvstore.transfer import reducing


class SmallSum:
    """Of one key, as long as the ranks' settings stay as they are. Used by one thread, on all ranks alike.

    Args:
        value: this rank's slice, which is kept up to date.
        words: the name of the operation, which the ranks compare.
    """

    def __init__(
        self, key: Key, value: Tensor, group: dist.ProcessGroup, average: bool, operations: Operations, words: str
    ) -> None:
        self._shape, self._dtype, self._device = torch.Size(key.shape), key.dtype, key.device
        self._value, self._group, self._words = value, group, words
        self._operations, self._options = operations, reducing(average)
        part, rest, ranks, rank = key.cut.part, key.cut.rest, key.cut.ranks, group.rank()
        own = [(rank * part, part)] if part else []
        if rest and rank == key.cut.owner:
            own.append((ranks * part, rest))
        begin = 0
        self._own: list[tuple[Tensor, int, int]] = []  # views of the slice, and where they are in the whole
        for at, count in own:
            self._own.append((value[begin : begin + count], at, count))
            begin += count

    def takes(self, tensor: Any) -> bool:
        """Whether the tensor needs no preparation: a plain one of the key's, contiguous and where the key is."""
        return (
            type(tensor) is Tensor
            and tensor.dtype is self._dtype
            and tensor.shape == self._shape
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and tensor.device == self._device
        )

    def run(self, value: Tensor, out: Tensor) -> None:
        """The sum of all ranks' values, into `out`; both as `takes` says."""
        if out is not value:
            out.copy_(value)
        with self._operations.named(self._words):
            self._group.allreduce([out], self._options).wait()
        if self._own:
            whole = out if out.dim() == 1 else out.view(-1)
            for view, at, count in self._own:
                view.copy_(whole.narrow(0, at, count))
