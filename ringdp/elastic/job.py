"""A training whose ranks may come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp import __version__, config, values
from ringdp.data.sampler import BalancedSampler
from ringdp.data.settings import Limits
from ringdp.elastic import transfer
from ringdp.elastic.board import Board, Ticket, World, prove
from ringdp.elastic.door import LOOK_S, Door
from ringdp.elastic.loader import Loader
from ringdp.elastic.newcomer import Alive, wait_for_entry
from ringdp.elastic.training import training_of
from ringdp.errors import ExpelledError, HandshakeError, InvalidArgumentError, InvalidStateError
from ringdp.job import backend, elastic
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.text import count, number_of_ranks, ranks_by_number

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
    """The members have changed; the same on all ranks but for `seconds`.

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


class Job:
    """The parts that make up the state of a training, and the place in it where ranks may come and go.

        job = ringdp.elastic.Job(model, optimizer, scheduler)
        loader = job.loader(dataset, global_batch=256)
        for epoch in job.epochs(10):
            for x, y in loader:
                ...

    Under ``ringrun --elastic`` a newcomer (a process that replaces one that died, or of a host that comes) builds the
    same objects, and gets their state when it first iterates over `epochs` or a loader: from all other ranks at once,
    between two of their steps. In any other job nobody comes, and the same script runs.

    Args:
        *parts: a RingDP, or a DiLoCo, whose ranks come and go where a round ends; and all other objects with
            `state_dict` and `load_state_dict` that a newcomer needs: the optimizer, a scheduler, a scaler, averaged
            weights. Beside a DiLoCo, each rank's are its own: newcomers get those of the lowest rank.
        min_ranks: with fewer ranks the others wait for newcomers, before their next batch; of all ranks' the largest
            counts. None: what ``ringrun --min-ranks`` says (RINGDP_MIN_RANKS), or 1.
        max_ranks: nobody is let in beyond so many; None: what ``--max-ranks`` says (RINGDP_MAX_RANKS), or no limit.

    Raises:
        InvalidArgumentError: none of the parts is a RingDP or a DiLoCo, several are, or one has no state; a DiLoCo has
            sites of several ranks, or rounds by time; or the job is elastic, and that part averages over some of the
            ranks, or newcomers cannot be sent a part's state.
    """

    def __init__(self, *parts: Any, min_ranks: int | None = None, max_ranks: int | None = None) -> None:
        who = "ringdp.elastic.Job"
        training = self.training = training_of(who, parts)
        group = self._group = training.group
        lasts = elastic.is_elastic(group)
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
        least = config.min_ranks() if min_ranks is None else values.whole(who, "min_ranks", min_ranks, 1)
        most = config.max_ranks() if max_ranks is None else values.whole(who, "max_ranks", max_ranks, least)
        if most is not None and most < least:
            raise InvalidArgumentError(f"{who}: min_ranks={least} is above the most ranks, {most} (RINGDP_MAX_RANKS)")
        self._min_ranks = least
        self._parts = _named(training.parts)
        self._loaders: list[Loader] = []
        self._callbacks: list[Callable[[Change], Any]] = []
        self._audit: Any = None
        self._epoch = 0
        self.changes = 0  # of the members that loaders follow, so far
        self._until_question = 0
        self._asked = (0, time.monotonic(), 0.0)  # the step of the last question, when it was, and its seconds
        self._leaving: str | None = None
        self._over = False
        self._door: Door | None = None
        self._members: tuple[int, ...] = ()
        self._place = 0
        if not lasts:
            return
        if group is not dist.group.WORLD:
            kind = type(training.part).__name__
            raise InvalidArgumentError(f"{who}: its {kind} averages over a group of some ranks, which nobody can join")
        self._members = elastic.places(group)
        self._place = self._members[group.rank()]
        self._take_signals()
        origin = elastic.origin()
        if origin is not None:
            self._door = Door(group, self._ticket, most)
            if not origin.outside:
                self._door.open()

    # What scripts use.

    def loader(
        self,
        dataset: Any,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        balance: str = "equal",
        limits: Limits | None = None,
        cost: Callable[[int], float] | None = None,
        **arguments: Any,
    ) -> Loader:
        """A DataLoader whose global batches are split over the ranks that there are. The first one is that of the
        training: ranks come and go before its batches, and not in the passes of others, such as for a validation.

        Each sample of an epoch is in exactly one step that counts, or a line of the log says how many are in none. The
        batches of an epoch are the same for any number of ranks; give RingDP ``weight="samples"`` where the ranks'
        parts may be unequal. A rank for which a batch has no sample gets the dataset's first one, with weight 0.

        Args:
            dataset: as for DataLoader, of known length.
            global_batch: samples of a step, of all ranks together.
            seed: of the order of samples, the same on all ranks.
            shuffle: whether each epoch has an order of its own.
            drop_last: whether the last, smaller global batch of an epoch is left out.
            balance: ``"equal"`` or ``"speed"``, as of `ringdp.data.BalancedSampler`.
            limits: the least and the most samples of a rank, as there; at least 0 where None.
            cost: what a sample costs, as there.
            **arguments: of torch's DataLoader (num_workers, collate_fn, pin_memory, …).

        Raises:
            InvalidArgumentError: arguments that cannot be used, also those of DataLoader that choose batches.
        """
        for name in ("batch_size", "sampler", "batch_sampler"):
            if name in arguments:
                raise InvalidArgumentError(
                    f"Job.loader: {name} is what global_batch and the ranks decide; leave it out"
                )

        if balance not in ("equal", "speed"):
            raise InvalidArgumentError(
                f'Job.loader: balance is "equal" or "speed", for any number of ranks, not {balance!r}'
            )

        allowed = Limits(least=0) if limits is None else limits  # there may be more ranks than samples

        def sampler() -> BalancedSampler:
            return BalancedSampler(
                dataset,
                global_batch,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                balance=balance,
                limits=allowed,
                cost=cost,
                group=self._group,
            )

        split = f"balance: {balance}, limits: {allowed}, cost: {'given' if cost else 'none'}"
        made = Loader(self, dataset, sampler, split, arguments)
        self._loaders.append(made)
        return made

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs from where the job is to `number`: 0 to number - 1 in a job that begins.

        Raises:
            InvalidArgumentError: not a whole number.
        """
        values.whole("Job.epochs", "number", number, 0)
        self.enter()
        while self._epoch < number:
            yield self._epoch
            self._epoch += 1
        self.close()

    def close(self) -> None:
        """The training has ended, and nobody is let in any more. `epochs` does it at its end; call it where the script
        leaves that loop before, on all ranks."""
        if self._door is not None and not self._over:
            self._over = True
            self._door.close(over=True)

    def on_change(self, call: Callable[[Change], Any]) -> Callable[[Change], Any]:
        """Call `call(change)` on all ranks after the members have changed, before the next batch; a decorator.
        Newcomers have the state then, and call it, too."""
        self._callbacks.append(call)
        return call

    def leave(self, why: str = "job.leave()") -> None:
        """Leave before the next batch, without a loss: this rank hands on what its error feedback owes, and its process
        ends with exit code 0. Any thread, and signal handlers."""
        self._leaving = why

    def audit(self, path: str | os.PathLike[str]) -> None:
        """From now on append a line of JSON to this file for each batch that a rank gets of a loader: step, view, place
        of the rank, epoch, position and samples. Each rank needs a path of its own. Where the disk is full, the lines
        end, with a warning."""
        self._audit = open(Path(path), "a", buffering=1)  # noqa: SIM115  # for the life of the job

    def state_dict(self) -> dict[str, Any]:
        """Of all parts, and the place in the data: the same on all ranks, for `ringdp.checkpoint` or ``torch.save``. It
        loads at any number of ranks. The error feedback of a RingDP is not in it (`RingDP.compression_state_dict`). All
        ranks call it where there is a DiLoCo, whose parts beside its own state are those of this rank."""
        return self._state() | self.training.state()

    def _state(self) -> dict[str, Any]:
        place = {"step": self.step, "epoch": self._epoch, "positions": self._positions()}
        return {name: part.state_dict() for name, part in self._parts.items()} | {"ringdp": place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`; all ranks call it, before they iterate over `epochs`.

        Raises:
            InvalidArgumentError: it is of other parts or loaders.
        """
        loaders = len(state.get("ringdp", {}).get("positions", ()))
        mine = self._names()
        if state.keys() != {*mine, "ringdp"} or loaders != len(self._loaders):
            raise InvalidArgumentError(
                f"Job.load_state_dict: the state is of {', '.join(sorted(state.keys() - {'ringdp'}))} and"
                f" {count(loaders, 'loader')}, this Job has {', '.join(sorted(mine))} and"
                f" {count(len(self._loaders), 'loader')}: make the same ones before"
            )
        self._load_parts(state)
        place = state["ringdp"]
        self.training.load(state, place["step"])
        for loader, position in zip(self._loaders, place["positions"], strict=True):
            loader.sampler.load_state_dict(position)

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self._parts, type(self.training.part).__name__]))

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._epoch = state["ringdp"]["epoch"]

    @property
    def step(self) -> int:
        """The steps that the job has made."""
        return self.training.step()

    # What loaders use.

    def enter(self) -> None:
        """A newcomer becomes a member. Blocks until the others let it in."""
        origin = elastic.origin()
        if origin is None or not origin.outside or self._door is None:
            return
        self._join(origin, self._door)

    def before_step(self, loader: Loader) -> None:
        """Before each batch, on all ranks: let newcomers in, and those that want to leave out. Of the loader that was
        made first alone: what an epoch does behind it, a newcomer would not do."""
        if self._door is None or self._over or loader is not self._loaders[0]:
            return
        self._note_losses()
        self._until_question -= 1
        enough = self._group.size() >= self._min_ranks
        if not self.training.may_change() or (self._until_question > 0 and enough):
            return
        began = time.monotonic()
        self._question(self._door)
        notice_s = began + _FIRST_NOTICE_S
        while self._group.size() < self._min_ranks:
            if time.monotonic() > notice_s:
                _log.warning("%s of %d: waits for newcomers", number_of_ranks(self._group.size()), self._min_ranks)
                notice_s += 2 * (notice_s - began)
            if time.monotonic() - began > _LONGEST_WAIT_S:
                raise InvalidStateError(
                    f"{number_of_ranks(self._group.size())} are left, and min_ranks={self._min_ranks}: nobody has come"
                    f" for {_LONGEST_WAIT_S:g} s"
                )
            time.sleep(LOOK_S)
            self._question(self._door)

    # Members.

    def _question(self, door: Door) -> None:
        """All ranks learn which of them want to leave, and whether all have met newcomers."""
        from ringdp import _C

        with door.held():
            began_s = time.monotonic()
            step, asked_s, cost_s = self._asked
            step_s = (began_s - asked_s) / max(self.step - step, 1)
            world: World | None = None
            view = 0

            def ask() -> list[_Answer]:
                nonlocal world, view
                view = elastic.view_of(self._group)
                busy = self.training.busy() or _C.has_calls_in_flight(self._group)
                world = door.ready()
                number = 0 if world is None else world.number
                mine = _Answer(number, self._min_ranks, self._leaving is not None, busy, cost_s, step_s)
                return [_Answer(*_ANSWER.unpack(one)) for one in self._gather(mine)]

            answers = elastic.as_unit(self._group, "the question for newcomers", ask)
            self._asked = (self.step, began_s, time.monotonic() - began_s)
            self._min_ranks = max(one.least for one in answers)
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
                self._go_on_in(world, door, began_s)

    def _gather(self, mine: _Answer) -> list[bytes]:
        return all_gather_bytes(_ANSWER.pack(*dataclasses.astuple(mine)), self._group, room=_ANSWER.size)

    def _go_on_in(self, world: World, door: Door, began_s: float) -> None:
        from ringdp import _C

        carried = self.training.carried()
        before = world.members
        if not _C.go_on_in(self._group, world.name, world.view):
            self._note_losses()
            return
        door.entered(world, world.view + 1, _C.units_left(self._group))
        self._members = tuple(world.places)
        with door.carrying(world):
            self._welcome(world, carried)
        self._changed(before, (), tuple(world.places[world.members :]), began_s)

    def _go_on_without(self, leaving: Sequence[int], view: int, began_s: float) -> None:
        from ringdp import _C

        places = elastic.places(self._group, view)
        left = tuple(places[one] for one in leaving)
        leaves = self._place in left

        def farewell() -> list[str]:
            mine = (self._leaving or "").encode()[:_REASON_BYTES]
            return [one.decode(errors="replace") for one in all_gather_bytes(mine, self._group, room=_REASON_BYTES)]

        try:
            reasons = elastic.as_unit(self._group, "the reasons of ranks that leave", farewell)
            carried = self.training.carried()
        except ExpelledError:
            if not leaves:
                raise
            self._end(alone=False)
        if leaves and set(elastic.places(self._group)) == set(places):
            self._end(alone=len(left) == len(places))
        cause = ", ".join(dict.fromkeys(one for one in reasons if one)) or "it left"
        if not _C.go_on_without(self._group, list(leaving), view, cause):
            self._note_losses()  # another rank was lost, and they ask again
            return
        self._members = elastic.places(self._group)
        state = self._positions()
        self._begin_again(state, self.step, carried)
        self._changed(len(places), left, (), began_s)

    def _end(self, *, alone: bool) -> NoReturn:
        """Of this process, which has left. `alone`: nobody goes on."""
        self._over = True
        if self._door is not None:
            self._door.close(over=alone)
        _log.info("left after step %d: %s", self.step, self._leaving)
        backend.say_farewell("it left")
        raise SystemExit(0)

    def _positions(self) -> list[dict[str, Any]]:
        return [loader.sampler.state_dict() for loader in self._loaders]

    def _welcome(self, world: World, carried: Any) -> None:
        """All ranks, newcomers among them: the state for these."""
        torchs: Any = dist.distributed_c10d._world  # by its count torch names new groups
        group, origin = self._group, elastic.origin()
        new_places = set(world.places[world.members :])
        outside = origin is not None and origin.outside
        mine: dict[str, Any] | None = None
        if not outside:
            mine = self._state()
            mine["ringdp"] |= {"carried": carried, "groups": torchs.group_count}
        into: dict[str, Tensor] = {}
        for name, part in self._parts.items() if outside else ():
            if isinstance(part, torch.nn.Module):
                into |= {f"{name}/{key}": value for key, value in part.state_dict().items()}

        of_lowest = self.training.of_lowest(self._parts)

        def body() -> dict[str, Any]:
            places = elastic.places(group)
            newcomers = [rank for rank, place in enumerate(places) if place in new_places]
            if not newcomers:
                assert mine is not None
                return mine
            return transfer.send(mine, group, newcomers, into=into, of_lowest=of_lowest)

        state = elastic.as_unit(group, "the state for newcomers", body)
        if outside:
            self._load_parts(state)
        own = state["ringdp"]
        torchs.group_count = max(torchs.group_count, own["groups"])
        elastic.joined()
        self._begin_again(own["positions"], own["step"], own["carried"], new=outside)

    def _begin_again(
        self, positions: Sequence[Mapping[str, Any]], step: int, carried: Any, *, new: bool = False
    ) -> None:
        self.training.take(carried, step, new=new)
        for loader, position in zip(self._loaders, positions, strict=True):
            loader.members_changed(position)
        self.changes += 1
        self._until_question = 1  # the same on all ranks
        self._asked = (self.step, time.monotonic(), 0.0)

    def _note_losses(self) -> None:
        members = elastic.places(self._group)
        lost = tuple(place for place in self._members if place not in members)
        if not lost:
            return
        before, self._members = len(self._members), members
        self._call(Change(self.step, before, len(members), lost=lost))

    def _changed(self, before: int, left: tuple[int, ...], joined: tuple[int, ...], began_s: float) -> None:
        seconds = time.monotonic() - began_s
        members = elastic.places(self._group)
        lost = tuple(place for place in self._members if place not in members)
        self._members = members
        change = Change(self.step, before, len(members), lost, left, joined, seconds)
        if joined and self._group.rank() == 0:
            here = [place for place in joined if place in members]
            _log.warning(
                "step %d: %s joined: %d ranks go on as view %d; %.3f s",
                self.step,
                ranks_by_number(here) if here else "nobody",
                len(members),
                elastic.view_of(self._group),
                seconds,
            )
        self._call(change)

    def _call(self, change: Change) -> None:
        for call in self._callbacks:
            call(change)

    # Newcomers.

    def _ticket(self) -> Ticket:
        module = self.training.module
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return Ticket(
            socket.gethostname(),
            os.getpid(),
            __version__,
            [f"{name} {tuple(one.shape)} of {one.dtype}" for name, one in tensors.items()],
            [*self._names(), *(f"loader with {line}" for one in self._loaders for line in one.described())],
            self.training.settings(),
            prove(socket.gethostname(), os.getpid()),
        )

    def _join(self, origin: elastic.Origin, door: Door) -> None:
        where = Board(origin)
        try:
            ticket = where.hand_in(self._ticket())
            with Alive(origin, ticket):
                world = wait_for_entry(where, ticket, origin, self._group, lambda: self._leaving is not None)
                if world is None:
                    _log.warning("the training ended before this process could join it")
                    raise SystemExit(0)
                began_s = time.monotonic()
                self._members = tuple(world.places)
                self._place = origin.place_of(ticket)
                self._welcome(world, None)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise HandshakeError(f"the job ended before this process could join it: {error}") from error
        door.open()
        _log.warning("joined as rank %d of %d, before step %d", self._group.rank(), self._group.size(), self.step + 1)
        self._changed(world.members, (), tuple(world.places[world.members :]), began_s)

    def _take_signals(self) -> None:
        """SIGTERM: this rank leaves; a second one ends the process as it would have."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, process = signal.getsignal(signal.SIGTERM), os.getpid()

        def leave(number: int, frame: FrameType | None) -> None:
            if self._leaving is None and not self._over and os.getpid() == process:
                self.leave("SIGTERM")
                return
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)

        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, leave)

    def note_batch(self, epoch: int, batch: int, samples: Sequence[int]) -> None:
        """This rank has been given this batch of a loader."""
        if self._audit is None:
            return
        line = {"step": self.step + 1, "view": elastic.view_of(self._group), "place": self._place, "epoch": epoch}
        try:
            self._audit.write(json.dumps(line | {"batch": batch, "samples": list(samples)}) + "\n")
        except OSError as error:
            _log.warning("rank %d writes no more lines to %s: %s", self._group.rank(), self._audit.name, error.strerror)
            with contextlib.suppress(OSError):
                self._audit.close()
            self._audit = None


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


__all__ = ["Change", "Job"]
