"""A newcomer's way into a running job: it shows that it lives, and meets the members in each world that has it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ringdp.elastic.board import Board, Met, World
from ringdp.elastic.door import ALIVE_S, LOOK_S
from ringdp.errors import MismatchError, RingError
from ringdp.job import elastic

_log = logging.getLogger("ringdp.elastic")
_ENTRY_PAUSE_S = 0.001  # the members wait for a newcomer to see its entry
_OF_THE_WAIT = 0.01  # longer pauses are so much of the time that has passed: a round may take minutes
_FIRST_NOTICE_S = 10.0


class Alive:
    """A newcomer's count, which goes on while its process lives."""

    def __init__(self, origin: elastic.Origin, ticket: int) -> None:
        self._board, self._ticket = Board(origin), ticket
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringdp-alive", daemon=True)

    def __enter__(self) -> Alive:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
            while True:
                self._board.show_life(self._ticket)
                if self._stop.wait(ALIVE_S / 8):
                    return


def wait_for_entry(
    where: Board, ticket: int, origin: elastic.Origin, group: dist.ProcessGroup, leaves: Callable[[], bool]
) -> World | None:
    """Become a member of the job whose board this is. Returns the world in which the members go on; None: the training
    ended before.

    Args:
        group: of this process alone, until then.
        leaves: whether this process is to end instead.

    Raises:
        MismatchError: the members do not let this process in; says why.
        SystemExit: it leaves.
    """
    from ringdp import _C

    tried = 0
    met: World | None = None
    met_s = 0.0
    notice_s = _FIRST_NOTICE_S
    began_s = time.monotonic()
    while not where.over():
        if leaves():
            raise SystemExit(0)
        if (reason := where.refusal(ticket)) is not None:
            raise MismatchError(f"the running job does not let this process in: {reason}")
        world = where.latest()  # before the entry: another one may follow it at once
        if met is not None and (entry := where.entry(met)) is not None:
            _C.enter_world(group, *entry)
            return met
        if world is None or world.number <= tried or ticket not in world.tickets:
            if time.monotonic() - began_s > notice_s:
                _log.warning("waits to be let into the running job, at the beginning of a step")
                notice_s *= 2
            since_s = _OF_THE_WAIT * (time.monotonic() - met_s)
            time.sleep(LOOK_S / 2 if met is None else min(max(since_s, _ENTRY_PAUSE_S), LOOK_S))
            continue
        tried = world.number
        rank = world.places.index(origin.place_of(ticket))
        try:
            meeting = Met(where, world, rank, origin.start)
        except RingError as error:
            _log.debug("%s was not met: %s", world.name, error)
            where.give_up(world)
            continue
        if met is None or where.entry(met) is None:
            meeting.prepare(group)
            where.confirm(world, ticket)
            met, met_s = world, time.monotonic()
    return None
