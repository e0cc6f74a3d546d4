"""The largest elements by place and value; the others are the residual."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ringdp import values
from ringdp.compression.codecs.arguments import check_clip, check_fraction
from ringdp.compression.codecs.checks import check_payload
from ringdp.compression.feedback import Feedback, State
from ringdp.compression.methods import sparse
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.compression.registry import register

_CAP = 2  # no more than so many times what is asked for
_GAIN = 0.4  # of the controller: how the number of elements above a threshold falls with it, in tails of gradients
_NEAR = 0.02  # an estimate that near to what was expected: the next step may do without


@register("topk")
@dataclasses.dataclass(frozen=True)
class TopK:
    """About the `fraction` largest elements of each part of a parameter: 27 bits for each of them.

    They are those above a threshold, so one pass finds them and updates the residual: no sorting. The
    threshold is estimated from a histogram of a sample until it hardly changes from step to step, and then follows the
    numbers found; where these are off by more than a factor of 2 it is estimated anew, and where that fails too (many
    magnitudes are equal, or the sample is unlike the rest) it is found exactly: then the fraction is sent to the
    element, of equals the first. No more than twice the fraction is sent. Owners add what the ranks sent and send the
    union of it (Li, Hoefler, "Near-Optimal Sparse Allreduce", PPoPP 2022, arXiv 2201.07598), so all ranks have the same
    bits. Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv 1704.05021; for
    momentum see `DGC`.

    Args:
        fraction: of elements that are sent, above 0, at most 1.
        ramp_steps: over so many steps, from the first on, the fraction falls from 1/4 by equal factors (Lin et al.,
            arXiv 1712.01887, section 3.3).
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a fraction out of that range, or a number of steps that is not a whole number from 0 on.
    """

    fraction: float = 0.01
    ramp_steps: int = 0
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "merge"
    fixed_size: ClassVar[bool] = False
    carries_nan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction("TopK", self.fraction)
        values.whole("TopK", "ramp_steps", self.ramp_steps, least=0)

    def fraction_at(self, step: int) -> float:
        if step >= self.ramp_steps or self.fraction >= 0.25:
            return self.fraction
        return float(0.25 * (self.fraction / 0.25) ** (step / self.ramp_steps))

    def compress(self, x: Tensor, info: Info) -> Payload:
        return self._select(x, None, info)[0]

    def compress_with_residual(
        self, x: Tensor, residual: Tensor, info: Info, room: Tensor | None = None
    ) -> tuple[Payload, Tensor]:
        """As `compress`, of `x` and the `residual` of earlier ones; and the new residual, in `room` where that can be.

        `room` is not the memory of `residual`, which may be read again.
        """
        payload, left = self._select(x, residual, info, room)
        assert left is not None
        return payload, left

    def _select(
        self, x: Tensor, residual: Tensor | None, info: Info, room: Tensor | None = None
    ) -> tuple[Payload, Tensor | None]:
        scale = info.loss_scale
        wanted = max(1, round(self.fraction_at(info.step) * info.numel))
        expected = float(info.state.get("threshold", 0.0)) * scale
        trusted = expected > 0.0 and bool(info.state.get("trusted", False))
        threshold = expected
        if trusted:
            code, left, found = sparse.select(x, residual, scale, threshold, _CAP * wanted, room)
            trusted = wanted / _CAP <= found <= _CAP * wanted
        if not trusted:
            threshold = sparse.threshold_for(x, residual, scale, wanted)
            code, left, found = sparse.select(x, residual, scale, threshold, _CAP * wanted, room)
            trusted = abs(threshold - expected) <= _NEAR * expected
        too_few = found < wanted / _CAP and threshold > sparse.LEAST_THRESHOLD
        if too_few or found > _CAP * wanted:
            threshold, equals = sparse.exact_cut(x, residual, scale, wanted)
            code, left, _ = sparse.select(x, residual, scale, threshold, wanted, room, equals)
            found, trusted = wanted, False
        share = min(max(found / wanted, 1 / _CAP), _CAP)
        info.state["threshold"] = threshold * share**_GAIN / scale
        info.state["trusted"] = trusted
        return (code,), left

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        return self.decompress_into(payload, info, None)

    def decompress_into(self, payload: Payload, info: Info, out: Tensor | None) -> Tensor:
        """As `decompress`, in the flat `out` where that can be: a pass over memory less than a copy there."""
        return sparse.decode(check_payload("TopK", payload), info.numel, out)

    def entries(self, payload: Payload) -> int:
        """How many elements it holds."""
        return sparse.entries(check_payload("TopK", payload))

    def merge(
        self, payloads: Sequence[Payload], info: Info, divisor: float, residual: Tensor | None, back: float
    ) -> Payload:
        codes = [check_payload("TopK", payload) for payload in payloads]
        return (sparse.merge(codes, info.numel, divisor, residual, back),)


@dataclasses.dataclass(frozen=True)
class DGC:
    """Error feedback with momentum on the ranks, for an optimizer without: ``TopK(error_feedback=DGC(0.9))``.

    Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv 1712.01887: each rank adds up its velocity instead of its
    gradient, so that elements that waited long arrive with the momentum they would have had (section 3.2, momentum
    correction); velocities of sent elements begin anew (3.3, momentum factor masking); gradients are clipped before
    they are added (3.2, local gradient clipping). Use SGD with ``momentum=0``.

    Args:
        momentum: of the velocities.
        clip: the largest norm of a part's gradient on a rank, without loss scale; None: any.
        masking: velocities of sent elements begin anew.

    Raises:
        InvalidArgumentError: a momentum outside of [0, 1), a clip that is not positive and finite, masking that is not
            a bool.
    """

    momentum: float = 0.9
    clip: float | None = None
    masking: bool = True
    owed: ClassVar[tuple[str, ...]] = ("residual",)
    unscaled: ClassVar[bool] = True
    sums: ClassVar[bool] = False

    def __post_init__(self) -> None:
        values.number("DGC", "momentum", self.momentum, "from 0 on and below 1", lambda it: 0 <= it < 1)
        check_clip("DGC", self.clip)
        values.flag("DGC", "masking", self.masking)

    def before(self, x: Tensor, state: State) -> Tensor:
        if self.clip is not None:
            x = x * (self.clip / x.norm().clamp_min(self.clip))
        velocity = x + self.momentum * state["velocity"] if "velocity" in state else x.clone()
        state["velocity"] = velocity
        return velocity + state.get("residual", 0.0)

    def after(self, x: Tensor, decoded: Tensor, state: State) -> None:
        state["residual"] = x - decoded
        if self.masking:
            state["velocity"] = torch.where(decoded == 0, state["velocity"], 0.0)
