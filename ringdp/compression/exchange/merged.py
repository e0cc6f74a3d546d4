"""``aggregate="merge"``: as ``owner``, but payloads are added up as they are, without decoding them to dense elements.

Rank r encodes all parts, its own too, and sends each to its owner. The owner merges the payloads in rank order into one
of their mean, which goes to all ranks. The error of that payload is the owner's residual.
"""

from __future__ import annotations

from torch import Tensor

from ringdp.compression.exchange.finite import non_finite_flags
from ringdp.compression.exchange.outgoing import Outgoing, Sizes
from ringdp.compression.exchange.owner import Elements, from_owners, to_owners
from ringdp.compression.exchange.packing import front, read
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import Exchange
from ringdp.compression.exchange.section import Coder, Section
from ringdp.compression.protocol import Payload


def merge_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`."""
    me = coder.rank
    flags = non_finite_flags(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    for part in range(plan.ranks):
        outgoing.add(part, Elements(bucket, part, flags))
    own = outgoing.take(me)
    messages, sizes, flags = yield from to_owners(plan, coder, outgoing, flags)
    answer = Outgoing(plan, coder, "owner")
    answer.put(me, _Merged(plan, coder, float(divisor), own, messages, sizes))
    yield from from_owners(plan, bucket, coder, answer, flags)


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
        payloads: list[Payload] = []
        for r in range(self._plan.ranks):
            if r == me:
                payloads.append(self._own[index])
            else:
                payload, self._at[r] = read(self._messages[r], self._at[r], self._sizes[r, me][index])
                payloads.append(payload)
        return self._coder.merge(section, payloads, self._divisor, me)
