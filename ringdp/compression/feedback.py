"""Error feedback: adds the error of a lossy code to the next gradient. A plug-in beside the compressor."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from ringdp import values
from ringdp.errors import InvalidArgumentError

State: TypeAlias = dict[str, Any]


@runtime_checkable
class Feedback(Protocol):
    """Changes the input of a compressor, and keeps its error.

    `state` is a dict of one parameter's elements (a part of it, where ranks own parts). It is checkpointed. Put new
    tensors into it, never change one in place: an overflow anywhere takes the step back. Tensors of floating point
    are taken to be in the gradient's units: with a loss scale they are kept without it, and come and go with it.

    Optional: ``result(aggregate, state) -> Tensor``, called on all ranks with the decoded mean, gives the gradient, for
    methods that send differences; its state is one more dict, the same on all ranks. With it, a rank's own part goes
    through `before` and `after` too, without loss. ``owner``: another plug-in for the owner's encoding of the mean;
    without it, this one. ``unscaled = True``: `x`, `decoded` and `state` are without the loss scale. ``sums = False``:
    the sum of the decoded codes over the steps is not the sum of the gradients. ``owed``: names of tensors in `state`
    that hold the residual, by element, for checkpoints that load at another world size; others are averaged over the
    ranks.
    """

    def before(self, x: Tensor, state: State) -> Tensor:
        """The elements to encode instead of `x` (float32 ``[numel]``, not to be changed)."""
        ...

    def after(self, x: Tensor, decoded: Tensor, state: State) -> None:
        """Update `state`: `x` is the result of `before`, `decoded` the elements that all ranks decode of its code."""
        ...


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """The error is added to the next gradient: e' = (x + e) - decode(encode(x + e)).

    The sum of the decoded codes of all steps is then the sum of the gradients, but for the last residual. Seide et al.,
    "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., arXiv 1901.09847.

    Args:
        decay: times the error before it is added, above 0, at most 1: what waits long counts less.

    Raises:
        InvalidArgumentError: a decay out of that range.
    """

    decay: float = 1.0
    owed: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        values.number("ErrorFeedback", "decay", self.decay, "above 0 and at most 1", lambda it: 0 < it <= 1)

    def __repr__(self) -> str:
        return "ErrorFeedback()" if self.decay == 1 else f"ErrorFeedback(decay={self.decay!r})"

    @property
    def sums(self) -> bool:
        return self.decay == 1

    def before(self, x: Tensor, state: State) -> Tensor:
        return x + (self.decayed(state["residual"]) if "residual" in state else 0.0)

    def decayed(self, residual: Tensor) -> Tensor:
        """As it is added."""
        return residual if self.decay == 1 else residual * self.decay

    def after(self, x: Tensor, decoded: Tensor, state: State) -> None:
        state["residual"] = x - decoded


@dataclasses.dataclass(frozen=True)
class EF21:
    """Ranks send the difference between their gradient and an estimate that sender and receivers keep: g' = g + C(x -
    g).

    The mean of the estimates takes the gradient's place. Richtárik, Sokolov, Fatkhullin, arXiv 2106.05203, algorithm 1;
    the owner's second encoding feeds back its error of the mean difference, as EF21-BC does (arXiv 2110.03294).
    """

    owner: ClassVar[Feedback] = ErrorFeedback()

    def before(self, x: Tensor, state: State) -> Tensor:
        return x - state.get("estimate", 0.0)

    def after(self, x: Tensor, decoded: Tensor, state: State) -> None:
        state["estimate"] = decoded + state.get("estimate", 0.0)

    def result(self, aggregate: Tensor, state: State) -> Tensor:
        mean: Tensor = aggregate + state.get("mean", 0.0)
        state["mean"] = mean
        return mean


def feedback_of(error_feedback: Any) -> Feedback | None:
    """The plug-in for a compressor's ``error_feedback``: True is `ErrorFeedback`, False and None are none.

    Raises:
        InvalidArgumentError: anything else without methods `before` and `after`.
    """
    if error_feedback is None or error_feedback is False:
        return None
    if error_feedback is True:
        return ErrorFeedback()
    if isinstance(error_feedback, type) or not isinstance(error_feedback, Feedback):
        raise InvalidArgumentError(
            f"error_feedback must be True, False or an object with methods before(x, state) and"
            f" after(x, decoded, state), not {error_feedback!r}"
        )
    return error_feedback
