"""The outer optimizer: applies the mean of all ranks' changes to the global parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ringdp import values
from ringdp.errors import InvalidArgumentError
from ringdp.rounds.fragments import parts

Outer: TypeAlias = Mapping[str, Any] | str | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""``"auto"``, ``{"lr": 0.7, "momentum": 0.9, "nesterov": True}``, or a function that makes an optimizer of a list of
parameters."""

AUTO = "auto"
GROWS = 9
MOST_MOMENTUM = 0.8
"""The momentum of "auto" in round n is n / (n + GROWS), at most that: the velocity is a mean over the last tenth of the
rounds, or over five. Measured, not derived (docs/lab/far_apart.md)."""
DEFAULT: Outer = AUTO

DEFAULT_SPARSE: Mapping[str, Any] = {"lr": 1.0, "momentum": 0.0}
"""With `ringdp.compression.Sparse2`: changes that wait in its residual act as a momentum does."""
_KEYS = {"lr": 1.0, "momentum": 0.0, "nesterov": False}


class OuterStep(Protocol):
    """Of one fragment.

    Attributes:
        averages: the new global parameters are the mean of all ranks' parameters.
    """

    averages: bool

    def step(self, mean: Tensor) -> None:
        """`mean`, of the ranks' changes (before minus after), may be overwritten."""
        ...

    def state(self) -> dict[str, Any]:
        """Tensors [numel] and numbers."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...


class Nesterov:
    """torch.optim.SGD's formula, by operations that round alike on every processor: ranks keep the same bits.

    Each multiplication and addition is an operation of its own; one that does both rounds once or twice, depending on
    the instruction set, and ranks with different processors would drift apart.

    Args:
        grows: above 0: the momentum of step n, from 1, is n / (n + grows), at most `momentum`.
    """

    def __init__(self, total: Tensor, lr: float, momentum: float, nesterov: bool, grows: int = 0) -> None:
        self._total, self._lr, self._most, self._nesterov, self._grows = total, lr, momentum, nesterov, grows
        self._buffer: Tensor | None = None
        self._steps = 0
        self.averages = lr == 1 and momentum == 0

    @property
    def momentum(self) -> float:
        """Of the last step."""
        return min(self._most, self._steps / (self._steps + self._grows)) if self._grows else self._most

    def step(self, mean: Tensor) -> None:
        self._steps += 1
        momentum = self.momentum
        first = momentum != 0 and self._buffer is None
        if first:
            self._buffer = mean.clone()
        for place in parts(mean.numel()):
            change = mean[place]
            if self._buffer is not None:
                velocity = self._buffer[place]
                if not first:
                    velocity.mul_(momentum).add_(change)
                if self._nesterov:
                    change.add_(velocity * momentum)
                else:
                    change.copy_(velocity)
            if self._lr != 1:
                change.mul_(self._lr)
            self._total[place].sub_(change)

    def state(self) -> dict[str, Any]:
        counted = {"steps": self._steps} if self._grows else {}
        return counted if self._buffer is None else {"momentum_buffer": self._buffer} | counted

    def load(self, state: Mapping[str, Any]) -> None:
        self._buffer, self._steps = None, int(state.get("steps", 0))
        if "momentum_buffer" in state:
            self._buffer = state["momentum_buffer"].to(self._total.device, self._total.dtype, copy=True)


class OfTorch:
    """Any optimizer on the flat global parameters."""

    averages = False

    def __init__(self, total: Tensor, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._parameter = torch.nn.Parameter(total)  # the same memory
        self._optimizer = made(make, [self._parameter])

    def step(self, mean: Tensor) -> None:
        self._parameter.grad = mean
        with torch.enable_grad():
            self._optimizer.step()
        self._parameter.grad = None

    def state(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._parameter, {}))

    def load(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": {0: dict(state)} if state else {}})


def made(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Raises InvalidArgumentError where that is not an optimizer."""
    try:
        optimizer = make(parameters)
    except Exception as error:
        raise InvalidArgumentError(
            f"outer could not be made of a list of parameters ({error}): give a dict like {{'lr': 0.7,"
            " 'momentum': 0.9, 'nesterov': True}}, or for example functools.partial(torch.optim.Adam, lr=0.1)"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"outer made a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def numbers_of(outer: Mapping[str, Any]) -> tuple[float, float, bool]:
    """lr, momentum, nesterov. Raises InvalidArgumentError."""
    if unknown := [key for key in outer if key not in _KEYS]:
        raise InvalidArgumentError(
            f"outer has {unknown[0]!r}, which is not one of {', '.join(_KEYS)}: for other optimizers give a function"
            " that makes one, for example functools.partial(torch.optim.AdamW, lr=0.01)"
        )
    chosen = _KEYS | dict(outer)
    lr, momentum, nesterov = chosen["lr"], chosen["momentum"], chosen["nesterov"]
    rate = values.number("outer", "lr", lr, "above 0", lambda it: it > 0)
    kept = values.number("outer", "momentum", momentum, "from 0 to below 1", lambda it: 0 <= it < 1)
    if values.flag("outer", "nesterov", nesterov) and kept == 0:
        raise InvalidArgumentError("outer: nesterov=True needs a momentum above 0")
    return rate, kept, nesterov


def outer_steps(outer: Outer, totals: Sequence[Tensor]) -> list[OuterStep]:
    """One for each fragment's global parameters."""
    if outer == AUTO:
        return [Nesterov(total, 1.0, MOST_MOMENTUM, True, GROWS) for total in totals]
    if isinstance(outer, Mapping):
        lr, momentum, nesterov = numbers_of(outer)
        return [Nesterov(total, lr, momentum, nesterov) for total in totals]
    assert callable(outer)
    return [OfTorch(total, outer) for total in totals]


def describe(outer: Outer) -> str:
    """A description that is equal on all ranks. Raises InvalidArgumentError."""
    if outer == AUTO:
        return f"auto(lr=1, momentum=n/(n+{GROWS}) to {MOST_MOMENTUM:g}, nesterov=True)"
    if isinstance(outer, Mapping):
        lr, momentum, nesterov = numbers_of(outer)
        return f"SGD(lr={lr:g}, momentum={momentum:g}, nesterov={nesterov})"
    if not callable(outer):
        raise InvalidArgumentError(f'outer must be "auto", a dict, or make a torch.optim.Optimizer, not {outer!r}')
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    optimizer = made(outer, [parameter])
    parameter.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    try:
        optimizer.step()
    except Exception as error:
        raise InvalidArgumentError(
            f"outer's {type(optimizer).__name__} cannot make a step by a dense gradient alone ({error}): take one that"
            " needs no closure, for example functools.partial(torch.optim.Adam, lr=0.1)"
        ) from error
    settings = ", ".join(f"{key}={value!r}" for key, value in sorted(optimizer.defaults.items()))
    return f"{type(optimizer).__name__}({settings})"


def class_of(outer: Outer) -> str:
    """Whose state fits: the name of the optimizer's class."""
    return describe(outer).partition("(")[0]
