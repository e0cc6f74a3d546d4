"""A parameter's place in a bucket, and how its elements are encoded and decoded there.

An element is encoded up to twice: in phase "rank" each rank encodes its own gradient, in phase "owner" the owner of a
part encodes the mean. The states of compressors and error feedback are kept by parameter, phase and part, and count
only when the step does (`States`). Plug-ins such as EF21 send differences instead of gradients: then an owner adds
the difference of its own part without encoding it (`Coder.own_term`), and every rank turns the decoded mean
of differences back into a gradient (`Coder.result`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ringdp.compression.description import describe
from ringdp.compression.exchange.states import Key, States, scaled
from ringdp.compression.feedback import ErrorFeedback, Feedback, feedback_of
from ringdp.compression.partition import bounds, owner_offset_of
from ringdp.compression.protocol import Compressor, Info, Payload, Rounds
from ringdp.errors import InvalidArgumentError

_CPU = torch.device("cpu")
Phase = Literal["rank", "owner"]


@dataclasses.dataclass(frozen=True)
class Section:
    """Elements ``begin`` to ``begin + count`` of a bucket: one parameter's, with its compressor.

    Attributes:
        parts: into how many the elements are cut: the number of ranks where they are owned, else 1.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    count: int
    compressor: Compressor
    parts: int
    device: torch.device = _CPU

    @functools.cached_property
    def edges(self) -> list[int]:
        return bounds(self.count, self.parts, owner_offset_of(self.name))

    @functools.cached_property
    def feedback(self) -> Feedback | None:
        return feedback_of(getattr(self.compressor, "error_feedback", None))

    @functools.cached_property
    def result(self) -> Any:
        """The plug-in's method that turns the mean into the gradient; None where the mean is the gradient."""
        return getattr(self.feedback, "result", None)

    def feedback_in(self, phase: Phase) -> Feedback | None:
        return self.feedback if phase == "rank" else getattr(self.feedback, "owner", self.feedback)

    @property
    def owners_encode(self) -> bool:
        """Whether parts have owners, which encode the means and keep their residual."""
        return self.parts > 1 and getattr(self.compressor, "aggregate", "owner") == "owner"

    def with_ranks(self, ranks: int) -> Section:
        """The same elements among another number of ranks."""
        return dataclasses.replace(self, parts=parts_of(self.compressor, ranks))

    def numel(self, part: int) -> int:
        return self.edges[part + 1] - self.edges[part]

    def zeros(self) -> Tensor:
        """float32 ``[count]``."""
        return torch.zeros(self.count, device=self.device, dtype=torch.float32)

    def part_of(self, whole: Tensor, part: int) -> Tensor:
        """This part, as a view of all elements of the parameter."""
        return whole[self.edges[part] : self.edges[part + 1]]

    def of(self, bucket: Tensor, part: int) -> Tensor:
        """This part's elements, as a view of the flat `bucket`."""
        return bucket[self.begin + self.edges[part] : self.begin + self.edges[part + 1]]


def parts_of(compressor: Compressor, ranks: int) -> int:
    """Into how many parts the elements are cut among so many ranks."""
    return ranks if getattr(compressor, "aggregate", "owner") in ("owner", "merge") else 1


class Tally(Protocol):
    """Counts the elements of sparse codes; `ringdp.compression.exchange.sparsity` implements it."""

    def weighs(self, section: Section) -> bool:
        """Whether it wants `weigh`, which costs a pass over the elements."""

    def sent(self, section: Section, payload: Payload, part: int) -> None:
        """Called when this rank has encoded the elements of `part` as `payload`."""

    def joined(self, section: Section, payload: Payload) -> None:
        """Called with the `payload` of all ranks' elements, of a part or of all."""

    def weigh(self, section: Section, wanted: Tensor, decoded: Tensor) -> None:
        """Called with the elements `wanted` that were to be sent, and their decoded code."""


@dataclasses.dataclass(frozen=True)
class Coder:
    """Encodes and decodes sections in one step on one rank.

    Attributes:
        loss_scale: the loss scale that the gradients carry.
        tally: counts what sparse codes send, where there is one.
        loaded: this rank's states are a checkpoint's: all ranks compare the steps they are at.
        raises_alone: an error of this rank while it encodes is not sent to the others, which go on without the rank.
    """

    states: States
    rank: int
    world_size: int
    step: int
    loss_scale: float = 1.0
    device: torch.device = _CPU
    tally: Tally | None = None
    loaded: bool = False
    raises_alone: bool = False

    def encode(self, section: Section, x: Tensor, phase: Phase, part: int) -> Payload:
        """The payload for `x` plus error feedback's residual; the new states of both are pending in `states`.

        Raises:
            InvalidArgumentError: the compressor did not give a tuple of tensors.
        """
        payload = self._encode(section, x, phase, part)
        if self.tally is not None and phase == "rank":
            self.tally.sent(section, payload, part)
            if self.tally.weighs(section):
                wanted = self._fed(section, x, phase, part)[0]
                self.tally.weigh(section, wanted, self.decode(section, payload, phase, part))
        return payload

    def _encode(self, section: Section, x: Tensor, phase: Phase, part: int) -> Payload:
        feedback = section.feedback_in(phase)
        if feedback is None:
            return self.compress(section, x, phase, part)
        if type(feedback) is ErrorFeedback and hasattr(section.compressor, "compress_with_residual"):
            return self._encode_at_once(section, x, phase, part)
        fed, state = self._fed(section, x, phase, part)
        to_units = self._to_units(feedback)
        payload = self.compress(section, fed / to_units if to_units != 1.0 else fed, phase, part)
        decoded = self.decode(section, payload, phase, part)
        self._feed_back(section, phase, part, fed, decoded, state)
        return payload

    def _fed(self, section: Section, x: Tensor, phase: Phase, part: int) -> tuple[Tensor, dict[str, Any]]:
        """`x` with error feedback's part added, in its units, and the feedback's state, which this changes."""
        feedback = section.feedback_in(phase)
        if feedback is None:
            return x, {}
        if type(feedback) is ErrorFeedback:  # as its `before` and `after`, in memory that is there
            residual = self.states.residual(section.name)
            kept = {} if residual is None else {"residual": section.part_of(residual, part)}
            return feedback.before(x, scaled(kept, self.loss_scale)), {}
        to_units = self._to_units(feedback)
        state = self.states.copy(Key(section.name, "feedback", phase, part), self.loss_scale * to_units)
        return feedback.before(x * to_units if to_units != 1.0 else x, state), state

    def _feed_back(
        self, section: Section, phase: Phase, part: int, fed: Tensor, decoded: Tensor, state: dict[str, Any]
    ) -> None:
        """Update error feedback's state by this step; `fed` and `state` are of `_fed`."""
        feedback = section.feedback_in(phase)
        if type(feedback) is ErrorFeedback:
            _, following = self._residuals(section, part)
            torch.sub(fed, decoded, out=following)
            if self.loss_scale != 1.0:
                following.mul_(1.0 / self.loss_scale)
        elif feedback is not None:
            to_units = self._to_units(feedback)
            feedback.after(fed, decoded * to_units if to_units != 1.0 else decoded, state)
            self.states.keep(Key(section.name, "feedback", phase, part), state, self.loss_scale * to_units)

    def _residuals(self, section: Section, part: int) -> tuple[Tensor, Tensor]:
        """The residual of plain error feedback for this part, and where this step puts the next one."""
        current, following = self.states.write_residual(section.name, section.count, section.device)
        return section.part_of(current, part), section.part_of(following, part)

    def _to_units(self, feedback: Feedback) -> float:
        """A power of two as a rule, which changes no bit."""
        return 1.0 / self.loss_scale if getattr(feedback, "unscaled", False) else 1.0

    def _encode_at_once(self, section: Section, x: Tensor, phase: Phase, part: int) -> Payload:
        """By a compressor that adds the residual and finds the new one in the pass that encodes."""
        own = Key(section.name, "compressor", phase, part)
        info = self._info(section, phase, part, self.states.copy(own))
        residual, following = self._residuals(section, part)
        feedback = section.feedback_in(phase)
        assert isinstance(feedback, ErrorFeedback)
        payload, left = section.compressor.compress_with_residual(  # type: ignore[attr-defined]
            x, feedback.decayed(residual), info, following
        )
        if left.data_ptr() != following.data_ptr():  # torch operations made it
            following.copy_(left)
        self.states.keep(own, info.state)
        return tuple(payload)

    def merge(self, section: Section, payloads: Sequence[Payload], divisor: float, part: int) -> Payload:
        """One payload of the mean of this rank's part; its error is this rank's residual."""
        residual: Tensor | None
        if type(section.feedback) is ErrorFeedback:
            _, residual = self._residuals(section, part)
        else:
            residual = self.states.pending(Key(section.name, "feedback", "rank", part)).get("residual")
        info = self._info(section, "owner", part, {})
        merged: Payload = section.compressor.merge(  # type: ignore[attr-defined]
            payloads, info, divisor, residual, divisor / self.loss_scale
        )
        return merged

    def own_term(self, section: Section, x: Tensor, part: int) -> Tensor:
        """The term of the sum for a rank's own part: itself, without loss; or the difference that would be sent."""
        feedback = section.feedback
        if feedback is None or section.result is None:
            return x
        key = Key(section.name, "feedback", "rank", part)
        state = self.states.copy(key, self.loss_scale)
        fed = feedback.before(x, state)
        feedback.after(fed, fed, state)
        self.states.keep(key, state, self.loss_scale)
        return fed

    def decode(self, section: Section, payload: Payload, phase: Phase, part: int, out: Tensor | None = None) -> Tensor:
        """float32 ``[numel]`` of the part; in the flat `out`, where the compressor can write there.

        Raises:
            InvalidArgumentError: the compressor gave something else.
        """
        info = self._info(section, phase, part, {})
        into = getattr(section.compressor, "decompress_into", None) if out is not None else None
        decoded = section.compressor.decompress(payload, info) if into is None else into(payload, info, out)
        return _checked(section, "decompress", decoded, info.numel)

    def sum(self, section: Section, payloads: Sequence[Payload], out: Tensor) -> Tensor:
        """What whole payloads decode to, added in their order; in `out` where the compressor can add to it.

        Raises:
            InvalidArgumentError: as `decode`.
        """
        add = getattr(section.compressor, "decompress_add", None)
        if add is None:
            return in_order([self.decode(section, payload, "rank", 0) for payload in payloads])
        out.zero_()
        for payload in payloads:
            add(payload, self._info(section, "rank", 0, {}), out)
        return out

    def average(self, sections: Sequence[Section], xs: Sequence[Tensor], *, in_place: bool = False) -> Rounds:
        """The rounds of sections of one compressor, whose elements are `xs`; returns the means.

        Args:
            in_place: the means may be written over `xs`.

        Raises:
            InvalidArgumentError: the compressor gave something else.
        """
        compressor, feedback = sections[0].compressor, sections[0].feedback
        if type(feedback) is ErrorFeedback and hasattr(compressor, "average_with_residual"):
            means = yield from self._average_at_once(sections, xs, in_place)
            return means
        keys = [Key(section.name, "compressor", "rank", 0) for section in sections]
        infos = [
            self._info(section, "rank", 0, self.states.copy(key)) for section, key in zip(sections, keys, strict=True)
        ]
        to_units = 1.0 if feedback is None else self._to_units(feedback)
        fed, states = zip(*(self._fed(one, x, "rank", 0) for one, x in zip(sections, xs, strict=True)), strict=True)
        sent = [x / to_units for x in fed] if to_units != 1.0 else list(fed)
        means = list((yield from compressor.average(sent, infos)))  # type: ignore[attr-defined]
        if len(means) != len(sections):
            raise InvalidArgumentError(f"{describe(compressor)}.average gave {len(means)} means for {len(sections)}")
        for i, (section, mean) in enumerate(zip(sections, means, strict=True)):
            means[i] = _checked(section, "average", mean, section.count)
            self.states.keep(keys[i], infos[i].state)
            self._feed_back(section, "rank", 0, fed[i], means[i], states[i])
        return means

    def _average_at_once(self, sections: Sequence[Section], xs: Sequence[Tensor], in_place: bool) -> Rounds:
        """By a compressor that adds the residuals and finds the new ones in the passes that encode and decode."""
        keys = [Key(section.name, "compressor", "rank", 0) for section in sections]
        kept = [(section.feedback, self.states.residual(section.name)) for section in sections]
        residuals = [it if it is None else feedback.decayed(it) for feedback, it in kept]  # type: ignore[union-attr]
        infos = [
            self._info(section, "rank", 0, self.states.copy(key)) for section, key in zip(sections, keys, strict=True)
        ]
        left = [self._residuals(section, 0)[1] for section in sections]
        means = xs if in_place else [torch.empty_like(x) for x in xs]
        yield from sections[0].compressor.average_with_residual(  # type: ignore[attr-defined]
            xs, residuals, infos, means, left
        )
        for key, info in zip(keys, infos, strict=True):
            self.states.keep(key, info.state)
        return means

    def result(self, section: Section, mean: Tensor, part: int) -> Tensor:
        """The gradient's elements of the decoded mean."""
        if section.result is None:
            return mean
        key = Key(section.name, "feedback", "result", part)
        state = self.states.copy(key, self.loss_scale)
        gradient: Tensor = section.result(mean, state)
        self.states.keep(key, state, self.loss_scale)
        return gradient

    def compress(self, section: Section, x: Tensor, phase: Phase, part: int) -> Payload:
        """As `encode`, without error feedback."""
        key = Key(section.name, "compressor", phase, part)
        info = self._info(section, phase, part, self.states.copy(key))
        payload = section.compressor.compress(x, info)
        self.states.keep(key, info.state)
        if not isinstance(payload, tuple | list) or not all(isinstance(it, Tensor) for it in payload):
            raise InvalidArgumentError(
                f"{describe(section.compressor)}.compress must give a tuple of tensors for {section.name},"
                f" not {_what(payload)}",
                name=section.name,
            )
        return tuple(payload)

    def _info(self, section: Section, phase: Phase, part: int, state: dict[str, Any]) -> Info:
        return Info(
            name=section.name,
            shape=section.shape,
            numel=section.numel(part),
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            phase=phase,
            part=part,
            state=state,
            loss_scale=self.loss_scale,
        )


def in_order(terms: Sequence[Tensor]) -> Tensor:
    """The sum, added one after the other: a new tensor."""
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total.add_(term)
    return total


def _checked(section: Section, method: str, x: Any, numel: int) -> Tensor:
    """`x` as flat float32; raises InvalidArgumentError where it is not so many elements of that, there."""
    there = isinstance(x, Tensor) and x.device.type == section.device.type
    if not there or x.dtype != torch.float32 or x.numel() != numel:
        raise InvalidArgumentError(
            f"{describe(section.compressor)}.{method} must give float32 [{numel}] for {section.name}, not {_what(x)}"
            + ("" if there or not isinstance(x, Tensor) else f" on {x.device}"),
            name=section.name,
        )
    return x.reshape(-1)


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
