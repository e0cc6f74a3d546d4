"""``aggregate="gather"`` and ``"sum"``: each rank encodes its whole gradient once, and every rank decodes what it gets.

With "gather" that is every rank's payload: their errors average out over the ranks, and the bytes that arrive grow with
the number of ranks. With "sum", for compressors that are linear, payload tensors are added up on their way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import act_on, marks, open_messages, read_marks
from ringdp.compression.exchange.finite import non_finite_flags, write_nan
from ringdp.compression.exchange.outgoing import Outgoing, message_bytes
from ringdp.compression.exchange.owner import Elements, Payloads
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, AllReduce, Exchange
from ringdp.compression.exchange.section import Coder


def gather_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`; a rank's own gradient, too, counts as its payload is decoded."""
    flags = non_finite_flags(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    outgoing.add(0, Elements(bucket, 0, flags))
    sizes = yield from outgoing.sizes_of_all([[0]] * plan.ranks)
    longest = max(message_bytes(plan, sizes[r, 0]) for r in range(plan.ranks))
    message = torch.empty(longest, dtype=torch.uint8, device=plan.device)
    outgoing.write(0, message, flags)
    messages = dict(enumerate((yield AllGather(message))))
    flags, status = open_messages(plan, messages, coder.rank)
    yield from act_on(status, outgoing.error, plan, coder)
    payloads = Payloads(plan, messages, sizes, 0)
    for index, section in enumerate(plan.sections):
        if section.count:
            place = section.of(bucket, 0)
            # A section's `result` may keep what it gets.
            total = place if section.result is None else torch.empty_like(place)
            mean = coder.sum(section, list(payloads.of(index).values()), total).div_(divisor)
            gradient = coder.result(section, mean, 0)
            if gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
    write_nan(plan, bucket, flags)


def sum_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`; tensors of one dtype are added as one."""
    flags = non_finite_flags(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    outgoing.add(0, Elements(bucket, 0, flags))
    payloads = outgoing.take_or_zeros(0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (tensor for payload in payloads for tensor in payload):
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    flat = {dtype: torch.cat(several) for dtype, several in by_dtype.items()}
    mine = marks(plan, outgoing.status, flags)
    yield AllReduce([*flat.values(), mine])
    status, flags = read_marks(mine)
    yield from act_on(status, outgoing.error, plan, coder)
    rest = {dtype: iter(it.split([t.numel() for t in by_dtype[dtype]])) for dtype, it in flat.items()}
    for section, payload in zip(plan.sections, payloads, strict=True):
        summed = tuple(next(rest[tensor.dtype]).view(tensor.shape) for tensor in payload)
        if section.count:
            if coder.tally is not None:
                coder.tally.joined(section, summed)
            mean = torch.div(coder.decode(section, summed, "rank", 0), divisor, out=section.of(bucket, 0))
            gradient = coder.result(section, mean, 0)
            if gradient is not mean:
                mean.copy_(gradient)
    write_nan(plan, bucket, flags)
