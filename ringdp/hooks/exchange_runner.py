"""Moves the bytes of an exchange over a process group of any backend."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.exchange import AllGather, AllReduce, AllToAll, Exchange, Request
from ringdp.job.byte_collectives import all_gather_single


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
