"""A launcher's side towards the ranks of its own host, and the thread in which doors and gates run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ringdp.launcher import reach, temporary
from ringdp.launcher.arguments import LOOPBACK
from ringdp.launcher.door import proof

_PROVE_S = 2.0  # for a connection to prove what it is
_HEAD_START_S = 0.25  # of an address before the next one (RFC 8305)
_MOST_UNPROVED = 256
_log = logging.getLogger("ringdp.launch")


class Loop:
    """The thread "ringdp-door" with an event loop, the relay, and TLS. One for each launcher; ends with its process.

    Args:
        trust: of the launchers.
    """

    def __init__(self, trust: proof.Trust) -> None:
        from ringdp import _C

        self._relay = _C.Relay()
        self._bridge = _C.TlsBridge(trust.config) if trust.tls else None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ringdp-door", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """All that it has begun ends, and each relayed connection."""

        async def cancel() -> None:
            while self._tasks:  # before Python 3.12 wait_for loses a cancellation that comes with its result
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks, timeout=0.1)

        self.run(cancel())
        self.call(self._loop.stop)
        self._thread.join()
        self._loop.close()
        del self._relay
        self._bridge = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it there, and wait for its result. From another thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, what: Callable[[], Any]) -> None:
        """Have the loop's thread call it."""
        self._loop.call_soon_threadsafe(what)

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run it there. Its exceptions are the end of it alone. From the loop's own thread."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        usual = isinstance(error, (OSError, asyncio.TimeoutError, ValueError, proof.NotProvenError, proof.RefusedError))
        _log.log(
            logging.DEBUG if usual else logging.ERROR,
            "a connection through the door ended: %s: %s",
            type(error).__name__,
            error,
        )

    def protect(self, connection: socket.socket, key: bytes, *, dialled: bool) -> socket.socket:
        """A socket with the bytes of this connection, which go by TLS from now on, if the launchers have that."""
        if self._bridge is None:
            return connection
        mine, its = socket.socketpair()
        mine.setblocking(False)
        self._bridge.join(its.detach(), connection.detach(), key, dialled)
        return mine

    async def lead(self, connection: socket.socket, to: Awaitable[socket.socket]) -> None:
        """From now on the relay moves its bytes to and from what `to` gives; it is closed where that fails."""
        try:
            other = await to
        except BaseException:
            connection.close()
            raise
        self._relay.join(connection.detach(), other.detach())


class Strangers:
    """Connections that have proved nothing yet. Invariant: at most so many, and the same number of those that have said
    an authentic hello, which may be a replay: of more the oldest is closed, so that strangers cost no more."""

    def __init__(self) -> None:
        self._silent: dict[socket.socket, None] = {}
        self._greeted: dict[socket.socket, None] = {}

    def add(self, connection: socket.socket) -> None:
        self._put(self._silent, connection)

    def note_authentic(self, connection: socket.socket) -> None:
        self._silent.pop(connection, None)
        self._put(self._greeted, connection)

    def remove(self, connection: socket.socket) -> None:
        self._silent.pop(connection, None)
        self._greeted.pop(connection, None)

    def _put(self, among: dict[socket.socket, None], connection: socket.socket) -> None:
        among[connection] = None
        if len(among) > _MOST_UNPROVED:
            oldest = next(iter(among))
            del among[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)


Then = Callable[[], Awaitable[None]]
Greet = Callable[[socket.socket, Callable[[], None]], Awaitable[Then]]
"""Proves a connection, calls the function when its first message is authentic, and returns what happens then."""


async def serve(loop: Loop, listener: socket.socket, greet: Greet, magic: bytes = b"") -> None:
    """Accept connections, each of which has two seconds to prove what it is.

    Args:
        magic: with which a first message begins: the kernel keeps those that say nothing, others are closed at once.
    """
    listener.setblocking(False)
    if magic:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(_PROVE_S))
    strangers = Strangers()

    async def meet(connection: socket.socket) -> None:
        then = None
        try:
            then = await asyncio.wait_for(greet(connection, lambda: strangers.note_authentic(connection)), _PROVE_S)
        finally:
            strangers.remove(connection)
            if then is None:
                connection.close()
        await then()

    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:  # descriptors are short
            _log.debug("the door accepts nobody: %s", error)
            await asyncio.sleep(0.1)
            continue
        connection.setblocking(False)
        if magic and not _may_begin(connection, magic):
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers.add(connection)
        loop.begin(meet(connection))
        await asyncio.sleep(0)  # it may have said hello by now, before others take its place


def _may_begin(connection: socket.socket, magic: bytes) -> bool:
    """Whether what has come is the beginning of that, as far as anything has."""
    try:
        came = connection.recv(len(magic), socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return bool(came) and magic.startswith(came)


async def connect(host: str, port: int, timeout_s: float = proof.ANSWER_S) -> socket.socket:
    """A connection with the first address of that name that answers.

    Raises:
        OSError: none does.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that no name server could know
        raise OSError(f"{host!r} is no name of a host") from error

    async def attempt(number: int) -> socket.socket:
        family, kind, protocol, _, address = found[number]
        await asyncio.sleep(number * _HEAD_START_S)
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(connection, address), timeout_s)
        except BaseException:
            connection.close()
            raise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    problem = OSError(f"{host} has no address")
    winner: socket.socket | None = None
    tasks = [asyncio.ensure_future(attempt(number)) for number in range(len(found))]
    try:
        for next_one in asyncio.as_completed(tasks):
            try:
                winner = await next_one
                return winner
            except (OSError, asyncio.TimeoutError) as error:
                number = error.errno if isinstance(error, OSError) else None
                problem = OSError(os.strerror(number) if number else f"no answer in {timeout_s:g} s")
        raise problem
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None and task.result() is not winner:
                task.result().close()


class Local:
    """The folder by which ranks of this host and their launcher find each other: "door" in it has the port that ranks
    dial, the number of this host, and the microseconds of a round trip to the door; a file named by its port stands for
    each port at which a rank listens. Invariant: this process connects others to such a port alone.

    Args:
        connect_to: a rank of another host, by its node and port.
    """

    def __init__(self, loop: Loop, secret: bytes, connect_to: Callable[[int, int], Awaitable[socket.socket]]) -> None:
        self.folder = temporary.make_folder("door")
        self._loop, self._secret, self._connect_to = loop, secret, connect_to
        self._listener = socket.create_server((LOOPBACK, 0), backlog=reach.BACKLOG)

    def open(self, node: int, round_trip_s: float) -> None:
        """This host is that node, so far from the door. From the loop's thread."""
        port = self._listener.getsockname()[1]
        (self.folder / "door.new").write_text(f"{port} {node} {round_trip_s * 1e6:.0f}\n")
        os.replace(self.folder / "door.new", self.folder / "door")
        self._loop.begin(serve(self._loop, self._listener, self._greet, proof.WISH_MAGIC))

    def close(self) -> None:
        self._listener.close()
        temporary.remove_folder(self.folder)

    async def rank_at(self, port: int) -> socket.socket:
        """A connection with the rank of this host that listens there.

        Raises:
            OSError: none does.
        """
        if not (self.folder / str(port)).exists():
            raise ConnectionRefusedError(f"no rank of this job listens at port {port}")
        return await connect(LOOPBACK, port)

    async def _greet(self, connection: socket.socket, authentic: Callable[[], None]) -> Then:
        node, port = proof.read_wish(await proof.receive(connection, proof.WISH_BYTES), self._secret)
        return lambda: self._loop.lead(connection, self._connect_to(node, port))
