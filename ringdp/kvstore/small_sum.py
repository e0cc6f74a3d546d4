"""A pushpull of one small key without an optimizer: an all-reduce with little Python around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.kvstore.agreement import Operations
from ringdp.kvstore.keys import Key
from ringdp.kvstore.transfer import reducing


def small_sum(
    key: Key, value: Tensor, group: dist.ProcessGroup, average: bool, operations: Operations, operation: str
) -> Any:
    """Callable as `SmallSum`; where ring moves the key's tensors it is the extension's.

    Args:
        value: this rank's slice, which is kept up to date.
        operation: the name of the operation, which the ranks compare.
    """
    if not operations.by_frames or key.device.type != "cpu":
        return SmallSum(key, value, group, average, operations, operation)
    from ringdp import _C

    return _C.SmallSum(
        group=group,
        shape=list(key.shape),
        slice=value,
        parts=_parts(key, group.rank()),
        average=average,
        name=operation,
    )


class SmallSum:
    """Of one key, as long as the ranks' settings stay as they are. Used by one thread, on all ranks alike."""

    def __init__(
        self, key: Key, value: Tensor, group: dist.ProcessGroup, average: bool, operations: Operations, operation: str
    ) -> None:
        self._shape, self._dtype, self._device = torch.Size(key.shape), key.dtype, key.device
        self._group, self._operation = group, operation
        self._operations, self._options = operations, reducing(average)
        self._own = [  # views of the slice, and where they are in the whole
            (value[begin : begin + count], at, count) for begin, at, count in _parts(key, group.rank())
        ]

    def __call__(self, value: Any, out: Any) -> bool:
        """Put the sum of all ranks' values into `out`, or into `value`; False where a tensor needs preparation: then
        nothing was done."""
        if not self._takes(value) or not (out is None or self._takes(out)):
            return False
        if out is None:
            out = value
        if out is not value:
            out.copy_(value)
        with self._operations.named(self._operation):
            self._group.allreduce([out], self._options).wait()
        if self._own:
            whole = out.view(-1)
            for view, at, count in self._own:
                view.copy_(whole.narrow(0, at, count))
        return True

    def _takes(self, tensor: Any) -> bool:
        """Whether it is a plain tensor of the key's, contiguous and where the key is."""
        return (
            type(tensor) is Tensor
            and tensor.dtype is self._dtype
            and tensor.shape == self._shape
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and tensor.device == self._device
        )


def _parts(key: Key, rank: int) -> list[tuple[int, int, int]]:
    """The rank's elements: where in its slice, where in the whole, how many."""
    part, rest, ranks = key.cut.part, key.cut.rest, key.cut.ranks
    out = [(0, rank * part, part)] if part else []
    if rest and rank == key.cut.owner:
        out.append((part, ranks * part, rest))
    return out
