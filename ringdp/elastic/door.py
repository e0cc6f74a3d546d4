"""A member's part in letting newcomers in, beside the training: a thread that connects to them when one proposes it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator

import torch.distributed as dist

from ringdp.elastic.board import Board, Met, Ticket, World
from ringdp.errors import RingError
from ringdp.job import elastic

_log = logging.getLogger("ringdp.elastic")
LOOK_S = 0.05
"""Between two looks at the board."""
ALIVE_S = 2.0
"""A newcomer whose count has not gone on for so long has died, or is stopped: the members do not meet it."""
CARRIED_S = 5.0
"""The members are sending it the state, and leave it out; its launcher kills one that is stopped sooner."""
MOST_BETWEEN_LOOKS_S = 1.0
GONE_S = 60.0
"""And it is not let in any more."""
TOGETHER_S = 0.1
"""Newcomers that come within so long of each other are let in together."""
MOST_FAILURES = 5
"""Of worlds with a newcomer that was not let in."""
MOST_TICKETS = 1000
"""The newest ones; a store on a network takes what anybody writes."""
MEET_S = 5.0
"""A newcomer has so long to connect, and twice as long in each further try: the machines may be busy."""
MOST_MEET_S = 20.0
"""But not longer: a member that ends meanwhile waits for it, and other newcomers do."""


class Lives:
    """Newcomers' counts, and for how long each has stood still. Invariant: only time counts in which this process
    looked, so that one that was stopped itself takes nobody for dead. Used by one thread."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._seen: dict[int, tuple[int, float, float]] = {}  # by ticket: its count, when looked, and how long it stood

    def still_s(self, ticket: int) -> float:
        now_s, count = time.monotonic(), self._board.life(ticket)
        before, looked_s, still_s = self._seen.get(ticket, (-1, now_s, 0.0))
        still_s = still_s + min(now_s - looked_s, MOST_BETWEEN_LOOKS_S) if count == before else 0.0
        self._seen[ticket] = (count, now_s, still_s)
        return still_s


class Door:
    """Lets newcomers in on the part of one member. Invariant: while `held` is entered, the world of `ready` is the one
    that the group is prepared for.

    Args:
        mine: what this rank would say of itself, with which tickets are compared.
        most: ranks that the job may have; None: any number.
    """

    def __init__(self, group: dist.ProcessGroup, mine: Callable[[], Ticket], most: int | None) -> None:
        origin = elastic.origin()
        assert origin is not None
        self._group, self._mine, self._most, self._origin = group, mine, most, origin
        self._board = Board(origin)  # the thread's
        self._own = Board(origin)
        self._held = threading.Lock()
        self._met: World | None = None  # the group is prepared for it
        self._ready: World | None = None  # that one, once its newcomers are ready, too
        self._tried = 0  # the number of the last world that this rank has tried to meet
        self._lives = Lives(self._board)
        self._carried: World | None = None  # whose newcomers get the state now
        self._first_s: dict[int, float] = {}  # by ticket: when it was seen first
        self._done: set[int] = set()  # tickets that were let in, refused, or whose process has died
        self._failures: dict[int, int] = {}  # by ticket: worlds with it that were given up
        self._counted = 0  # the number of the last one of these
        self._trouble = ""
        self._stop = threading.Event()
        # Python waits for it when it ends: one in a core that meets others could not be ended without an abort.
        self._thread = threading.Thread(target=self._run, name="ringdp-door", daemon=False)

    def open(self) -> None:
        elastic.admit(self._board.store)
        self._thread.start()

    def close(self, *, over: bool) -> None:
        """`over`: the training has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(MEET_S)
        if over:
            with contextlib.suppress(dist.DistNetworkError, RuntimeError):
                self._own.end()

    def held(self) -> threading.Lock:
        """While it is entered, the group is prepared for no other world."""
        return self._held

    def ready(self) -> World | None:
        """The world in which this rank can go on, if its members are the present ones."""
        ready = self._ready
        return ready if ready is not None and ready.view == elastic.view_of(self._group) else None

    @contextlib.contextmanager
    def carrying(self, world: World) -> Iterator[None]:
        """The members send these newcomers the state: one that shows no life meanwhile is lost. Within `held`."""
        self._carried = world
        try:
            yield
        finally:
            self._carried = None

    def entered(self, world: World, view: int, left: int) -> None:
        """The members go on in it, as that view."""
        self._own.enter(world, view, left)
        self._met = self._ready = None
        self._done.update(world.tickets)

    # The thread.

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S) and threading.main_thread().is_alive():
            try:
                if self._group.rank() == 0:
                    self._propose()
                self._follow()
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                _log.debug("the door is shut: %s", error)
                return
            except Exception as error:
                if (trouble := f"{type(error).__name__}: {error}") != self._trouble:
                    _log.warning("newcomers cannot be let in: %s", trouble)
                self._trouble = trouble

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """As `held`, for the thread, which meanwhile looks after those that get the state."""
        while not self._held.acquire(timeout=LOOK_S):
            if (world := self._carried) is not None:
                self._look_after(world)
        try:
            yield
        finally:
            self._held.release()

    def _look_after(self, world: World) -> None:
        from ringdp import _C

        for ticket in world.tickets:
            if (still_s := self._lives.still_s(ticket)) > CARRIED_S:
                place = self._origin.place_of(ticket)
                _C.lose_member(self._group, place, f"it has shown no life for {still_s:.1f} s while it got the state")

    def _propose(self) -> None:
        view, places = elastic.view_of(self._group), list(elastic.places(self._group))  # in this order
        waiting = self._waiting(places)
        latest = self._board.latest()
        if latest is not None and latest.view == view:
            given_up = self._board.given_up(latest)
            if not given_up and all(ticket in waiting for ticket in latest.tickets):
                return  # it is under way
            if given_up and latest.number > self._counted:
                self._counted = latest.number
                self._count_failure(latest)
        waiting = [ticket for ticket in waiting if ticket not in self._done]
        if self._most is not None:
            waiting = waiting[: max(self._most - len(places), 0)]
        now_s = time.monotonic()
        since_s = [now_s - self._first_s.setdefault(ticket, now_s) for ticket in waiting]
        if waiting and (min(since_s) > TOGETHER_S or max(since_s) > 5 * TOGETHER_S):
            new = [self._origin.place_of(ticket) for ticket in waiting]
            with self._alone():  # while the members go on in the last one, a newcomer must not turn to another
                if elastic.view_of(self._group) == view:
                    self._met = self._ready = None  # nor may they go on in one from which its newcomers turn away now
                    tries = max(self._failures.get(ticket, 0) for ticket in waiting)
                    self._board.propose(view, waiting, places + new, min(MEET_S * 2**tries, MOST_MEET_S))

    def _count_failure(self, world: World) -> None:
        for ticket in world.tickets:
            failures = self._failures[ticket] = self._failures.get(ticket, 0) + 1
            if failures == MOST_FAILURES:
                self._board.refuse(ticket, f"it could not connect to all ranks, in {failures} tries")
                self._done.add(ticket)

    def _waiting(self, members: Collection[int]) -> list[int]:
        """The tickets of processes that live, fit, and are no members, in their order."""
        now_s = time.monotonic()
        waiting = []
        last = self._board.handed_in()
        for ticket in range(max(last - MOST_TICKETS, 0) + 1, last + 1):
            if self._origin.place_of(ticket) in members:
                self._done.add(ticket)
            if ticket in self._done:
                continue
            if not self._board.has_ticket(ticket):
                if now_s - self._first_s.setdefault(ticket, now_s) > GONE_S:
                    self._done.add(ticket)
                continue
            if (still_s := self._lives.still_s(ticket)) > GONE_S:
                self._board.refuse(ticket, f"it has shown no life for {GONE_S:g} s")
                self._done.add(ticket)
            if still_s > ALIVE_S:
                continue
            said = self._board.ticket(ticket)
            difference = "its ticket cannot be read" if said is None else said.difference(self._mine())
            if difference is not None:
                self._board.refuse(ticket, difference)
                self._done.add(ticket)
                _log.warning("%s cannot join: %s", "a newcomer" if said is None else said.who, difference)
                continue
            waiting.append(ticket)
        return waiting

    def _follow(self) -> None:
        with self._alone():
            if self._met is not None and self._ready is None and self._board.confirmed(self._met):
                self._ready = self._met
        latest = self._board.latest()
        if latest is None or latest.number <= self._tried or latest.view != elastic.view_of(self._group):
            return
        place = elastic.places(self._group)[self._group.rank()]
        if place not in latest.places[: latest.members]:
            return
        self._tried = latest.number
        try:
            met = Met(self._board, latest, latest.places.index(place), self._origin.start)
        except RingError as error:
            _log.debug("%s was not met: %s", latest.name, error)
            self._board.give_up(latest)
            return
        with self._alone():
            met.prepare(self._group)
            self._met, self._ready = latest, None
