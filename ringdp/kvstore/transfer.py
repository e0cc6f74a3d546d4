"""The reduce-scatter of the values of a set of keys to their owners, and the all-gather back.

A large key is not copied: each rank's part of it is a chunk of an operation, and all operations of a call begin
together. Small keys, and the rests, are packed into one buffer, chunk after chunk, for one more operation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceOp, ReduceScatterOptions

from ringdp.kvstore.keys import Cut, Key

_DIRECT_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class _Packed:
    """The packed elements of a key: all of them, or its rest alone, where its parts are chunks of their own."""

    index: int
    cut: Cut
    rest_only: bool

    @property
    def skipped(self) -> int:
        """How many elements of a slice are not packed."""
        return self.cut.part if self.rest_only else 0

    def of(self, whole: Tensor, rank: int) -> list[Tensor]:
        """The rank's, as views."""
        views = self.cut.slices(whole, rank)
        return views[1:] if self.rest_only else views


class Transfer:
    """Of keys of one dtype and device. Used by one thread; its buffers serve one operation at a time.

    Args:
        keys: in the order that all ranks have.
        group: whose ranks own the slices; None: this rank owns everything.
        summed_by: without a group of owners, the group whose ranks' inputs are added up; None: this rank's alone.
    """

    def __init__(
        self, keys: Sequence[Key], group: dist.ProcessGroup | None, summed_by: dist.ProcessGroup | None = None
    ) -> None:
        self.keys = tuple(keys)
        self._group = group
        self._summed_by = summed_by
        self._rank = 0 if group is None else group.rank()
        ranks = 1 if group is None else group.size()
        alone = len(keys) == 1
        self._direct: list[int] = []
        self._packed: list[_Packed] = []
        for index, key in enumerate(keys):
            direct = key.cut.part > 0 and (key.numel * key.dtype.itemsize >= _DIRECT_BYTES or alone)
            if direct:
                self._direct.append(index)
            if not direct or key.cut.rest:
                self._packed.append(_Packed(index, key.cut, direct))
        self._used = [sum(one.cut.numel(rank) - one.skipped for one in self._packed) for rank in range(ranks)]
        self._chunk = max(self._used)
        like = keys[0]
        self._buffer = torch.zeros(self._chunk * ranks, dtype=like.dtype, device=like.device)
        self._mine = torch.zeros(self._chunk, dtype=like.dtype, device=like.device)
        self._chunks = [self._buffer[rank * self._chunk :][: self._chunk] for rank in range(ranks)]
        outlines = [torch.empty(key.numel, device="meta", dtype=torch.float32) for key in keys]
        self._all_chunks = [
            view
            for chunk, views in zip(self._chunks, self._views(outlines), strict=True)
            for view in _cut(chunk, [one.numel() for one in views])
        ]
        own = [one.cut.numel(self._rank) - one.skipped for one in self._packed]
        self._own_chunk = _cut(self._mine, [numel for numel in own if numel])

    def reduce_scatter(
        self, inputs: Sequence[Tensor], slices: Sequence[Tensor], average: bool, *, wait: bool = True
    ) -> list[dist.Work]:
        """Put the sum, or the average, of all ranks' `inputs` into this rank's `slices`, key by key.

        Args:
            inputs: flat and contiguous; read until the works are done.
            slices: this rank's, as `Cut.slice_of` has them.
            wait: False: `unpack` is to be called when the works are done.
        """
        if self._chunk:
            self._pack(inputs)
        if self._group is None:
            self._mine.copy_(self._buffer)
            if self._summed_by is not None and self._chunk:
                self._summed_by.allreduce([self._mine], reducing(average)).wait()
            self.unpack(slices)
            return []
        sources = self._parts_of_all(inputs)
        targets = self._own_parts(slices)
        if self._chunk:
            sources.append(self._buffer)
            targets.append(self._mine)
        if not targets:  # keys without elements
            return []
        works = [self._group.reduce_scatter_tensor_coalesced(targets, sources, _scattering(average, wait))]
        if wait:
            works[0].wait()
            self.unpack(slices)
        return works

    def unpack(self, slices: Sequence[Tensor]) -> None:
        """The end of a reduce-scatter: copy packed elements into the slices."""
        if not self._own_chunk:
            return
        torch._foreach_copy_([view for view in self._own_views(slices) if view.numel()], self._own_chunk)

    def all_gather(self, slices: Sequence[Tensor], outputs: Sequence[Tensor], *, wait: bool = True) -> list[dist.Work]:
        """Put all ranks' `slices` together in `outputs`, key by key.

        Args:
            slices: this rank's.
            outputs: flat and contiguous.
            wait: False: `spread` is to be called when the works are done.
        """
        if self._chunk:
            torch.cat(self._own_views(slices), out=self._mine[: self._used[self._rank]])
        if self._group is None:
            self._buffer.copy_(self._mine)
            self.spread(outputs)
            return []
        targets = self._parts_of_all(outputs)
        sources = self._own_parts(slices)
        if self._chunk:
            targets.append(self._buffer)
            sources.append(self._mine)
        if not targets:
            return []
        works = [self._group.allgather_into_tensor_coalesced(targets, sources, _gathering(wait))]
        if wait:
            works[0].wait()
            self.spread(outputs)
        return works

    def spread(self, outputs: Sequence[Tensor]) -> None:
        """The end of an all-gather: copy packed elements into the outputs."""
        if self._chunk:
            torch._foreach_copy_([view for views in self._views(outputs) for view in views], self._all_chunks)

    def _parts_of_all(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Of the keys that go as they are, all ranks' parts; without a view where nothing is left over."""
        cuts = ((i, self.keys[i].cut) for i in self._direct)
        return [wholes[i][: cut.part * cut.ranks] if cut.rest else wholes[i] for i, cut in cuts]

    def _own_parts(self, slices: Sequence[Tensor]) -> list[Tensor]:
        cuts = ((i, self.keys[i].cut) for i in self._direct)
        return [slices[i][: cut.part] if cut.rest else slices[i] for i, cut in cuts]

    def _pack(self, inputs: Sequence[Tensor]) -> None:
        for chunk, views in zip(self._chunks, self._views(inputs), strict=True):
            if views:
                torch.cat(views, out=chunk[: sum(view.numel() for view in views)])

    def _views(self, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """By rank, the elements that are packed, of flat tensors of all keys."""
        return [
            [view for packed in self._packed for view in packed.of(wholes[packed.index], rank)]
            for rank in range(len(self._used))
        ]

    def _own_views(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """This rank's elements that are packed, of its slices of all keys."""
        return [slices[packed.index][packed.skipped :] for packed in self._packed]


@functools.cache
def _scattering(average: bool, wait: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = ReduceOp(ReduceOp.AVG if average else ReduceOp.SUM)
    options.asyncOp = not wait
    return options


@functools.cache
def reducing(average: bool) -> AllreduceOptions:
    """For an all-reduce that is waited for."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.AVG if average else ReduceOp.SUM)
    options.asyncOp = False
    return options


@functools.cache
def _gathering(wait: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = not wait
    return options


def _cut(chunk: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """Views of so many elements each, one after the other."""
    return list(chunk[: sum(numels)].split(list(numels))) if numels else []
