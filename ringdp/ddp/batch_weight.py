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

from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.mixed_precision import in_backward
from ringdp.errors import InvalidArgumentError, InvalidStateError

MODES = ("samples", "call")


class BatchWeight(Feature):
    """The weight of each forward of one RingDP. Used by the thread that calls forward.

    Args:
        mode: one of `MODES`, or None: all ranks count the same.

    Raises:
        InvalidArgumentError: another value.
    """

    def __init__(self, mode: str | None) -> None:
        if mode is not None and (not isinstance(mode, str) or mode not in MODES):
            raise InvalidArgumentError(
                "RingDP's weight must be 'samples' (the first dimension of the first tensor that the forward gets),"
                f" 'call' (what set_weight gives before each forward) or None (all count the same), not {mode!r}"
            )
        self.mode = mode
        self._given: float | None = None

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        return {} if self.mode is None else {"weight": ""}

    def settings(self) -> dict[str, str]:
        return {} if self.mode is None else {"weight": self.mode}

    def set(self, weight: Any) -> None:
        """The next forward's weight: a number, or a tensor with one element."""
        if self.mode is None:
            raise InvalidStateError('set_weight: make RingDP with weight="call" (or "samples"), on all ranks')
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

    def announce(self, ddp: FeaturedDDP, inputs: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        """Called in a forward, with its arguments."""
        if self.mode is None or not torch.is_grad_enabled() or in_backward():
            return
        training = None if ddp._join_config.enable else ddp.module.training
        ddp.reducer.announce_weight(self.take(inputs, keywords), ddp.require_backward_grad_sync, training)

    def shadow(self, ddp: FeaturedDDP) -> None:
        """Called on a rank that has run out of input (`Join`), in a forward of the others."""
        if self.mode is not None:
            ddp.reducer.join.shadow_weight()


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
