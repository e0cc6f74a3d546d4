"""The parts of a Job: what newcomers get, and checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdp.elastic import transfer
from ringdp.elastic.loader import Loader
from ringdp.elastic.training import Training
from ringdp.errors import InvalidArgumentError
from ringdp.text import count


class Parts:
    """Invariant: `named` has all objects with a state that the user gave, under the name of their class, numbered from
    the second one of a class on.

    Args:
        who: of messages.
        lasts: newcomers may want them.

    Attributes:
        loaders: in the order in which they were made.
        epoch: that the training is in.

    Raises:
        InvalidArgumentError: one has no state, or newcomers cannot be sent it.
    """

    def __init__(self, who: str, training: Training, *, lasts: bool) -> None:
        for part in training.parts:
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise InvalidArgumentError(
                    f"{who}: a {type(part).__name__} has no state_dict and load_state_dict: a newcomer could not get it"
                )
            if lasts and (wrong := transfer.cannot_carry(part.state_dict())) is not None:
                raise InvalidArgumentError(
                    f"{who}: newcomers cannot be sent the state of a {type(part).__name__}, only tensors, numbers,"
                    f" text, and lists and dicts of them: {wrong}"
                )
        self._training = training
        self.named = _named(training.parts)
        self.loaders: list[Loader] = []
        self.epoch = 0

    def names(self) -> list[str]:
        """Of the parts and of what keeps the ranks together."""
        return list(dict.fromkeys([*self.named, type(self._training.part).__name__]))

    def state(self) -> dict[str, Any]:
        """Of each, and the place in the data."""
        return {name: part.state_dict() for name, part in self.named.items()} | {"ringdp": self.place()}

    def place(self) -> dict[str, Any]:
        """The step, the epoch, and where in it each loader is."""
        return {"step": self._training.step(), "epoch": self.epoch, "positions": self.positions()}

    def load(self, state: Mapping[str, Any]) -> None:
        """That of `state`, but for what the loaders and the training have."""
        for name, part in self.named.items():
            part.load_state_dict(state[name])
        self.epoch = state["ringdp"]["epoch"]

    def require_fit(self, state: Mapping[str, Any]) -> None:
        """Raises InvalidArgumentError where it is of other parts or loaders."""
        loaders = len(state.get("ringdp", {}).get("positions", ()))
        mine = self.names()
        if state.keys() != {*mine, "ringdp"} or loaders != len(self.loaders):
            raise InvalidArgumentError(
                f"Job.load_state_dict: the state is of {', '.join(sorted(state.keys() - {'ringdp'}))} and"
                f" {count(loaders, 'loader')}, this Job has {', '.join(sorted(mine))} and"
                f" {count(len(self.loaders), 'loader')}: make the same ones before"
            )

    def memory(self) -> dict[str, Tensor]:
        """The modules' tensors, by "part/name", into which a newcomer receives."""
        modules = {name: part for name, part in self.named.items() if isinstance(part, torch.nn.Module)}
        return {f"{name}/{key}": value for name, part in modules.items() for key, value in part.state_dict().items()}

    def of_one(self) -> Callable[[str], bool]:
        """Which tensors each rank may have different: see `Training.of_one`."""
        return self._training.of_one(self.named)

    def positions(self) -> list[dict[str, Any]]:
        return [loader.sampler.state_dict() for loader in self.loaders]

    def begin_again(self, positions: Sequence[Mapping[str, Any]]) -> None:
        """The loaders go on from there, with the members that there are."""
        for loader, position in zip(self.loaders, positions, strict=True):
            loader.members_changed(position)

    def described(self) -> list[str]:
        """What newcomers have to have alike."""
        return [*self.names(), *(f"loader with {line}" for one in self.loaders for line in one.described())]


def _named(parts: Sequence[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for part in parts:
        name = base = type(part).__name__
        number = 1
        while name in named:
            number += 1
            name = f"{base} {number}"
        named[name] = part
    return named
