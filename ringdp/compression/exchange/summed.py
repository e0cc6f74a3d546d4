"""``aggregate="sum"``: payload tensors are added over the ranks and decoded once, for compressors that are linear."""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import FAILED, LOADED, act_on, marks, read_marks
from ringdp.compression.exchange.finite import masked, non_finite_flags, write_nan
from ringdp.compression.exchange.packing import check_promise
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllReduce, Exchange
from ringdp.compression.exchange.section import Coder
from ringdp.compression.protocol import Payload


def sum_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`; tensors of one dtype are added as one."""
    flags = non_finite_flags(plan, bucket)
    promised = plan.forms(0, "rank")
    payloads: list[Payload] = []
    error: BaseException | None = None
    try:
        for index, section in enumerate(plan.sections):
            payload: Payload = ()
            if section.count:
                payload = coder.encode(section, masked(section.of(bucket, 0), flags[index]), "rank", 0)
                check_promise(section, promised[index], payload, section.count)
            payloads.append(payload)
    except BaseException as caught:  # sent to all ranks, which then raise together
        error = caught
        payloads = [tuple(torch.zeros(f.shape, dtype=f.dtype, device=plan.device) for f in it) for it in promised]
    tensors = [tensor for payload in payloads for tensor in payload]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    flat = {dtype: torch.cat(several) for dtype, several in by_dtype.items()}
    mine = marks(plan, FAILED * (error is not None) | LOADED * coder.loaded, flags)
    yield AllReduce([*flat.values(), mine])
    status, flags = read_marks(mine)
    yield from act_on(status, error, plan, coder)
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
