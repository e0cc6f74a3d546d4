"""The arguments of DiLoCo, checked, and as text that ranks compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ringdp import values
from ringdp.compression import CompressorLike, get, names
from ringdp.compression.description import describe
from ringdp.compression.feedback import feedback_of
from ringdp.errors import InvalidArgumentError
from ringdp.rounds.exchange import NativeCodec
from ringdp.rounds.outer import Outer
from ringdp.rounds.outer import describe as describe_outer
from ringdp.rounds.schedule import Schedule, TimedSchedule


@dataclasses.dataclass(frozen=True)
class Settings:
    """See `ringdp.DiLoCo`, whose arguments these are; `mix` is a number here."""

    who: str
    every: int | Callable[[int], int]
    fragments: int
    delay: int
    mix: float
    codec: NativeCodec | None
    outer: Outer
    warmup_steps: int
    unequal: bool
    average_momenta: bool

    @classmethod
    def checked(
        cls,
        who: str,
        *,
        every: object,
        fragments: object,
        delay: object,
        mix: object,
        compression: CompressorLike,
        chosen_outer: Outer,
        warmup_steps: object,
        unequal: object,
        average_momenta: object,
        parameters: int,
    ) -> Settings:
        """Raises InvalidArgumentError."""
        if not callable(every):
            every = values.whole(who, "every", every, 1)
        count = values.whole(who, "fragments", fragments, 1)
        if count > parameters:
            raise InvalidArgumentError(
                f"{who}: fragments={count} is more than the model's {parameters} parameters that require grad"
            )
        steps = values.whole(who, "delay", delay, 0)
        if isinstance(every, int) and steps >= every:
            raise InvalidArgumentError(
                f"{who}: delay={steps} must be below every={every}: a fragment lands before it leaves again"
            )
        if mix is None:
            mix = 0.5 if steps else 0.0
        kept = values.number(
            who, "mix", mix, "from 0 (only the global parameters count) to below 1", lambda it: 0 <= it < 1
        )
        by_time = values.flag(who, "unequal", unequal)
        if by_time and not isinstance(every, int):
            raise InvalidArgumentError(f"{who}: unequal=True needs a number for every, not a function")
        if not isinstance(average_momenta, bool) or (average_momenta and (steps or by_time)):
            raise InvalidArgumentError(
                f"{who}: average_momenta must be True or False, and True needs delay=0 and unequal=False"
            )
        assert callable(every) or isinstance(every, int)
        codec = _codec(who, compression)
        describe_outer(chosen_outer)
        warmup = values.whole(who, "warmup_steps", warmup_steps, 0)
        return cls(who, every, count, steps, kept, codec, chosen_outer, warmup, by_time, average_momenta)

    def schedule(self) -> Schedule | TimedSchedule:
        if self.unequal:
            assert isinstance(self.every, int)
            return TimedSchedule(self.every, self.fragments, self.delay, self.warmup_steps)
        return Schedule(self.every, self.fragments, self.delay, self.warmup_steps)

    @property
    def compressor(self) -> str:
        """A description."""
        return "None" if self.codec is None else describe(self.codec)

    def lines(self) -> list[str]:
        """Arguments that must be equal on all ranks, ``name: value``; functions are compared by their results."""
        return [
            f"every: {'a function' if callable(self.every) else self.every}",
            f"fragments: {self.fragments}",
            f"delay: {self.delay}",
            f"mix: {self.mix!r}",
            f"compression: {self.compressor}",
            f"outer: {describe_outer(self.outer)}",
            f"warmup_steps: {self.warmup_steps}",
            f"unequal: {self.unequal}",
            f"average_momenta: {self.average_momenta}",
        ]


def _codec(who: str, compression: CompressorLike) -> NativeCodec | None:
    found = get(compression)
    if found is None:
        return None
    if getattr(found, "native", None) is None:
        usable = [name for name in names() if getattr(get(name), "native", None)]
        raise InvalidArgumentError(
            f"{who}: compression must be None or one of the core's codecs ({', '.join(usable)}), not {describe(found)}"
        )
    codec: Any = found
    feedback_of(codec.error_feedback)
    chosen: NativeCodec = codec
    return chosen
