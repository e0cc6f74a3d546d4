"""The updates of an owner by the sum of the ranks' pushes: assignment, a function, or an optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ringdp.errors import InvalidArgumentError

Updater: TypeAlias = Callable[[str, Tensor, Tensor], None]
"""``updater(key, sum, value)``: changes `value`, this rank's slice of the key, in place."""


class Update(Protocol):
    """Of all keys of a store, on one rank."""

    @property
    def assigns(self) -> bool:
        """Whether the sum becomes the value: it may be written there at once."""

    def describe(self) -> str:
        """The description, which must be equal on all ranks; it may change between pushes."""

    def apply(self, values: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        """Change the slices of the keys that were pushed, by name, in place."""


class Assign:
    """MXNet's without an optimizer: a key's value is the last sum."""

    assigns = True

    def describe(self) -> str:
        return "no optimizer"

    def apply(self, values: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        for name, total in sums.items():
            if values[name] is not total:
                values[name].copy_(total)


class Callback:
    """A function of the user."""

    assigns = False

    def __init__(self, updater: Updater) -> None:
        if not callable(updater):
            raise InvalidArgumentError(f"an updater is a function (key, sum, value), not {type(updater).__name__}")
        self._updater = updater

    def describe(self) -> str:
        name = getattr(self._updater, "__qualname__", type(self._updater).__qualname__)
        return f"the updater {name}"

    @torch.no_grad()
    def apply(self, values: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        for name, total in sums.items():
            if total.numel():
                self._updater(name, total, values[name])


class Optimizer:
    """One of torch.optim, or another class with its constructor.

    Args:
        kind: the class.
        numbers: its arguments.

    Raises:
        InvalidArgumentError: it cannot be made with these, or does not work element by element.
    """

    assigns = False

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], numbers: Mapping[str, Any]) -> None:
        require_elementwise(kind, numbers)
        self.name: str = getattr(kind, "__qualname__", repr(kind))
        self._kind, self._numbers = kind, dict(numbers)
        self._made: torch.optim.Optimizer | None = None
        self._known: dict[str, Tensor] = {}
        self._described: tuple[dict[str, Any], str] = {}, ""

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """This rank's, whose parameters are its slices."""
        if self._made is None:
            placeholder = torch.zeros(0, dtype=torch.float32, device="cpu")
            self._made = self._kind([placeholder], **self._numbers)
            self._made.param_groups[0]["params"].clear()
        return self._made

    def describe(self) -> str:
        numbers = self.numbers()
        if numbers != self._described[0]:
            said = ", ".join(f"{name}={_number(it)}" for name, it in numbers.items())
            self._described = numbers, f"{self.name}({said})"
        return self._described[1]

    def apply(self, values: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
        optimizer = self.torch_optimizer
        self._learn(values)
        if (rate := _plain_rate(optimizer)) is not None:
            for name, total in sums.items():
                values[name].add_(total, alpha=-rate)
            return
        stepped = []
        for name, total in sums.items():
            if total.numel():
                values[name].grad = total
                stepped.append(values[name])
        optimizer.step()
        for value in stepped:
            value.grad = None

    def state_of(self, value: Tensor) -> dict[str, Any]:
        """The optimizer's state of a slice: tensors of its shape, and numbers."""
        return dict(self.torch_optimizer.state.get(value, {}))

    def set_state(self, value: Tensor, state: dict[str, Any]) -> None:
        self.torch_optimizer.state[value] = state

    def numbers(self) -> dict[str, Any]:
        """The settings now, such as the learning rate."""
        return {name: it for name, it in self.torch_optimizer.param_groups[0].items() if name != "params"}

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        self.torch_optimizer.param_groups[0].update(numbers)

    def renewed(self) -> Optimizer:
        """Another one with these settings, without a state."""
        other = Optimizer(self._kind, self._numbers)
        other.set_numbers(self.numbers())
        return other

    def _learn(self, values: Mapping[str, Tensor]) -> None:
        if len(values) == len(self._known):
            return
        for name, value in values.items():
            if name not in self._known:
                self._known[name] = value
                if value.numel():
                    self.torch_optimizer.param_groups[0]["params"].append(value)


_PLAIN = {"momentum": 0, "weight_decay": 0, "maximize": False, "foreach": None, "differentiable": False, "fused": None}


def _plain_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The rate of an SGD that only adds, which a small key would spend ten times the sum's time to call; else None.
    Nobody sees its steps: it has no hooks, and no scheduler counts them."""
    if type(optimizer) is not torch.optim.SGD or "step" in vars(optimizer):
        return None
    numbers, hooks = optimizer.param_groups[0], vars(optimizer)
    if any(numbers[name] != plain for name, plain in _PLAIN.items()) or type(numbers["lr"]) is not float:
        return None
    return None if hooks["_optimizer_step_pre_hooks"] or hooks["_optimizer_step_post_hooks"] else numbers["lr"]


def require_elementwise(kind: Callable[..., torch.optim.Optimizer], numbers: Mapping[str, Any]) -> None:
    """Two steps of a whole tensor give the bits of two steps of its halves: then slices can be updated by themselves.

    Raises:
        InvalidArgumentError: they do not, or the optimizer cannot be tried.
    """
    name = getattr(kind, "__qualname__", repr(kind))
    if not callable(kind):
        raise InvalidArgumentError(f"an optimizer is a class of torch.optim or one of its names, not {kind!r}")
    for key, value in numbers.items():
        if any(isinstance(it, float) and math.isnan(it) for it in (value if isinstance(value, tuple) else (value,))):
            raise InvalidArgumentError(f"{name}: {key} must be a number, not {value!r}")
        if callable(value) or isinstance(value, list | dict | Tensor):
            raise InvalidArgumentError(f"{name}: {key} must be a number, a text or a tuple of them, not {value!r}")
    generator = torch.Generator(device="cpu").manual_seed(0)
    half = 128
    start, *gradients = (
        torch.randn(2 * half, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)
    )
    whole, halves = [start.clone()], [start[:half].clone(), start[half:].clone()]
    try:
        for tensors in (whole, halves):
            optimizer = kind(tensors, **numbers)
            for gradient in gradients:
                for tensor, part in zip(tensors, gradient.split(gradient.numel() // len(tensors)), strict=True):
                    tensor.grad = part.clone()
                optimizer.step()
    except Exception as error:
        raise InvalidArgumentError(f"the store cannot use {name}: {type(error).__name__}: {error}") from error
    if not torch.equal(whole[0].view(torch.int32), torch.cat(halves).view(torch.int32)):
        raise InvalidArgumentError(
            f"the store cannot use {name}, which does not treat each element by itself (norms, matrices): use RingDP"
            " with it instead"
        )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# MXNet's names of optimizers and their arguments, and torch's.
_NAMES: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "nag": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
}
_ARGUMENTS = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
_OWN_ARGUMENTS = {"rmsprop": {"rho": "alpha", "gamma1": "alpha"}}


def resolve(
    optimizer: str | Callable[..., torch.optim.Optimizer], numbers: Mapping[str, Any]
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """torch's class and arguments for MXNet's names; a class stays; MXNet's names of arguments fit it too.

    Raises:
        InvalidArgumentError: a name that is not known, or an argument that torch's class does not have.
    """
    kind: Callable[..., torch.optim.Optimizer]
    given = dict(numbers)
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name not in _NAMES:
            raise InvalidArgumentError(
                f"unknown optimizer {optimizer!r}: give a class of torch.optim, or one of {', '.join(_NAMES)}"
            )
        kind = _NAMES[name]
        if name == "nag":
            given["nesterov"] = True
        renamed = _ARGUMENTS | _OWN_ARGUMENTS.get(name, {})
    else:
        kind, renamed = optimizer, _ARGUMENTS
    given = {renamed.get(key, key): value for key, value in given.items()}
    if "beta1" in given or "beta2" in given:
        given["betas"] = (given.pop("beta1", 0.9), given.pop("beta2", 0.999))
    with_names = _parameters(kind)
    for key in given:
        if with_names is not None and key not in with_names:
            raise InvalidArgumentError(
                f"{getattr(kind, '__qualname__', kind)} has no argument {key!r}; it has {', '.join(with_names)}"
            )
    return kind, given


def _parameters(kind: Callable[..., Any]) -> Sequence[str] | None:
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):
        return None
    if any(it.kind is it.VAR_KEYWORD for it in signature.parameters.values()):
        return None
    return [name for name in signature.parameters if name != "params"]
