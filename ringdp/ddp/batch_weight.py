"""The weight of a rank's batch in the average over the ranks: `RingDP(weight=…)` and `set_weight`.

The gradient of step t is sum(w * g) / sum(w) over all micro-batches of all ranks, where g is the gradient of a
micro-batch's mean loss and w the number of its samples, or of whatever the loss is a mean of. csrc/torch/reducer/
gradient_weights.h does the arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ringdp.ddp.mixed_precision import in_backward
from ringdp.errors import InvalidArgumentError, InvalidStateError

MODES = ("samples", "call")


class BatchWeight:
    """The weight of each forward of one RingDP. Used by the thread that calls forward.

    Args:
        mode: one of `MODES`.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._given: float | None = None

    @classmethod
    def checked(cls, mode: Any) -> BatchWeight | None:
        """Of RingDP's argument ``weight``; None where all ranks count the same.

        Args:
            mode: None, or one of `MODES`.

        Raises:
            InvalidArgumentError: another value.
        """
        if mode is None:
            return None
        if not isinstance(mode, str) or mode not in MODES:
            raise InvalidArgumentError(
                "RingDP's weight must be 'samples' (the first dimension of the first tensor that the forward gets),"
                f" 'call' (what set_weight gives before each forward) or None (all count the same), not {mode!r}"
            )
        return cls(mode)

    def set(self, weight: Any) -> None:
        """The next forward's weight: a number, or a tensor with one element."""
        try:
            self._given = float(weight)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"set_weight takes a number, or a tensor with one element, not {_shown(weight)}"
            ) from error

    def take(self, inputs: Iterable[Any], keywords: Mapping[str, Any]) -> float:
        """The weight of the forward that gets these arguments.

        Raises:
            InvalidStateError: it was not set.
            InvalidArgumentError: there is no tensor to count the samples of.
        """
        given, self._given = self._given, None
        if given is not None:
            return given
        if self.mode == "call":
            raise InvalidStateError(
                "RingDP(weight='call'): call set_weight(number of samples or tokens) before each forward that trains"
            )
        first = _first_tensor((*inputs, *keywords.values()))
        if first is None or first.dim() == 0:
            what = "is no tensor" if first is None else "is a tensor without dimensions first"
            raise InvalidArgumentError(
                f"RingDP(weight='samples') counts the first dimension of the first tensor that the forward gets, and "
                f"there {what}: call set_weight(number of samples) before the forward"
            )
        return float(first.shape[0])


class WeightedModule:
    """A part of RingDP, which brings the reducer.

    Attributes:
        _weight: of the batches; None where all ranks count the same.
    """

    reducer: Any
    module: Any
    require_backward_grad_sync: bool
    _join_config: Any
    _weight: BatchWeight | None

    def set_weight(self, weight: float | torch.Tensor) -> None:
        """Set the weight of the next forward's batch: the number of samples or tokens over which its loss is a mean.

        Call it before each forward that trains; with ``weight="samples"`` it takes the place of what is counted. A
        weight of 0 leaves this rank's gradients out, also if they are not finite.

        Args:
            weight: a finite number that is not negative, or a tensor with one.

        Raises:
            InvalidStateError: RingDP was made without ``weight``.
            InvalidArgumentError: not a number. One that is negative or not finite is an error of the forward, where
                the other ranks raise a MismatchError that names this rank.
        """
        if self._weight is None:
            raise InvalidStateError('set_weight: make RingDP with weight="call" (or "samples"), on all ranks')
        self._weight.set(weight)

    def _announce_weight(self, inputs: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        """Called in a forward, with its arguments."""
        if self._weight is None or not torch.is_grad_enabled() or in_backward():
            return
        training = None if self._join_config.enable else self.module.training
        self.reducer.announce_weight(self._weight.take(inputs, keywords), self.require_backward_grad_sync, training)

    def _shadow_weight(self) -> None:
        """Called on a rank that has run out of input (`Join`), in a forward of the others."""
        if self._weight is not None:
            self.reducer.shadow_weight()


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """In order, also inside lists, tuples, dicts and dataclasses; one of as many rows for a PackedSequence."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        inside: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, PackedSequence):
            return value.data.new_empty(int(value.batch_sizes[0]) if value.batch_sizes.numel() else 0)
        elif isinstance(value, (list, tuple)):
            inside = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
        found = _first_tensor(inside)
        if found is not None:
            return found
    return None


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
