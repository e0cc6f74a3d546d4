"""Somebody in the middle of connections: a relay that changes, holds or cuts what goes by, and ranks with one between
two of them."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.contract.core_ranks import ALWAYS_SMALL, core

Change = Callable[[int, int, int, bytes], bytes | None]
"""Of bytes that go by: the connection's number, who has sent them (1, who has dialled, or 0), how many before; None
cuts."""


def nothing(_number: int, _sender: int, _before: int, data: bytes) -> bytes:
    return data


class Relay:
    """In the middle of the connections to `to`; None: each is accepted and closed."""

    def __init__(self, to: tuple[str, int] | None, change: Change = nothing) -> None:
        self.to, self.change = to, change
        self.connections = 0
        self.seen = {0: bytearray(), 1: bytearray()}
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.start(self.serve)

    def start(self, target: Callable[..., None], *args: Any) -> None:
        self.threads.append(threading.Thread(target=target, args=args, daemon=True))
        self.threads[-1].start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if self.to is None:
                    near.close()
                    continue
                far = socket.create_connection(self.to)
                self.sockets += [near, far]
                for sender, source, sink in ((1, near, far), (0, far, near)):
                    self.start(self.pump, self.connections, sender, source, sink)
                self.connections += 1

    def pump(self, number: int, sender: int, source: socket.socket, sink: socket.socket) -> None:
        before = 0
        try:
            while data := source.recv(1 << 16):
                self.seen[sender] += data
                changed = self.change(number, sender, before, data)
                before += len(data)
                if changed is None:
                    break
                sink.sendall(changed)
            else:
                sink.shutdown(socket.SHUT_WR)
                return
        except OSError:  # an end that breaks ends the other one
            pass
        for it in (source, sink):
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        for it in [self.listener, *self.sockets]:
            it.close()
        for thread in self.threads:
            thread.join(10)


class Job:
    """Ranks as threads over TCP, with a relay between ranks 0 and 1."""

    def __init__(self, size: int, change: Change, **options: Any) -> None:
        self.size, self.change = size, change
        self.store = core.MemoryStore()
        self.relay: Relay | None = None
        self.pool = ThreadPoolExecutor(size)
        self.runtimes = self.each(
            lambda rank: core.Runtime(
                core.CallbackStore(self.store.set, lambda key: self.find(rank, key)),
                rank,
                size,
                transport="tcp",
                **options,
            )
        )

    def find(self, rank: int, key: str) -> str | None:
        found: str | None = self.store.get(key, timeout_ms=0)
        if found is None or rank != 1 or key != "at/0":
            return found
        ip, port = re.search(r"addresses=([\d.]+):(\d+)", found).groups()  # type: ignore[union-attr]
        if self.relay is None:
            self.relay = Relay((ip, int(port)), self.change)
        return f"addresses=127.0.0.1:{self.relay.port}\n"

    def each(self, body: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(body, range(self.size)))

    def group(self, rank: int, table: Any = ALWAYS_SMALL, name: str = "all") -> Any:
        return core.Group(self.runtimes[rank], name, list(range(self.size)), table=dict(table), timeout_ms=20_000)

    def groups(self, table: Any = ALWAYS_SMALL, name: str = "all") -> list[Any]:
        return [self.group(rank, table, name) for rank in range(self.size)]

    def close(self) -> None:
        self.each(lambda rank: self.runtimes[rank].shut_down())
        self.pool.shutdown()
        if self.relay is not None:
            self.relay.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
