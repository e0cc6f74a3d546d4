"""What keeps a Job's ranks together: the steps of a RingDP, or the rounds of a DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringdp import refusals
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError
from ringdp.rounds.diloco import DiLoCo


class Training(Protocol):
    """Of one Job.

    Attributes:
        part: the RingDP or DiLoCo.
        parts: of the state, what each rank keeps beside `carried`.
        module: of the user.
        group: of all ranks.
    """

    part: Any
    parts: list[Any]
    module: torch.nn.Module
    group: dist.ProcessGroup

    def step(self) -> int:
        """That this rank has made last."""
        ...

    def settings(self) -> dict[str, str]:
        """Which all ranks have alike."""
        ...

    def may_change(self) -> bool:
        """Whether ranks may come and go before this batch, which is the same on all ranks."""
        ...

    def busy(self) -> bool:
        """Whether this rank has gradients that are not averaged yet, which newcomers have not."""
        ...

    def carried(self) -> Any:
        """All ranks call it before the members change: what those have together, for `take`."""
        ...

    def take(self, carried: Any, step: int, *, new: bool) -> None:
        """All ranks call it after the change. `new`: this one has come."""
        ...

    def of_one(self, parts: Mapping[str, Any]) -> Callable[[str], bool]:
        """Whether ranks may have a tensor of that name, "part/key", different: newcomers get that of one of them."""
        ...

    def refuse_batches(self) -> None:
        """Raises InvalidArgumentError where ranks do not have batches together."""
        ...

    def follow(self, ask: Callable[[bool], None]) -> None:
        """In an elastic job: where ranks are not together before a batch, have `ask(ready)` called where they are.
        `ready`: this rank's training waits there."""
        ...

    def entered(self) -> None:
        """This rank has come, and has taken what the others have."""
        ...

    def state(self) -> dict[str, Any]:
        """For a checkpoint, beside that of the parts, by name; the same on all ranks, which all call it."""
        ...

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """When the parts have been loaded; all ranks call it."""
        ...


class Steps:
    """All ranks make each step together."""

    def __init__(self, model: RingDP, others: Sequence[Any]) -> None:
        self.part, self.module, self.group = model, model.module, model.process_group
        self.parts = list(others)

    def step(self) -> int:
        return int(self.part.reducer.report.steps())

    def settings(self) -> dict[str, str]:
        compression = self.part.ringdp_features[GradientCompression].chosen
        return self.part.ringdp_features.settings() | {"compression": str(compression)}

    def may_change(self) -> bool:
        return True

    def busy(self) -> bool:
        return bool(self.part.reducer.has_unaveraged())

    def carried(self) -> dict[str, Any] | None:
        if self.part.ringdp_features[GradientCompression].model is not None:
            return self.part.compression_state_dict(consolidated=True)
        return None

    def take(self, carried: dict[str, Any] | None, step: int, *, new: bool) -> None:
        self.part.begin_again(step)
        if carried is not None:
            self.part.load_compression_state_dict(carried)

    def of_one(self, parts: Mapping[str, Any]) -> Callable[[str], bool]:
        modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        return {f"{name}/{key}" for name, part in modules.items() for key, _ in part.named_buffers()}.__contains__

    def refuse_batches(self) -> None:
        pass

    def follow(self, ask: Callable[[bool], None]) -> None:
        pass

    def entered(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        self.part.begin_again(step)


class Rounds:
    """Each rank makes steps of its own, and all meet where a round ends. Only there the members change."""

    def __init__(self, rounds: DiLoCo, others: Sequence[Any]) -> None:
        self.part, self.module, self.group = rounds, rounds.model, rounds.process_group
        if isinstance(self.module, RingDP) and self.module.process_group.size() > 1:
            refusals.refuse("job", "sites")
        if rounds.described()["unequal"] == "True":
            refusals.refuse("job", "unequal rounds")
        rest = [part for part in others if part is not rounds]
        self.parts = [*([] if any(part is self.module for part in rest) else [self.module]), *rest]
        self._asked_at = 0

    def step(self) -> int:
        return self.part.step

    def settings(self) -> dict[str, str]:
        return self.part.described()

    def may_change(self) -> bool:
        """Once where a round has ended."""
        step = self.part.step
        if step == self._asked_at or step != self.part.ended_at:
            return False
        self._asked_at = step
        return True

    def busy(self) -> bool:
        return False

    def carried(self) -> dict[str, Any]:
        return self.part.state_dict(consolidated=True)

    def take(self, carried: Mapping[str, Any], step: int, *, new: bool) -> None:
        (self.part.take_over if new else self.part.share)(carried)
        self._asked_at = step

    def of_one(self, parts: Mapping[str, Any]) -> Callable[[str], bool]:
        return lambda name: name.partition("/")[0] in parts

    def refuse_batches(self) -> None:
        pass

    def follow(self, ask: Callable[[bool], None]) -> None:
        pass

    def entered(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {type(self.part).__name__: self.carried()}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        self.part.load_state_dict(state[type(self.part).__name__])


class OpenRounds(Rounds):
    """Rounds with a quorum, where a rank may be late: the members change where a turn ends, on the threads that end
    it."""

    def may_change(self) -> bool:
        return False

    def carried(self) -> dict[str, Any]:
        return self.part.state_of_turn()

    def refuse_batches(self) -> None:
        refusals.refuse("quorum", "job batches")

    def follow(self, ask: Callable[[bool], None]) -> None:
        self.part.follow_turns(ask)

    def entered(self) -> None:
        self.part.meet()

    def state(self) -> dict[str, Any]:
        return {type(self.part).__name__: self.part.state_dict(consolidated=True)}


def training_of(who: str, parts: Sequence[Any]) -> Training:
    """Raises InvalidArgumentError where these parts have no such one, or several."""
    rounds = [part for part in parts if isinstance(part, DiLoCo)]
    models = [part for part in parts if isinstance(part, RingDP) and not any(part is one.model for one in rounds)]
    if len(rounds) + len(models) != 1:
        raise InvalidArgumentError(
            f"{who} needs one RingDP or one DiLoCo among its parts, not {len(rounds) + len(models)}"
        )
    if not rounds:
        return Steps(models[0], parts)
    return (OpenRounds if "quorum" in rounds[0].described() else Rounds)(rounds[0], parts)
