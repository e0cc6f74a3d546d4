"""How the members of a Job change: who comes, who leaves, and what a newcomer is given."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from ringdp import __version__
from ringdp.elastic import transfer
from ringdp.elastic.board import Board, Ticket, World, prove
from ringdp.elastic.door import LOOK_S, Door
from ringdp.elastic.newcomer import Alive, wait_for_entry
from ringdp.elastic.parts import Parts
from ringdp.elastic.training import Training
from ringdp.errors import ExpelledError, HandshakeError, InvalidStateError
from ringdp.job import backend, elastic
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.text import number_of_ranks, ranks_by_number

_log = logging.getLogger("ringdp.elastic")
_SHARE = 0.005  # of the training's time that questions for newcomers may take
_FIRST_NOTICE_S = 10.0
_LONGEST_PAUSE_S = 5.0  # between two questions, also where they cost more
_REASON_BYTES = 200
_ANSWER = struct.Struct("<qq??dd")
_LONGEST_WAIT_S = 600.0  # for newcomers, where there are too few ranks


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Of one rank to the question for newcomers.

    Attributes:
        world: the number of the one that it has met; 0: none.
        least: with fewer ranks it waits.
        leaves: it wants to leave.
        busy: it has gradients that are not averaged yet, or operations of the script under way: newcomers have not.
        cost_s: what the last question has cost.
        step_s: a step takes.
    """

    world: int
    least: int
    leaves: bool
    busy: bool
    cost_s: float
    step_s: float


@dataclasses.dataclass(frozen=True)
class Change:
    """The members have changed; the same on all ranks but for `seconds`, and for `step` in rounds with a quorum.

    Attributes:
        step: the last one before it.
        before, now: how many ranks there were, and are.
        lost: those that died, by the number that each rank has for good: its rank at the start of the job, or the next
            number that was free when it came.
        left, joined: those that left by themselves, and that came.
        seconds: for which this rank waited; 0 for lost ranks, which the step itself has replaced.
    """

    step: int
    before: int
    now: int
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    seconds: float = 0.0


class Members:
    """The ranks of an elastic job, which come and go where all of them ask for it: before a step, or after a turn of
    rounds. Invariant: between two questions `numbers` are those of the group's present ranks but for ones that were
    lost since. Used by one thread at a time: the training thread, or the one that ends turns of rounds.

    Args:
        training: what keeps the ranks together.
        parts: what newcomers get.
        least: with fewer ranks the others wait for newcomers.
        most: nobody is let in beyond so many; None: no limit.

    Attributes:
        numbers: of the ranks, in their order: those that they have for good.
        number: this one's.
        changes: news of the members that nobody has taken yet.
        turns: how often newcomers came or ranks left.
        leaving: why this rank wants to leave; None: it does not. Any thread.
        over: nobody is let in any more.
    """

    def __init__(self, training: Training, parts: Parts, least: int, most: int | None) -> None:
        self._training, self._parts = training, parts
        self._group = group = training.group
        self._least = least
        self._until_question = 0
        self._asked = (0, time.monotonic(), 0.0)  # the step of the last question, when it was, and its seconds
        self.changes: list[Change] = []
        self.turns = 0
        self.leaving: str | None = None
        self.over = False
        self.numbers = elastic.places(group)
        self.number = self.numbers[group.rank()]
        self._door: Door | None = None
        origin = elastic.origin()
        if origin is not None:
            self._door = Door(group, self._ticket, most)
            training.follow(self._ask_after_turn)
            if not origin.outside:
                self._door.open()

    def close(self) -> None:
        """The training has ended."""
        if self._door is not None and not self.over:
            self.over = True
            self._door.close(over=True)

    def enter(self) -> None:
        """A newcomer becomes a member. Blocks until the others let it in."""
        origin = elastic.origin()
        if origin is not None and origin.outside and self._door is not None:
            self._join(origin, self._door)

    def ask_before_step(self) -> None:
        """As `ask`, where ranks may come and go, and as often as costs little. On all ranks before the same steps."""
        if self._door is None or self.over:
            return
        self._note_losses()
        self._until_question -= 1
        enough = self._group.size() >= self._least
        if self._training.may_change() and (self._until_question <= 0 or not enough):
            self._ask(self._door, ready=True)

    def _ask_after_turn(self, ready: bool) -> None:
        """As `_ask`, until it changes nothing: newcomers begin with that question. Also when this rank's script has
        called `close`: others may end a turn before they do."""
        before = -1
        while self._door is not None and before != self.turns:
            before = self.turns
            self._ask(self._door, ready=ready)

    def _ask(self, door: Door, *, ready: bool) -> None:
        """Let newcomers in, and those that want to leave out; on all ranks together. Where they are too few, they wait.

        Args:
            ready: this rank can leave, and a newcomer can have the state of its parts.

        Raises:
            InvalidStateError: nobody has come for ten minutes.
            SystemExit: this rank has left.
        """
        began = time.monotonic()
        self._question(door, ready)
        notice_s = began + _FIRST_NOTICE_S
        while self._group.size() < self._least:
            if time.monotonic() > notice_s:
                _log.warning("%s of %d: waits for newcomers", number_of_ranks(self._group.size()), self._least)
                notice_s += 2 * (notice_s - began)
            if time.monotonic() - began > _LONGEST_WAIT_S:
                raise InvalidStateError(
                    f"{number_of_ranks(self._group.size())} are left, and min_ranks={self._least}: nobody has come"
                    f" for {_LONGEST_WAIT_S:g} s"
                )
            time.sleep(LOOK_S)
            self._question(door, ready)

    def _question(self, door: Door, ready: bool) -> None:
        """All ranks learn which of them want to leave, and whether all have met newcomers."""
        from ringdp import _C

        training = self._training
        with door.held():
            began_s = time.monotonic()
            step, asked_s, cost_s = self._asked
            step_s = (began_s - asked_s) / max(training.step() - step, 1)
            world: World | None = None
            view = 0

            def ask() -> list[_Answer]:
                nonlocal world, view
                view = elastic.view_of(self._group)
                busy = training.busy() or _C.has_calls_in_flight(self._group)
                world = None if self.over else door.ready()
                number = 0 if world is None else world.number
                leaves = ready and self.leaving is not None
                mine = _Answer(number, self._least, leaves, busy, cost_s, step_s)
                data = _ANSWER.pack(*dataclasses.astuple(mine))
                said = all_gather_bytes(data, self._group, room=_ANSWER.size)
                return [_Answer(*_ANSWER.unpack(one)) for one in said]

            answers = elastic.as_unit(self._group, "the question for newcomers", ask)
            self._asked = (training.step(), began_s, time.monotonic() - began_s)
            self._least = max(one.least for one in answers)
            least_cost_s = min(one.cost_s for one in answers)  # of the others a part is that they wait for that rank
            least_step_s = max(min(one.step_s for one in answers), 1e-6)
            pause_s = min(least_cost_s / _SHARE, _LONGEST_PAUSE_S)
            self._until_question = int(pause_s / least_step_s) + 1
            self._note_losses()
            if any(one.busy for one in answers):
                self._until_question = 1  # its gradient is averaged soon
                return
            leaving = [rank for rank, one in enumerate(answers) if one.leaves]
            if leaving:
                self._go_on_without(leaving, view, began_s)
            elif world is not None and all(one.world == world.number for one in answers):
                self._go_on_in(world, door, began_s, ready)

    def _go_on_in(self, world: World, door: Door, began_s: float, ready: bool) -> None:
        from ringdp import _C

        carried = self._training.carried()
        before = world.members
        if not _C.go_on_in(self._group, world.name, world.view):
            self._note_losses()
            return
        door.entered(world, world.view + 1, _C.units_left(self._group))
        self.numbers = tuple(world.places)
        with door.carrying(world):
            self._welcome(world, carried, ready)
        self._changed(before, (), tuple(world.places[world.members :]), began_s)

    def _go_on_without(self, leaving: Sequence[int], view: int, began_s: float) -> None:
        from ringdp import _C

        numbers = elastic.places(self._group, view)
        left = tuple(numbers[one] for one in leaving)
        leaves = self.number in left

        def farewell() -> list[str]:
            mine = (self.leaving or "").encode()[:_REASON_BYTES] if leaves else b""
            return [one.decode(errors="replace") for one in all_gather_bytes(mine, self._group, room=_REASON_BYTES)]

        try:
            reasons = elastic.as_unit(self._group, "the reasons of ranks that leave", farewell)
            carried = self._training.carried()
        except ExpelledError:
            if not leaves:
                raise
            self._end(alone=False)
        if leaves and set(elastic.places(self._group)) == set(numbers):
            self._end(alone=len(left) == len(numbers))
        cause = ", ".join(dict.fromkeys(one for one in reasons if one)) or "it left"
        if not _C.go_on_without(self._group, list(leaving), view, cause):
            self._note_losses()  # another rank was lost, and they ask again
            return
        self.numbers = elastic.places(self._group)
        self._begin_again(self._parts.positions(), self._training.step(), carried)
        self._changed(len(numbers), left, (), began_s)

    def _end(self, *, alone: bool) -> NoReturn:
        """Of this process, which has left. `alone`: nobody goes on."""
        self.over = True
        if self._door is not None:
            self._door.close(over=alone)
        _log.info("left after step %d: %s", self._training.step(), self.leaving)
        backend.say_farewell("it left")
        raise SystemExit(0)

    def _welcome(self, world: World, carried: Any, ready: bool) -> None:
        """All ranks, newcomers among them: the state for these.

        Args:
            carried: what the members have together; None on a newcomer.
            ready: this rank's parts do not change meanwhile: they can be sent.
        """
        torchs: Any = dist.distributed_c10d._world  # by its count torch names new groups
        group, origin, parts = self._group, elastic.origin(), self._parts
        new = set(world.places[world.members :])
        outside = origin is not None and origin.outside
        mine: dict[str, Any] | None = None
        if not outside:
            mine = parts.state() if ready else {"ringdp": parts.place()}
            mine["ringdp"] |= {"carried": carried, "groups": torchs.group_count}
        into = parts.memory() if outside else {}
        of_one = parts.of_one()

        def body() -> dict[str, Any] | None:
            newcomers = [rank for rank, number in enumerate(elastic.places(group)) if number in new]
            if not newcomers:
                return mine
            able = all_gather_bytes(b"1" if ready and not outside else b"0", group, room=1)
            one = next((rank for rank, it in enumerate(able) if it == b"1"), None)
            if one is None:
                return mine
            return transfer.send(mine, group, newcomers, into=into, of_one=of_one, one=one)

        state = elastic.as_unit(group, "the state for newcomers", body)
        if state is None:
            raise HandshakeError("the ranks that could have given this process the training's state were lost")
        if outside:
            parts.load(state)
        own = state["ringdp"]
        torchs.group_count = max(torchs.group_count, own["groups"])
        elastic.joined()
        self._begin_again(own["positions"], own["step"], own["carried"], new=outside)

    def _begin_again(self, positions: Sequence[Any], step: int, carried: Any, *, new: bool = False) -> None:
        self._training.take(carried, step, new=new)
        self._parts.begin_again(positions)
        self.turns += 1
        self._until_question = 1  # the same on all ranks
        self._asked = (self._training.step(), time.monotonic(), 0.0)

    def _note_losses(self) -> None:
        members = elastic.places(self._group)
        lost = tuple(number for number in self.numbers if number not in members)
        if not lost:
            return
        before, self.numbers = len(self.numbers), members
        self.changes.append(Change(self._training.step(), before, len(members), lost=lost))

    def _changed(self, before: int, left: tuple[int, ...], joined: tuple[int, ...], began_s: float) -> None:
        seconds = time.monotonic() - began_s
        members = elastic.places(self._group)
        lost = tuple(number for number in self.numbers if number not in members)
        self.numbers = members
        change = Change(self._training.step(), before, len(members), lost, left, joined, seconds)
        if joined and self._group.rank() == 0:
            here = [number for number in joined if number in members]
            _log.warning(
                "step %d: %s joined: %d ranks go on as view %d; %.3f s",
                change.step,
                ranks_by_number(here) if here else "nobody",
                len(members),
                elastic.view_of(self._group),
                seconds,
            )
        self.changes.append(change)

    # Newcomers.

    def _ticket(self) -> Ticket:
        module = self._training.module
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return Ticket(
            socket.gethostname(),
            os.getpid(),
            __version__,
            [f"{name} {tuple(one.shape)} of {one.dtype}" for name, one in tensors.items()],
            self._parts.described(),
            self._training.settings(),
            prove(socket.gethostname(), os.getpid()),
        )

    def _join(self, origin: elastic.Origin, door: Door) -> None:
        where = Board(origin)
        try:
            ticket = where.hand_in(self._ticket())
            with Alive(origin, ticket):
                world = wait_for_entry(where, ticket, origin, self._group, lambda: self.leaving is not None)
                if world is None:
                    _log.warning("the training ended before this process could join it")
                    raise SystemExit(0)
                began_s = time.monotonic()
                self.numbers = tuple(world.places)
                self.number = origin.place_of(ticket)
                self._welcome(world, None, ready=False)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise HandshakeError(f"the job ended before this process could join it: {error}") from error
        door.open()
        rank, size = self._group.rank(), self._group.size()
        _log.warning("joined as rank %d of %d, before step %d", rank, size, self._training.step() + 1)
        self._changed(world.members, (), tuple(world.places[world.members :]), began_s)
        self._training.entered()
