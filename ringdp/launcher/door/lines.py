"""Lines of text between a door and the launchers that are registered with it."""

from __future__ import annotations

import asyncio
import json
import socket
from types import TracebackType
from typing import Any

from ringdp.launcher.door import proof

_BEAT_S = 2.0
_SILENT_S = 10.0
_LINE_BYTES = 4096


class Lines:
    """A connection, inside `async with`. Invariant: both ends send an empty line every two seconds, as a sign of life,
    and a connection that is silent for ten has ended. At the end it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def __aenter__(self) -> Lines:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=_LINE_BYTES)
        self._beats = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beats.cancel()
        self._writer.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self.say(b"")

    def say(self, line: bytes) -> None:
        self._writer.write(line + b"\n")

    async def tell(self, content: dict[str, Any]) -> None:
        self.say(json.dumps(content).encode())
        await self._writer.drain()

    async def hear(self) -> bytes:
        """The next line that says something; empty at the end.

        Raises:
            asyncio.TimeoutError: the other end is silent.
            ValueError: it sends too long a line.
        """
        while (line := await asyncio.wait_for(self._reader.readline(), _SILENT_S)) == b"\n":
            pass
        return line.rstrip(b"\n")

    async def learn(self) -> dict[str, Any]:
        """As `hear`, of what the other end tells.

        Raises:
            NotProvenError: it is no object of JSON.
        """
        line = await self.hear()
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise proof.NotProvenError("it has sent no line of JSON" if line else "it closed the connection")
        return content
