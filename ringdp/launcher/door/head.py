"""The door: the one public port of a job, in the launcher of the host that can be reached."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringdp import __version__
from ringdp.launcher import reach
from ringdp.launcher.arguments import LOOPBACK
from ringdp.launcher.door import local, proof
from ringdp.launcher.door.lines import Lines
from ringdp.launcher.door.local import Local, Loop, Then

CALL_S = 8.0
"""For a launcher that is called to dial back."""
LOOK_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The job, for those who come.

    Attributes:
        nodes: hosts that start together.
        run_id: its name in the store.
        elastic: others may come later.
        max_restarts: of all launchers.
        here: the number of the host with the door.
    """

    here: int
    nodes: int
    run_id: str
    elastic: bool
    max_restarts: int


@dataclasses.dataclass(eq=False)
class _Launcher:
    """Of another host, that is registered."""

    node: int
    host: str
    lines: Lines


class Door:
    """Invariant: `_launchers` has those whose connection lives, by node. All but `begun` and `close` runs in the loop's
    thread.

    Attributes:
        port: at which others dial.
        store_port: of the job's store on loopback.
        folder: see `Local`.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(self, port: int, trust: proof.Trust, about: About, came: Callable[[str], None]) -> None:
        """`came`: is given a line where another host has come."""
        self._about, self._trust, self._came = about, trust, came
        self._public = reach.open_port(port)
        self.port: int = self._public.getsockname()[1]
        self._store, self.store_port = loopback_store()
        self._loop = Loop(trust)
        self._local = Local(self._loop, trust.secret, self._reach)
        self.folder = self._local.folder
        self._launchers: dict[int, _Launcher] = {}
        self._ids: dict[int, str] = {}  # by node: of the launcher that has the number
        self._next_node = about.nodes  # of those that come later
        self._begun = asyncio.Event()
        self._calls: dict[int, asyncio.Future[socket.socket]] = {}
        self._last_call = 0
        self._loop.run(self._open())

    def begun(self) -> None:
        """The ranks of all hosts have been started: who comes now, comes later."""
        self._loop.call(self._begun.set)

    def close(self) -> None:
        self._loop.end()
        self._public.close()
        self._local.close()

    async def _open(self) -> None:
        self._local.open(self._about.here, 0.0)
        self._loop.begin(local.serve(self._loop, self._public, self._greet, proof.MAGIC))

    async def _greet(self, connection: socket.socket, authentic: Callable[[], None]) -> Then:
        kind, value, key = await proof.hear(connection, self._trust, authentic)
        if kind in (proof.Kind.REGISTER, proof.Kind.STORE):  # ranks protect what is relayed by themselves
            connection = self._loop.protect(connection, key, dialled=False)
        if kind is proof.Kind.ANSWER:
            return lambda: self._answered(connection, value)
        if kind is proof.Kind.REGISTER:
            return lambda: self._register(connection)
        if kind is proof.Kind.STORE:
            return lambda: self._loop.lead(connection, local.connect(LOOPBACK, self.store_port))
        node, port = proof.node_and_port(value)
        here = node == self._about.here
        return lambda: self._loop.lead(connection, self._local.rank_at(port) if here else self._reach(node, port))

    # Relayed connections.

    async def _reach(self, node: int, port: int) -> socket.socket:
        """Call the launcher of that node: it connects with its rank, and dials back."""
        launcher = self._launchers.get(node)
        if launcher is None:
            raise ConnectionRefusedError(f"no launcher of node {node} is registered")
        self._last_call += 1
        call = self._last_call
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            launcher.lines.say(f"call {call} {port}".encode())
            return await asyncio.wait_for(answer, CALL_S)
        finally:
            self._calls.pop(call, None)

    async def _answered(self, connection: socket.socket, call: int) -> None:
        answer = self._calls.pop(call, None)
        if answer is None or answer.done():
            connection.close()
        else:
            answer.set_result(connection)

    # Launchers of other hosts.

    async def _register(self, connection: socket.socket) -> None:
        async with Lines(connection) as lines:
            said = await lines.learn()
            while self._about.elastic and not self._missing and "node" not in said and not self._begun.is_set():
                await asyncio.sleep(LOOK_S)
            node, why = self._place(said)
            if node is None:
                await lines.tell({"refused": why})
                return
            self._ids[node] = str(said.get("id"))
            launcher = self._launchers[node] = _Launcher(node, str(said.get("host", "?"))[:64], lines)
            try:
                await lines.tell(dataclasses.asdict(self._about) | {"node": node})
                if "node" not in said:
                    rest = f", {len(self._missing)} more to come" if self._missing else ""
                    self._came(f"{launcher.host} has come through the door, as node {node}{rest}")
                while line := await lines.hear():
                    words = line.split()
                    answer = self._calls.pop(int(words[1]), None) if len(words) == 2 and words[0] == b"none" else None
                    if answer is not None and not answer.done():
                        answer.set_exception(ConnectionRefusedError(f"no rank listens there on {launcher.host}"))
            finally:
                if self._launchers.get(node) is launcher:
                    del self._launchers[node]

    @property
    def _missing(self) -> list[int]:
        """Of the hosts that start together."""
        return [node for node in range(self._about.nodes) if node not in self._launchers and node != self._about.here]

    def _place(self, said: dict[str, Any]) -> tuple[int | None, str]:
        """The number of a host that comes; None: it cannot, and why."""
        if said.get("version") != __version__:
            return None, f"it has ringdp {said.get('version')}, the job {__version__}"
        known = said.get("node")
        if known is not None:  # its connection has ended
            mine = self._ids.get(known) if isinstance(known, int) else None
            its = mine is not None and mine == said.get("id")
            return (known, "") if its else (None, "another host has its number by now")
        wanted = said.get("wants")
        if not self._begun.is_set() and wanted is not None and wanted not in self._missing:
            return None, f"it wants to be node {wanted} (--node-rank), which is another host, or none of the job's"
        if not self._begun.is_set() and self._missing:
            return self._missing[0] if wanted is None else wanted, ""
        if not self._about.elastic:
            return None, f"the job has all of its {self._about.nodes} hosts, and is not elastic (--elastic)"
        self._next_node += 1
        return self._next_node - 1, ""


def loopback_store() -> tuple[TCPStore, int]:
    """A store that listens on loopback alone, and its port. torch's own would listen on all addresses; stores that are
    opened later in this process at this port share it."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return (
        TCPStore(
            LOOPBACK,
            port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            multi_tenant=True,
        ),
        port,
    )
