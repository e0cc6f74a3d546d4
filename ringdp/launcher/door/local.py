"""A launcher's side towards the ranks of its own host, and the thread in which doors and gates run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from ringdp.launcher.door import proof

LOOPBACK = "127.0.0.1"
_PROVE_S = 2.0  # for a connection to prove what it is
_HEAD_START_S = 0.25  # of an address before the next one (RFC 8305)
_MOST_UNPROVED = 256
_BACKLOG = 1024
_log = logging.getLogger("ringdp.launch")


class Loop:
    """The thread "ringdp-door" with an event loop, the relay, and TLS. One for each launcher; ends with its process.

    Args:
        trust: of the launchers.
    """

    def __init__(self, trust: proof.Trust) -> None:
        from ringdp import _C

        self.relay = _C.Relay()
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
        del self.relay
        self._bridge = None

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Run it there, and wait for its result. From another thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
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

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """From now on the relay moves their bytes."""
        self.relay.join(one.detach(), other.detach())


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


Greet = Callable[[socket.socket, Callable[[], None]], Awaitable[Callable[[], Any]]]
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
        result = then()
        if asyncio.iscoroutine(result):
            await result

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


def listen(address: str, port: int) -> socket.socket:
    """Raises OSError where it cannot."""
    if address:
        return socket.create_server((address, port), backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)


class Local:
    """The folder by which ranks of this host and their launcher find each other: "door" in it has the port that ranks
    dial, the number of this host, and the microseconds of a round trip to the door; a file named by its port stands for
    each port at which a rank listens. Invariant: this process connects others to such a port alone.

    Args:
        reach: connects with a rank by its node and port; of other hosts.
    """

    def __init__(self, loop: Loop, secret: bytes, reach: Callable[[int, int], Awaitable[socket.socket]]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ringdp-door-"))  # of mode 0700
        self._loop, self._secret, self._reach = loop, secret, reach
        self._listener = listen(LOOPBACK, 0)

    def open(self, node: int, round_trip_s: float) -> None:
        """This host is that node, so far from the door. From the loop's thread."""
        port = self._listener.getsockname()[1]
        (self.folder / "door.new").write_text(f"{port} {node} {round_trip_s * 1e6:.0f}\n")
        os.replace(self.folder / "door.new", self.folder / "door")
        self._loop.begin(serve(self._loop, self._listener, self._greet, proof.WISH_MAGIC))

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def rank_at(self, port: int) -> socket.socket:
        """A connection with the rank of this host that listens there.

        Raises:
            OSError: none does.
        """
        if not (self.folder / str(port)).exists():
            raise ConnectionRefusedError(f"no rank of this job listens at port {port}")
        return await connect(LOOPBACK, port)

    async def _greet(self, connection: socket.socket, authentic: Callable[[], None]) -> Callable[[], Any]:
        node, port = proof.read_wish(await proof.receive(connection, proof.WISH_BYTES), self._secret)

        async def join() -> None:
            try:
                other = await self._reach(node, port)
            except BaseException:
                connection.close()
                raise
            self._loop.join(connection, other)

        return join
