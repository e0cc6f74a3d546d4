"""Moves the bytes of an exchange over a process group of any backend, by requests from Python or in C++."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.exchange import AllGather, AllReduce, AllToAll, Exchange, Request, Section, States
from ringdp.compression.partition import owner_offset_of
from ringdp.job.backend import reaches_core
from ringdp.job.byte_collectives import all_gather_single

if TYPE_CHECKING:
    from ringdp import _C


class CodecSections:
    """A bucket's parameters of one of the core's codecs: C++ does what `exchange.owner` describes, over any backend.

    Over ring, where the gradients are float32, by its own all-reduce: segment by segment, while others are on the wire.
    """

    def __init__(self, sections: Sequence[Section], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.sections = sections
        self.by_ring: bool = dtype == torch.float32 and reaches_core(group)

    @staticmethod
    def serve(section: Section) -> bool:
        """Whether the core has the parameter's codec, for memory on its device."""
        return getattr(section.compressor, "native", None) is not None and section.device.type == "cpu"

    def start(
        self, bucket: Tensor, group: dist.ProcessGroup, states: States, loss_scale: float, divisor: float
    ) -> tuple[dist.Work, _C.FiniteReport]:
        """Begin to average the float32 `bucket`: returns the Work, and a report whose ``finite`` is known when that is
        done.

        Not `by_ring`, and over a backend that matches operations by their order, nothing else may use the group until
        then: the second of two operations is issued in a callback.
        """
        from ringdp import _C

        pairs = [
            states.write_residual(one.name, one.count, one.device) if one.feedback is not None else (None, None)
            for one in self.sections
        ]
        return _C.all_reduce_compressed(
            group,
            bucket,
            [section.begin for section in self.sections],
            [section.count for section in self.sections],
            [owner_offset_of(section.name) for section in self.sections],
            [current for current, _ in pairs],
            [following for _, following in pairs],
            self.sections[0].compressor.native,  # type: ignore[attr-defined]
            loss_scale,
            int(divisor),
            exchange=not self.by_ring,
        )

    def average(
        self, bucket: Tensor, group: dist.ProcessGroup, states: States, loss_scale: float, divisor: float
    ) -> _C.FiniteReport:
        """As `start`, of any floating dtype, and wait for it on this thread."""
        whole = bucket.float()  # not a copy of float32
        work, report = self.start(whole, group, states, loss_scale, divisor)
        work.wait()
        if whole is not bucket:
            for section in self.sections:
                there = slice(section.begin, section.begin + section.count)
                bucket[there] = whole[there]
        return report


@torch.no_grad()
def run_exchange(exchange: Exchange, group: dist.ProcessGroup) -> float:
    """Run the exchange to its end on this thread, which waits for each operation; seconds spent waiting.

    Nothing is sent but tensors of lengths that both sides know: no pickle.
    """
    answer, waited_s = None, 0.0
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration:
            return waited_s
        begin = time.perf_counter()
        answer = _perform(request, group)
        waited_s += time.perf_counter() - begin


def _perform(request: Request, group: dist.ProcessGroup) -> Any:
    if isinstance(request, AllReduce):
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in request.tensors if tensor.numel()]
        for work in works:
            work.wait()
        return None
    received: Tensor
    if isinstance(request, AllGather):
        received = request.send.new_empty(group.size(), request.send.numel())
        all_gather_single(received.view(-1), request.send, group=group)
        return received
    assert isinstance(request, AllToAll)
    received = request.send.new_empty(sum(request.receive_sizes))
    dist.all_to_all_single(received, request.send, request.receive_sizes, request.send_sizes, group=group)
    return received
