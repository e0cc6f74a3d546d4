"""``aggregate="rounds"``: compressors that communicate more than once, each in a generator of its own.

The tensors of a round have the same form on all ranks and in all steps: it is found once, by a run on zeros in a world
of one. A rank whose compressor fails sends zeros of that form with its report, so that no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.description import describe
from ringdp.compression.exchange.agreement import FAILED, LOADED, act_on, marks, read_marks
from ringdp.compression.exchange.finite import masked, non_finite_flags, write_nan
from ringdp.compression.exchange.packing import Forms, forms_of
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllGather, AllReduce, Exchange, Request
from ringdp.compression.exchange.section import Coder, Section
from ringdp.compression.exchange.states import States
from ringdp.compression.protocol import Rounds
from ringdp.errors import InvalidArgumentError

Round = tuple[bool, Forms]
"""Whether it is a gather, and the forms of its tensors."""


def rounds_exchange(plan: Plan, bucket: Tensor, coder: Coder, divisor: Tensor) -> Exchange:
    """As `owner_exchange`; the compressors of a bucket take their turns one after the other."""
    flags = non_finite_flags(plan, bucket)
    talk = _Talk(plan, coder, divisor, flags)
    for group in groups(plan.sections):
        xs = [masked(plan.sections[i].of(bucket, 0), flags[i]) for i in group]
        means = yield from talk.average(tuple(plan.sections[i] for i in group), xs)
        for i, mean in zip(group, means, strict=True):
            gradient, place = coder.result(plan.sections[i], mean, 0), plan.sections[i].of(bucket, 0)
            if gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
    if talk.non_finite is None:  # no rank had anything to exchange
        yield from talk.exchange([], None)
    write_nan(plan, bucket, talk.non_finite or [])


def learn(plan: Plan) -> None:
    """Find the rounds of each of the plan's compressors, on zeros; raises their errors."""
    for group in groups(plan.sections):
        sections = tuple(plan.sections[i] for i in group)
        names = tuple(section.name for section in sections)
        if names not in plan.rounds:
            plan.rounds[names] = _rounds_of(sections, plan.device)


def groups(sections: Sequence[Section]) -> list[list[int]]:
    """The sections of each compressor, by index; those without elements are left out."""
    by_compressor: dict[int, list[int]] = {}
    for i, section in enumerate(sections):
        if section.count:
            by_compressor.setdefault(id(section.compressor), []).append(i)
    return list(by_compressor.values())


class _Talk:
    """The rounds of one bucket in one step, on one rank."""

    def __init__(self, plan: Plan, coder: Coder, divisor: Tensor, flags: list[int]) -> None:
        self._plan, self._coder, self._divisor = plan, coder, divisor
        self._flags = flags
        self.non_finite: list[int] | None = None  # by section: NOT_FINITE where it was not on some rank

    def average(self, sections: tuple[Section, ...], xs: list[Tensor]) -> Generator[Request, Any, Sequence[Tensor]]:
        """The means of sections of one compressor."""
        promised = self._promised(sections)
        rounds = self._coder.average(sections, xs, in_place=True)
        answer: Any = None
        for number, (gathers, forms) in enumerate(promised):
            tensors: list[Tensor] | Tensor | None = None
            error: BaseException | None = None
            try:
                tensors = rounds.send(answer)
                if _form(tensors) != promised[number]:
                    error = InvalidArgumentError(_differs(sections[0], number, _form(tensors), promised))
            except StopIteration:
                error = InvalidArgumentError(_differs(sections[0], number, None, promised))
            except BaseException as caught:  # sent to all ranks, which then raise together
                error = caught
            if error is not None and self._coder.raises_alone:
                raise error
            if error is not None or tensors is None:
                zeros = [torch.zeros(form.shape, dtype=form.dtype, device=self._plan.device) for form in forms]
                tensors = zeros[0] if gathers else zeros
            answer = yield from self.exchange(tensors, error)
        try:
            tensors = rounds.send(answer)
        except StopIteration as end:
            means: Sequence[Tensor] = end.value
            return means
        raise InvalidArgumentError(_differs(sections[0], len(promised), _form(tensors), promised))

    def exchange(self, tensors: list[Tensor] | Tensor, error: BaseException | None) -> Generator[Request, Any, Any]:
        """One round, on all ranks; raises on all of them where one could not take part."""
        plan = self._plan
        first = self.non_finite is None
        mine = marks(plan, FAILED * (error is not None) | LOADED * (first and self._coder.loaded), self._flags)
        answer: Any = tensors
        if isinstance(tensors, Tensor):
            rows = yield AllGather(tensors.contiguous().view(-1).view(torch.uint8))
            answer = rows.view(tensors.dtype).view(plan.ranks, *tensors.shape)
            yield AllReduce([mine])
        else:
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.div_(self._divisor)
            yield AllReduce([*(tensor.view(-1) for tensor in tensors), mine])
        status, self.non_finite = read_marks(mine)
        yield from act_on(status, error, plan, self._coder)
        return answer

    def _promised(self, sections: tuple[Section, ...]) -> list[Round]:
        known: list[Round] = self._plan.rounds[tuple(section.name for section in sections)]
        return known


def _rounds_of(sections: Sequence[Section], device: torch.device) -> list[Round]:
    """The form of each round, by a run on zeros."""
    seen: list[Round] = []
    rounds = Coder(States(), 0, 1, 0, device=device).average(sections, [section.zeros() for section in sections])
    alone(rounds, seen.append)
    return seen


def alone(rounds: Rounds, look: Callable[[Round], None]) -> Sequence[Tensor]:
    """The means of a world of one; `look` is shown each round."""
    answer: Any = None
    while True:
        try:
            tensors = rounds.send(answer)
        except StopIteration as end:
            means: Sequence[Tensor] = end.value
            return means
        look(_form(tensors))
        answer = tensors.unsqueeze(0) if isinstance(tensors, Tensor) else tensors


def _form(tensors: list[Tensor] | Tensor) -> Round:
    if isinstance(tensors, Tensor):
        return True, forms_of((tensors,))
    if not isinstance(tensors, list) or not all(isinstance(it, Tensor) for it in tensors):
        raise InvalidArgumentError(f"a round is a tensor or a list of tensors, not {type(tensors).__name__}")
    return False, forms_of(tuple(tensors))


def _differs(section: Section, number: int, given: Round | None, promised: list[Round]) -> str:
    wanted = promised[number] if number < len(promised) else None
    return (
        f"{describe(section.compressor)}.average: round {number} of {section.name} exchanges"
        f" {_describe_round(given)} where zeros gave {_describe_round(wanted)}: rounds must not depend on the elements"
    )


def _describe_round(one: Round | None) -> str:
    if one is None:
        return "nothing"
    gathers, forms = one
    text = ", ".join(f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)}" for form in forms)
    return f"{'a gather' if gathers else 'a sum'} of {text}"
