"""A launcher's way through the door of a job on another host."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from ringdp import __version__
from ringdp.launcher import reach
from ringdp.launcher.arguments import LOOPBACK
from ringdp.launcher.door import local, proof
from ringdp.launcher.door.head import About
from ringdp.launcher.door.lines import Lines
from ringdp.launcher.door.local import Local, Loop, Then

_AGAIN_S = 1.0
_REGISTER_S = 2.0
"""For a connection and the answer, after which it is made again: what does not answer may be no door."""
_CLOSED_TIMES, _CLOSED_PAUSE_S = 5, 0.2
_CLOSED_S = 20.0
"""For a forwarder on the way, which accepts before the door is open and then closes the connection."""
_FIRST_NOTICE_S, _NOTICE_EVERY_S = 3.0, 10.0
_log = logging.getLogger("ringdp.launch")


class Gate:
    """Invariant: once `enter` has returned, this host has its number for good, and keeps one connection by which it is
    called, made again where it ends. All but `enter` and `close` runs in the loop's thread.

    Attributes:
        store_port: on loopback, forwarded to the job's store.
        folder: see `Local`.

    Args:
        where: the door's host and port.
        wants: the number that this host is to have, where it starts together with others; None: any.
    """

    def __init__(self, where: tuple[str, int], trust: proof.Trust, wants: int | None) -> None:
        self._where, self._trust, self._wants = where, trust, wants
        self._loop = Loop(trust)
        self._local = Local(self._loop, trust.secret, self._reach)
        self.folder = self._local.folder
        self._id = secrets.token_hex(16)  # by which the door knows it again
        self._round_trip_s = math.inf  # to the door, the shortest so far
        self._store = socket.create_server((LOOPBACK, 0), backlog=reach.BACKLOG)
        self.store_port: int = self._store.getsockname()[1]

    def enter(
        self, timeout_s: float, say: Callable[[str], None], is_another: Callable[[], bool] = lambda: False
    ) -> tuple[About, int]:
        """Register this host; tries until somebody answers. Returns the job, and the number of this host: from
        `About.nodes` on, it has come later.

        Args:
            say: is given lines for the user.
            is_another: is asked where something listens and is no door of this job; True: it is something else.

        Raises:
            RefusedError: it is not let in, or nobody answers.
        """
        host, port = self._where
        began_s, notice_s = time.monotonic(), _FIRST_NOTICE_S
        closed, closed_s, asked = 0, math.inf, False
        while True:
            try:
                about, node = self._loop.run(self._register())
                return about, node
            except proof.RefusedError as error:
                raise proof.RefusedError(f"{host}:{port} does not let this host in: {error}") from None
            except (OSError, asyncio.TimeoutError) as error:
                why = str(error) or "it does not answer"
                if isinstance(error, (asyncio.TimeoutError, ConnectionResetError)) and not asked:
                    if is_another():
                        raise proof.RefusedError(f"what listens at {host}:{port} is no door", no_door=True) from None
                    asked = True
            except proof.NotProvenError as error:
                closed, closed_s = closed + 1, min(closed_s, time.monotonic())
                why = f"{error}. Is it the port of --door, and --secret-file the file of the job's first launcher?"
                if closed < _CLOSED_TIMES:  # among many strangers one of the job may be closed
                    time.sleep(_CLOSED_PAUSE_S)
                    continue
                no_door = closed == _CLOSED_TIMES and is_another()
                if no_door or time.monotonic() - closed_s > min(_CLOSED_S, timeout_s):
                    raise proof.RefusedError(
                        f"{host}:{port} does not let this host in: {why}", no_door=no_door
                    ) from error
            waited_s = time.monotonic() - began_s
            if waited_s > timeout_s:
                raise proof.RefusedError(f"nobody opens the door at {host}:{port}: {why}; --rdzv-timeout waits longer")
            if waited_s > notice_s:
                say(f"waits for the door at {host}:{port}, since {waited_s:.0f} s: {why}")
                notice_s += _NOTICE_EVERY_S
            time.sleep(_AGAIN_S)

    def close(self) -> None:
        self._loop.end()
        self._store.close()
        self._local.close()

    async def _dial(self, kind: proof.Kind, value: int = 0) -> socket.socket:
        began_s = time.monotonic()
        connection = await local.connect(*self._where)
        self._round_trip_s = min(self._round_trip_s, time.monotonic() - began_s)
        try:
            key = await proof.ask(connection, self._trust, kind, value)
        except BaseException:
            connection.close()
            raise
        if kind in (proof.Kind.REGISTER, proof.Kind.STORE):
            return self._loop.protect(connection, key, dialled=True)
        return connection

    async def _register(self, node: int | None = None) -> tuple[About, int]:
        """`node`: the number that this host has, whose connection has ended."""
        connection = await asyncio.wait_for(self._dial(proof.Kind.REGISTER), _REGISTER_S)
        async with contextlib.AsyncExitStack() as held:
            lines = await held.enter_async_context(Lines(connection))
            me: dict[str, Any] = {"host": socket.gethostname(), "version": __version__, "wants": self._wants}
            await lines.tell(me | {"id": self._id} | ({} if node is None else {"node": node}))
            try:
                said = await lines.learn()
            except proof.NotProvenError as error:
                raise proof.RefusedError(str(error)) from error
            if "refused" in said:
                raise proof.RefusedError(said["refused"])
            if node is None:
                self._local.open(said["node"], self._round_trip_s)
                self._loop.begin(local.serve(self._loop, self._store, self._forward))
            self._loop.begin(self._follow(lines, said["node"], held.pop_all()))
        names = [field.name for field in dataclasses.fields(About)]
        return About(**{name: said[name] for name in names}), said["node"]

    async def _forward(self, connection: socket.socket, authentic: Callable[[], None]) -> Then:
        """To the store. It listens on loopback, where the store itself would let anybody in."""
        return lambda: self._loop.lead(connection, self._dial(proof.Kind.STORE))

    async def _reach(self, node: int, port: int) -> socket.socket:
        return await self._dial(proof.Kind.RELAY, proof.place_of(node, port))

    async def _follow(self, lines: Lines, node: int, held: contextlib.AsyncExitStack) -> None:
        """Until the connection with the door, which `held` ends, has ended; then makes another one."""
        why: BaseException | str = "it closed it"
        async with held:
            try:
                while line := await lines.hear():
                    words = line.split()
                    if len(words) == 3 and words[0] == b"call":
                        self._loop.begin(self._answer(int(words[1]), int(words[2]), lines))
            except (asyncio.TimeoutError, ValueError, OSError) as error:
                why = error
        _log.warning("the connection with the door has ended: %s", str(why) or type(why).__name__)
        while True:
            await asyncio.sleep(_AGAIN_S)
            try:
                await self._register(node)
                return
            except proof.RefusedError as error:
                _log.warning("%s", error)
                return
            except (OSError, asyncio.TimeoutError, ValueError, proof.NotProvenError) as error:
                _log.debug("the door does not answer: %s", error)

    async def _answer(self, call: int, port: int, lines: Lines) -> None:
        try:
            rank = await self._local.rank_at(port)
        except OSError:
            lines.say(f"none {call}".encode())
            raise
        await self._loop.lead(rank, self._dial(proof.Kind.ANSWER, call))
