"""Loss scaling that agrees across ranks: `GradScaler`, with torch's API and state dict.

The reduction that averaged the gradients reports on every rank whether they overflowed: no gradient is read twice, and
the ranks need no further communication.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _MultiDeviceReplicator
from torch.autograd import Variable

from ringdp.ddp.loss_scale import LossScale
from ringdp.ddp.overflow import Overflow, of_all_wrappers
from ringdp.errors import GradientOverflowError
from ringdp.hooks.names import name_of

_log = logging.getLogger("ringdp.amp")

_REMEMBERED_STEPS = 100
_MOST_SKIPPED_IN_A_ROW = 50


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for models in a `RingDP`: the same arguments, methods and state dict, in both directions.

    What differs:

    - A gradient that RingDP reduced over ``ring`` and that was not written to since is only multiplied by 1/scale;
      whether it is finite came with it. All others (of parameters without RingDP, changed by the script, sharded,
      reduced by a communication hook or another backend) are checked as torch does, each rank its own.
    - RingDP learns the scale of each backward, so that what compressors leave out is kept in unscaled units.
    - A skipped step is logged with the first parameter, the ranks that brought an infinity or a NaN, and how many of
      the last 100 steps were skipped: once for each parameter and ranks.
    - After 50 skipped steps in a row `update` raises, on every rank.

    A write that torch's version counter does not see (``p.grad.data``, numpy) is not seen here either.

    Args:
        device: "cuda" or "cpu".
        init_scale: as torch's.
        growth_factor: as torch's.
        backoff_factor: as torch's.
        growth_interval: as torch's.
        enabled: as torch's.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._loss_scale = LossScale(self)
        self._skips = _Skips()
        self._only_looks = False  # within _check_inf_per_device: gradients stay scaled
        self._decided: dict[int, bool] = {}  # by id of optimizer: was its step skipped?

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each of an iterable of them, by the scale; as torch's."""
        scaled = super().scale(outputs)
        return self._announced(scaled, self._loss_scale.read()) if self._enabled else scaled

    def _announced(self, scaled: Any, scale: float) -> Any:
        """`scaled`, whose backward gives the reducers its scale and at its end reads whether they saw an overflow."""
        if isinstance(scaled, Tensor):
            if scaled.grad_fn is not None:
                scaled.grad_fn.register_prehook(_Announcement(scale))
            return scaled
        if isinstance(scaled, (list, tuple)):
            for each in scaled:
                self._announced(each, scale)
            return scaled
        return (self._announced(each, scale) for each in scaled)  # torch's own is lazy here, too

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """As torch's, but gradients that their reduction reported finite are only multiplied."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids = {id(parameter) for parameter in parameters}
        known = {one: one.finite() for one in of_all_wrappers() if one.reduces_any(ids)}
        finite = {number for of_one in known.values() for number in of_one if number in ids}
        multiplied: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        others: list[Any] = []
        for parameter in parameters:
            if id(parameter) not in finite or parameter.grad.is_sparse:
                others.append(parameter)
            elif parameter.grad.dtype == torch.float16 and not allow_fp16:
                others.append(parameter)  # torch refuses it
            else:
                multiplied[parameter.grad.device, parameter.grad.dtype].append(parameter.grad)
        verdicts = super()._unscale_grads_(_Parameters(others), inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        factors, finites = _MultiDeviceReplicator(inv_scale), _MultiDeviceReplicator(found_inf.new_zeros(()))
        for (device, _), gradients in multiplied.items():
            if not self._only_looks:
                torch._foreach_mul_(gradients, factors.get(device))
            verdicts.setdefault(device, finites.get(device))
        for one, of_one in known.items():
            one.keep(of_one if self._only_looks else of_one - ids)
            culprit = one.overflow()
            if culprit is not None:
                self._skips.culprit = culprit
        return verdicts

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For optimizers that unscale by themselves (``fused=True``): gradients known to be finite stay scaled."""
        self._only_looks = True
        try:
            return super()._check_inf_per_device(optimizer)
        finally:
            self._only_looks = False

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        skipped = any(verdict.item() for verdict in optimizer_state["found_inf_per_device"].values())
        self._decided[id(optimizer)] = skipped
        if not skipped:
            return optimizer.step(*args, **kwargs)
        if self._skips.culprit is None:
            self._skips.culprit = _first_of(optimizer)
        return None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, as torch's, and log skipped steps.

        Raises:
            GradientOverflowError: no step was taken in 50 updates.
        """
        if not self._enabled:
            return
        skipped = any(self._was_skipped(number, state) for number, state in self._per_optimizer_states.items())
        self._decided.clear()
        super().update(new_scale)
        self._loss_scale.prefetch()
        self._skips.add(skipped, self)

    def _was_skipped(self, optimizer: int, state: dict[str, Any]) -> bool:
        if optimizer in self._decided:
            return self._decided[optimizer]
        # The optimizer used the verdict in its step, on its device; this does not wait for the device.
        verdicts = [verdict for verdict in state["found_inf_per_device"].values() if verdict.device.type == "cpu"]
        return any(verdict.item() for verdict in verdicts) if verdicts else self._skips.culprit is not None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_loss_scale": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._loss_scale = LossScale(self)


class _Announcement:
    """A hook of a scaled output, called when its backward begins: gives the reducers its scale, and has `_look` called
    when they are done."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, gradients: Any) -> None:
        from ringdp import _C

        _C.note_loss_scale(self._scale)
        for one in of_all_wrappers():
            one.watch()
        # The reducers' callbacks come later in the queue than this one; what it adds comes after theirs.
        engine = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(_look))


def _look() -> None:
    for one in of_all_wrappers():
        one.note()


class _Skips:
    """Which of the last steps were skipped, and by which ranks' gradients."""

    def __init__(self) -> None:
        self.culprit: Overflow | None = None  # since the last update
        self._last: deque[bool] = deque(maxlen=_REMEMBERED_STEPS)
        self._in_a_row = 0
        self._described: tuple[Any, ...] | None = None

    def add(self, skipped: bool, scaler: GradScaler) -> None:
        culprit, self.culprit = self.culprit, None
        self._last.append(skipped)
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped:
            return
        if culprit is None:
            culprit = Overflow("a parameter")
        how_often = f"{sum(self._last)} of the last {len(self._last)} steps were skipped"
        if self._in_a_row >= _MOST_SKIPPED_IN_A_ROW:
            raise GradientOverflowError(
                f"{self._in_a_row} steps in a row were skipped: {culprit}; {how_often}; the loss scale is "
                f"{scaler.get_scale():g}. So small a scale overflows nothing: look for a NaN or an infinity in the "
                "inputs, the parameters or the loss (torch.autograd.set_detect_anomaly names the operation).",
                rank=culprit.rank,
                name=culprit.parameter,
                cause=str(culprit),
                advice="look for a NaN or an infinity in the inputs, the parameters or the loss",
            )
        what = (culprit.parameter, culprit.ranks)
        if what == self._described:
            return
        self._described = what
        # All ranks have the same line: rank 0 logs it above debug level.
        level = logging.WARNING if culprit.ranks is None or culprit.rank == 0 else logging.DEBUG
        _log.log(level, "step skipped: %s; %s; the loss scale is now %g", culprit, how_often, scaler.get_scale())


@dataclass(frozen=True)
class _Parameters:
    """What torch's scaler reads of an optimizer: some of its parameters."""

    parameters: list[Any]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self.parameters}]


def _first_of(optimizer: torch.optim.Optimizer) -> Overflow | None:
    """The first gradient that is not finite, by this rank's own look."""
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not bool(torch.isfinite(values).all()):
                return Overflow(name_of(parameter) or f"{type(optimizer).__name__}'s parameter {i}")
    return None
