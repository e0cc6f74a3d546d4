"""The payloads of a rank in one phase of an exchange, and the lengths of the others'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import FAILED, LOADED, fill_front
from ringdp.compression.exchange.packing import Forms, check_promise, forms_of, front, most_bytes, room, write
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, Request
from ringdp.compression.exchange.section import Coder, Phase, Section
from ringdp.compression.protocol import Payload
from ringdp.errors import MismatchError

Senders = Sequence[Sequence[int]]
"""By rank: the parts of which it sends payloads."""
Sizes = dict[tuple[int, int], list[Forms]]
"""By sender and part: the forms of its payloads, by section."""


class Outgoing:
    """Payloads by part. An error while they are made is kept, and sent as the status in a message of the promised
    length."""

    def __init__(self, plan: Plan, coder: Coder, phase: Phase) -> None:
        self._plan, self._coder, self._phase = plan, coder, phase
        self._payloads: dict[int, list[Payload]] = {}
        self._forms: dict[int, list[Forms]] = {}
        self.error: BaseException | None = None

    def add(self, part: int, elements: Callable[[int, Section], Tensor]) -> None:
        """Encode the result of `elements` for each section, by its index, where it has elements in this part."""
        encode = self._coder.encode
        self.put(part, lambda index, section: encode(section, elements(index, section), self._phase, part))

    def put(self, part: int, payload_of: Callable[[int, Section], Payload]) -> None:
        """Take the result of `payload_of` for each section, by its index, where it has elements in this part."""
        plan = self._plan
        promised = plan.forms(part, self._phase)
        self._payloads[part] = []
        self._forms[part] = promised
        if self.error is not None:
            return
        try:
            payloads: list[Payload] = []
            for index, section in enumerate(plan.sections):
                payload: Payload = ()
                if section.numel(part):
                    payload = payload_of(index, section)
                    check_promise(section, promised[index], payload, section.numel(part))
                payloads.append(payload)
            self._payloads[part] = payloads
            self._forms[part] = [forms_of(payload) for payload in payloads]
        except BaseException as error:  # sent to all ranks, which then raise together
            if self._coder.raises_alone:
                raise
            self.error = error

    @property
    def status(self) -> int:
        """The status of this rank for all ranks; see `agreement`."""
        return FAILED * (self.error is not None) | LOADED * (self._coder.loaded and self._phase == "rank")

    def take(self, part: int) -> list[Payload]:
        """The payloads of a part that is not sent."""
        return self._payloads.pop(part)

    def take_or_zeros(self, part: int) -> list[Payload]:
        """As `take`; zeros of the promised forms after an error."""
        if self.error is None:
            return self.take(part)
        device = self._plan.device
        return [tuple(torch.zeros(f.shape, dtype=f.dtype, device=device) for f in it) for it in self._forms[part]]

    def size(self, part: int) -> int:
        return message_bytes(self._plan, self._forms[part])

    def write(self, part: int, message: Tensor, flags: list[int]) -> None:
        """Fill a uint8 message of at least `size` bytes, and forget the payloads."""
        fill_front(self._plan, message, flags, self.status)
        write(message, front(len(flags)), self._payloads.pop(part))

    def sizes_of_all(self, senders: Senders) -> Generator[Request, object, Sizes]:
        """The lengths of all ranks' payloads: known where sizes are fixed or there are none, else sent to all ranks.

        Raises:
            MismatchError: on all ranks, where a rank sends an impossible length.
        """
        plan = self._plan
        promised = {part: plan.forms(part, self._phase) for parts in senders for part in parts}
        counts = [sum(len(_lengths(promised[part])) for part in parts) for parts in senders]
        if plan.fixed_size or not any(counts):  # parameters without elements have no payloads
            return {(sender, part): promised[part] for sender, parts in enumerate(senders) for part in parts}
        mine = list(itertools.chain(*(_lengths(self._forms[part]) for part in senders[self._coder.rank])))
        row = torch.tensor(mine + [0] * (max(counts) - len(mine)), dtype=torch.int64, device=plan.device)
        answer = yield AllGather(row.view(torch.uint8))
        assert isinstance(answer, Tensor)
        gathered = answer.view(torch.int64).view(plan.ranks, -1).tolist()
        sizes: Sizes = {}
        for sender, parts in enumerate(senders):
            numbers = iter(gathered[sender])
            for part in parts:
                sizes[sender, part] = _believed(plan, promised[part], part, numbers, sender)
        return sizes


def message_bytes(plan: Plan, forms: list[Forms]) -> int:
    return front(len(plan.sections)) + room(forms)


def _lengths(forms: list[Forms]) -> list[int]:
    return [form.shape[0] for payload in forms for form in payload if form.shape]


def _believed(plan: Plan, promised: list[Forms], part: int, numbers: Iterator[int], sender: int) -> list[Forms]:
    """`promised` with the lengths that `sender` sent."""
    forms: list[Forms] = []
    for section, payload in zip(plan.sections, promised, strict=True):
        lengths = [next(numbers) if form.shape else 0 for form in payload]
        announced = tuple(f.with_rows(n) if f.shape else f for f, n in zip(payload, lengths, strict=True))
        fixed = getattr(section.compressor, "fixed_size", True)
        if min(lengths, default=0) < 0 or (
            announced != payload if fixed else _too_much(announced, payload, section.numel(part))
        ):
            raise MismatchError(
                f"rank {sender} announces a payload of lengths {lengths} for {section.numel(part)} elements of"
                f" {section.name}",
                peer=sender,
                name=section.name,
            )
        forms.append(announced)
    return forms


def _too_much(announced: Forms, promised: Forms, numel: int) -> bool:
    return room([announced]) > max(most_bytes(numel), room([promised]))
