"""``aggregate="merge"``: as ``owner``, but payloads are added up as they are, without decoding them to dense elements.

Rank r encodes all parts, its own too, and sends each to its owner. The owner merges the payloads in rank order into one
of their mean, which goes to everybody. What that payload cannot hold is owed by the owner's next gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import open_messages, raise_together
from ringdp.compression.exchange.finite import spoil, what_is_not_finite
from ringdp.compression.exchange.outgoing import Outgoing, Sizes, message_bytes
from ringdp.compression.exchange.owner import Elements
from ringdp.compression.exchange.packing import front, read
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, AllToAll, Exchange
from ringdp.compression.exchange.section import Coder, Section
from ringdp.compression.protocol import Payload


def merge_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`."""
    me, ranks = coder.rank, plan.ranks
    others = [r for r in range(ranks) if r != me]
    flags = what_is_not_finite(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    for part in range(ranks):
        outgoing.add(part, Elements(bucket, part, flags))
    own = outgoing.take(me)
    sizes = yield from outgoing.sizes_of_all([[p for p in range(ranks) if p != r] for r in range(ranks)])
    to = [outgoing.size(part) if part != me else 0 for part in range(ranks)]
    come = [message_bytes(plan, sizes[r, me]) if r != me else 0 for r in range(ranks)]
    send = torch.empty(sum(to), dtype=torch.uint8, device=plan.device)
    for part, message in zip(others, send.split([to[part] for part in others]), strict=True):
        outgoing.write(part, message, flags)
    received = yield AllToAll(send, to, come)
    messages = dict(zip(others, received.split([come[r] for r in others]), strict=True))
    theirs, failed = open_messages(plan, messages, me)
    if failed or outgoing.error is not None:
        yield from raise_together(outgoing.error, plan, me)
    flags = [mine | other for mine, other in zip(flags, theirs, strict=True)]

    answer = Outgoing(plan, coder, "owner")
    answer.put(me, _Merged(plan, coder, float(divisor), own, messages, sizes))
    sizes = yield from answer.sizes_of_all([[r] for r in range(ranks)])
    longest = max(message_bytes(plan, sizes[r, r]) for r in range(ranks))
    message = torch.empty(longest, dtype=torch.uint8, device=plan.device)
    answer.write(me, message, flags)
    results = yield AllGather(message)
    flags, failed = open_messages(plan, dict(enumerate(results)), me)
    if failed:
        yield from raise_together(answer.error, plan, me)
    for part in range(ranks):
        at = front(len(plan.sections))
        for section, forms in zip(plan.sections, sizes[part, part], strict=True):
            if section.numel(part):
                payload, at = read(results[part], at, forms)
                mean = coder.decode(section, payload, "owner", part)
                section.of(bucket, part).copy_(coder.result(section, mean, part))
    spoil(plan, bucket, flags)


class _Merged:
    """The payloads of the means of this rank's parts, section by section in order."""

    def __init__(
        self,
        plan: Plan,
        coder: Coder,
        divisor: float,
        own: list[Payload],
        messages: dict[int, Tensor],
        sizes: Sizes,
    ) -> None:
        self._plan, self._coder, self._divisor = plan, coder, divisor
        self._own, self._messages, self._sizes = own, messages, sizes
        self._at = dict.fromkeys(messages, front(len(plan.sections)))

    def __call__(self, index: int, section: Section) -> Payload:
        me = self._coder.rank
        payloads: list[Any] = []
        for r in range(self._plan.ranks):
            if r == me:
                payloads.append(self._own[index])
            else:
                payload, self._at[r] = read(self._messages[r], self._at[r], self._sizes[r, me][index])
                payloads.append(payload)
        return self._coder.merge(section, payloads, self._divisor, me)
