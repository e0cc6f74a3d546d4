"""``aggregate="gather"``: every rank decodes every rank's payload of the whole parameter, and adds them in rank order.

One encoding, whose errors average out over the ranks; the bytes that arrive grow with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import act_on, open_messages
from ringdp.compression.exchange.finite import masked, non_finite_flags, write_nan
from ringdp.compression.exchange.outgoing import Outgoing, message_bytes
from ringdp.compression.exchange.owner import in_order
from ringdp.compression.exchange.packing import front, read
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, Exchange
from ringdp.compression.exchange.section import Coder


def gather_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`; a rank's own gradient, too, counts as its payload is decoded."""
    flags = non_finite_flags(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    outgoing.add(0, lambda index, section: masked(section.of(bucket, 0), flags[index]))
    sizes = yield from outgoing.sizes_of_all([[0]] * plan.ranks)
    longest = max(message_bytes(plan, sizes[r, 0]) for r in range(plan.ranks))
    message = torch.empty(longest, dtype=torch.uint8, device=plan.device)
    outgoing.write(0, message, flags)
    messages = yield AllGather(message)
    flags, status = open_messages(plan, dict(enumerate(messages)), coder.rank)
    yield from act_on(status, outgoing.error, plan, coder)
    at = [front(len(plan.sections))] * plan.ranks
    for index, section in enumerate(plan.sections):
        terms: list[Tensor] = []
        for r in range(plan.ranks if section.count else 0):
            payload, at[r] = read(messages[r], at[r], sizes[r, 0][index])
            terms.append(coder.decode(section, payload, "rank", 0))
        if terms:
            section.of(bucket, 0).copy_(coder.result(section, in_order(terms).div_(divisor), 0))
    write_nan(plan, bucket, flags)
