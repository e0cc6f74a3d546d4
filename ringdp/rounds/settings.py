"""The arguments of DiLoCo, checked, and as text that ranks compare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ringdp import refusals, values
from ringdp.compression import Auto, Compression, CompressorLike, ErrorFeedback, Sparse2, get, names
from ringdp.compression.description import describe
from ringdp.compression.feedback import feedback_of
from ringdp.compression.rules import Rules
from ringdp.errors import InvalidArgumentError
from ringdp.rounds.codes import RoundsCodec
from ringdp.rounds.outer import AUTO, DEFAULT, DEFAULT_SPARSE, Outer
from ringdp.rounds.outer import describe as describe_outer
from ringdp.rounds.quorum import Quorum
from ringdp.rounds.schedule import OpenSchedule, Schedule, TimedSchedule

MOVED = {
    "delay": "fragments=ringdp.Fragments(…, delay=…)",
    "mix": "fragments=ringdp.Fragments(…, mix=…)",
    "warmup_steps": "compression=ringdp.Compression(…, warmup_steps=…)",
}


@dataclasses.dataclass(frozen=True)
class Fragments:
    """How a model is sent in rounds: ``DiLoCo(model, inner, fragments=Fragments(2, delay=5))``.

    Args:
        count: parts of the model, each of which is averaged once a round, one after the other: the same bytes in
            smaller pieces.
        delay: steps from sending a fragment to using its mean. The ranks go on meanwhile; 0: they wait.
        mix: how much of a rank's own parameters stays when a mean comes, from 0 to below 1; None: 0.5 with a delay,
            else 0.

    Raises:
        InvalidArgumentError: another value.
    """

    count: int = 1
    delay: int = 0
    mix: float | None = None

    def __post_init__(self) -> None:
        values.whole("Fragments", "count", self.count, 1)
        values.whole("Fragments", "delay", self.delay, 0)
        if self.mix is not None:
            allowed = "from 0 (only the global parameters count) to below 1"
            values.number("Fragments", "mix", self.mix, allowed, lambda it: 0 <= it < 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """See `ringdp.DiLoCo`, whose arguments these are, and the parts of them."""

    who: str
    every: int | Callable[[int], int]
    fragments: int
    delay: int
    mix: float
    codec: RoundsCodec | None
    outer: Outer
    warmup_steps: int
    unequal: bool
    average_momenta: bool
    quorum: Quorum | None
    clip: float | None

    @classmethod
    def checked(
        cls,
        who: str,
        *,
        every: object,
        fragments: object,
        compression: CompressorLike | Compression,
        outer: Outer | None,
        unequal: object,
        average_momenta: object,
        quorum: object,
        grace: object,
        clip: object,
        parameters: int,
    ) -> Settings:
        """Raises InvalidArgumentError."""
        if not callable(every):
            every = values.whole(who, "every", every, 1)
        cut = fragments if isinstance(fragments, Fragments) else Fragments(values.whole(who, "fragments", fragments, 1))
        if cut.count > parameters:
            raise InvalidArgumentError(
                f"{who}: fragments={cut.count} is more than the model's {parameters} parameters that require grad"
            )
        if isinstance(every, int) and cut.delay >= every:
            raise InvalidArgumentError(
                f"{who}: delay={cut.delay} must be below every={every}: a fragment lands before it leaves again"
            )
        mix = (0.5 if cut.delay else 0.0) if cut.mix is None else float(cut.mix)
        by_time = values.flag(who, "unequal", unequal)
        if by_time and not isinstance(every, int):
            raise InvalidArgumentError(f"{who}: unequal=True needs a number for every, not a function")
        if not isinstance(average_momenta, bool) or (average_momenta and (cut.delay or by_time)):
            raise InvalidArgumentError(
                f"{who}: average_momenta must be True or False, and True needs delay=0 and unequal=False"
            )
        most = None if clip is None else values.number(who, "clip", clip, "from 1 on", lambda it: 1 <= it < math.inf)
        open_to = _quorum(who, quorum, grace)
        if open_to is not None:
            if cut.delay:
                refusals.refuse("quorum", "delay")
            if by_time:
                refusals.refuse("quorum", "unequal rounds")
            if average_momenta:
                refusals.refuse("quorum", "average_momenta")
        assert callable(every) or isinstance(every, int)
        codec, warmup_steps = _compression(who, compression)
        usual = DEFAULT_SPARSE if isinstance(codec, Sparse2) else DEFAULT
        chosen = usual if outer is None or outer == AUTO else outer
        describe_outer(chosen)
        return cls(
            who, every, cut.count, cut.delay, mix, codec, chosen, warmup_steps, by_time, average_momenta, open_to, most
        )

    def schedule(self) -> Schedule | TimedSchedule:
        if self.quorum is not None:
            return OpenSchedule(self.every, self.fragments, self.warmup_steps)
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
            *([] if self.clip is None else [f"clip: {self.clip:g}"]),
            *([] if self.quorum is None else [f"quorum: {self.quorum.share:g}", f"grace: {self.quorum.grace_s:g}"]),
        ]


def _quorum(who: str, quorum: object, grace: object) -> Quorum | None:
    """Raises InvalidArgumentError."""
    seconds = values.number(who, "grace", grace, "from 0 on: seconds", lambda it: 0 <= it < math.inf)
    if quorum is None:
        return None
    share = values.number(who, "quorum", quorum, "above 0 to 1: a share of the ranks", lambda it: 0 < it <= 1)
    return Quorum(share, seconds)


def _compression(who: str, given: CompressorLike | Compression) -> tuple[RoundsCodec | None, int]:
    """The codec of all changes, and the steps before the first round."""
    rules = Rules(given)
    if rules.pairs:
        refusals.refuse("rules", "rounds", who)
    if isinstance(rules.compressor, Auto):
        refusals.refuse("auto", "rounds", who)
    found, warmup_steps = rules.compressor, rules.asked.warmup_steps
    if found is None:
        return None, warmup_steps
    if isinstance(found, Sparse2):
        feedback = feedback_of(found.error_feedback)
        if feedback is not None and not isinstance(feedback, ErrorFeedback):
            raise InvalidArgumentError(
                f"{who}: the error_feedback of Sparse2 must be True, False or a ringdp.compression.ErrorFeedback, not"
                f" {feedback!r}"
            )
        return found, warmup_steps
    if getattr(found, "native", None) is None:
        usable = [name for name in names() if name == "sparse2" or getattr(get(name), "native", None)]
        raise InvalidArgumentError(
            f"{who}: compression must be None or one of the core's codecs ({', '.join(usable)}), not {describe(found)}"
        )
    codec: Any = found
    feedback_of(codec.error_feedback)
    chosen: RoundsCodec = codec
    return chosen, warmup_steps
