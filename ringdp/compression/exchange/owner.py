"""``aggregate="owner"`` and ``"merge"``: every element has one owner, which makes the mean and sends it to all.

Rank r encodes the parts of the others and sends each to its owner. The owner decodes them, adds in rank order, its own
part as it is, divides, and encodes. All ranks, the owner too, decode the owner's bytes, so all have the same bits.
As many bytes as an all-reduce of the codes, and two encodings, however many ranks there are.

With "merge" the owner adds up payloads as they are, without decoding them to dense elements; it encodes its own part,
too. The error of the merged payload is the owner's residual.

The exchange is a generator: it yields a request (`AllToAll`, `AllGather`), is sent the answer, and never calls a
process group, so a simulation of all ranks runs the same code. Every message begins with the sender's flags and status:
a rank whose compressor raises, or that sees an infinity, still sends messages of the agreed length with them, so that
no rank waits. Runs on the hook's communication thread (`hooks/comm_threads.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import NOT_FINITE, act_on, open_messages
from ringdp.compression.exchange.finite import all_finite, masked, non_finite_flags, write_nan
from ringdp.compression.exchange.outgoing import Outgoing, Sizes, message_bytes
from ringdp.compression.exchange.packing import front, read
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, AllToAll, Exchange, Request
from ringdp.compression.exchange.section import Coder, Section, in_order
from ringdp.compression.protocol import Payload


def owner_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """Put the mean of all ranks' `bucket` (float32, flat) into the plan's sections of it.

    Args:
        divisor: of the sums, a float32 scalar on the bucket's device.
    """
    me = coder.rank
    flags = non_finite_flags(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    for part in (r for r in range(plan.ranks) if r != me):
        outgoing.add(part, Elements(bucket, part, flags))
    payloads, flags = yield from _to_owners(plan, coder, outgoing, flags)

    def mean_of(index: int, section: Section) -> Tensor:
        own = coder.own_term(section, masked(section.of(bucket, me), flags[index]), me)
        others = {r: coder.decode(section, payload, "rank", me) for r, payload in payloads.of(index).items()}
        mean = in_order([own if r == me else others[r] for r in range(plan.ranks)]).div_(divisor)
        if plan.watched[index] and not flags[index] and not bool(all_finite(mean)):
            flags[index] = NOT_FINITE  # the sum overflowed
        return masked(mean, flags[index])

    answer = Outgoing(plan, coder, "owner")
    answer.add(me, mean_of)
    yield from _from_owners(plan, bucket, coder, answer, flags)


def merge_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`."""
    me = coder.rank
    flags = non_finite_flags(plan, bucket)
    outgoing = Outgoing(plan, coder, "rank")
    for part in range(plan.ranks):
        outgoing.add(part, Elements(bucket, part, flags))
    own = outgoing.take(me)
    payloads, flags = yield from _to_owners(plan, coder, outgoing, flags)

    def merged(index: int, section: Section) -> Payload:
        known = payloads.of(index) | {me: own[index]}
        return coder.merge(section, [known[r] for r in range(plan.ranks)], float(divisor), me)

    answer = Outgoing(plan, coder, "owner")
    answer.put(me, merged)
    yield from _from_owners(plan, bucket, coder, answer, flags)


def _to_owners(
    plan: Plan, coder: Coder, outgoing: Outgoing, flags: list[int]
) -> Generator[Request, Any, tuple[Payloads, list[int]]]:
    """Send each part to its owner. Returns the others' payloads of this rank's parts, and all ranks' flags."""
    me, ranks = coder.rank, plan.ranks
    others = [r for r in range(ranks) if r != me]
    sizes = yield from outgoing.sizes_of_all([[p for p in range(ranks) if p != r] for r in range(ranks)])
    received = yield AllToAll(*_messages(outgoing, others, flags, plan, sizes, me))
    messages = dict(zip(others, received.split([message_bytes(plan, sizes[r, me]) for r in others]), strict=True))
    del received
    theirs, status = open_messages(plan, messages, me)
    yield from act_on(status | outgoing.status, outgoing.error, plan, coder)
    return Payloads(plan, messages, sizes, me), [mine | other for mine, other in zip(flags, theirs, strict=True)]


def _from_owners(plan: Plan, bucket: Tensor, coder: Coder, answer: Outgoing, flags: list[int]) -> Exchange:
    """Send this rank's `answer` to all, and put all owners' into the plan's sections of `bucket`."""
    me, ranks = coder.rank, plan.ranks
    sizes = yield from answer.sizes_of_all([[r] for r in range(ranks)])
    message = torch.empty(
        max(message_bytes(plan, sizes[r, r]) for r in range(ranks)), dtype=torch.uint8, device=plan.device
    )
    answer.write(me, message, flags)
    results = yield AllGather(message)
    flags, status = open_messages(plan, dict(enumerate(results)), me)
    yield from act_on(status, answer.error, plan, coder)
    for part in range(ranks):
        at = front(len(plan.sections))
        for section, forms in zip(plan.sections, sizes[part, part], strict=True):
            if section.numel(part):
                payload, at = read(results[part], at, forms)
                if coder.tally is not None:
                    coder.tally.joined(section, payload)
                place = section.of(bucket, part)
                # A section's `result` may keep what it gets.
                mean = coder.decode(section, payload, "owner", part, out=place if section.result is None else None)
                result = coder.result(section, mean, part)
                if result.data_ptr() != place.data_ptr():
                    place.copy_(result)
    write_nan(plan, bucket, flags)


def _messages(
    outgoing: Outgoing, others: Sequence[int], flags: list[int], plan: Plan, sizes: Sizes, me: int
) -> tuple[Tensor, list[int], list[int]]:
    to = [outgoing.size(part) if part != me else 0 for part in range(plan.ranks)]
    send = torch.empty(sum(to), dtype=torch.uint8, device=plan.device)
    for part, message in zip(others, send.split([n for n in to if n]), strict=True):
        outgoing.write(part, message, flags)
    return send, to, [message_bytes(plan, sizes[r, me]) if r != me else 0 for r in range(plan.ranks)]


class Elements:
    """This rank's own, of one part, section by section."""

    def __init__(self, bucket: Tensor, part: int, flags: list[int]) -> None:
        self._bucket, self._part, self._flags = bucket, part, flags

    def __call__(self, index: int, section: Section) -> Tensor:
        return masked(section.of(self._bucket, self._part), self._flags[index])


class Payloads:
    """Those of one part in the messages of several ranks, to be read section by section in order."""

    def __init__(self, plan: Plan, messages: Mapping[int, Tensor], sizes: Sizes, part: int) -> None:
        self._messages, self._sizes, self._part = messages, sizes, part
        self._at = dict.fromkeys(messages, front(len(plan.sections)))

    def of(self, index: int) -> dict[int, Payload]:
        """A section's, by sender."""
        found: dict[int, Payload] = {}
        for r, message in self._messages.items():
            found[r], self._at[r] = read(message, self._at[r], self._sizes[r, self._part][index])
        return found
