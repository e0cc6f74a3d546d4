"""The handshake of each connection with a door: three messages that prove the job's secret in both directions, and what
the connection is for (docs/reference/wire_format.md)."""

from __future__ import annotations

import asyncio
import enum
import hmac
import socket
import struct
from collections.abc import Callable

_HELLO, _REPLY, _REFUSAL, _CONFIRM = 1, 2, 3, 4
_VALUE_BITS = 48
ANSWER_S = 10.0
"""For the other side's next message."""

WISH = struct.Struct("<8sII16s")
"""What a rank says to its launcher first: to which host (node) and port to connect it; then its HMAC."""
WISH_MAGIC = b"RINGDPVI"
WISH_BYTES = WISH.size + 32


class Kind(enum.IntEnum):
    """What a connection with a door is for, and its value.

    Attributes:
        REGISTER: the connection of a launcher that stays.
        STORE: to the job's store.
        RELAY: to a rank; value: `place_of` a node and a port.
        ANSWER: of a launcher that was called; value: the number of the call.
    """

    REGISTER = 1
    STORE = 2
    RELAY = 3
    ANSWER = 4


class NotProvenError(Exception):
    """The other end is not one of this job, or not a door."""


def place_of(node: int, port: int) -> int:
    return node << 16 | port


def node_and_port(place: int) -> tuple[int, int]:
    return place >> 16, place & 0xFFFF


async def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        NotProvenError: it ended before.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        if not (piece := await loop.sock_recv(connection, size - len(data))):
            raise NotProvenError("it closed the connection")
        data += piece
    return data


async def ask(connection: socket.socket, secret: bytes, kind: Kind, value: int = 0) -> None:
    """Of the side that has dialled a door: from now on the connection is that.

    Raises:
        NotProvenError: what listens there is no door of this job.
    """
    from ringdp import _C

    loop = asyncio.get_running_loop()
    number = kind << _VALUE_BITS | value
    hello = _C.seal_door_message(secret, b"", _HELLO, number)
    await loop.sock_sendall(connection, hello)
    reply = await asyncio.wait_for(receive(connection, _C.handshake_bytes()), ANSWER_S)
    said = _C.open_door_message(secret, hello, reply)
    if said is None:
        raise NotProvenError("what answers there is no door of this job")
    if said[0] == _REFUSAL:
        raise NotProvenError(f"it speaks version {said[1]} of the protocol, this ringdp {_C.protocol_version()}")
    if said[0] != _REPLY or said[2] != number:
        raise NotProvenError("what answers there is no door of this job")
    await loop.sock_sendall(connection, _C.seal_door_message(secret, hello + reply, _CONFIRM, number))


async def hear(
    connection: socket.socket, secret: bytes, authentic: Callable[[], None] = lambda: None
) -> tuple[Kind, int]:
    """Of the door: what a connection is for, and its value.

    Args:
        authentic: is called when its hello is; it may be a replay.

    Raises:
        NotProvenError: it is not of this job.
    """
    from ringdp import _C

    loop = asyncio.get_running_loop()
    hello = await receive(connection, _C.handshake_bytes())
    said = _C.open_door_message(secret, b"", hello)
    if said is None or said[0] != _HELLO:
        raise NotProvenError("no hello of this job")
    authentic()
    _, version, number = said
    if version != _C.protocol_version():
        await loop.sock_sendall(connection, _C.seal_door_message(secret, hello, _REFUSAL, number))
        raise NotProvenError(f"it speaks version {version} of the protocol")
    reply = _C.seal_door_message(secret, hello, _REPLY, number)
    await loop.sock_sendall(connection, reply)
    confirm = _C.open_door_message(secret, hello + reply, await receive(connection, _C.handshake_bytes()))
    if confirm is None or confirm[0] != _CONFIRM or confirm[2] != number:
        raise NotProvenError("a handshake was replayed")
    try:
        return Kind(number >> _VALUE_BITS), number & ((1 << _VALUE_BITS) - 1)
    except ValueError:
        raise NotProvenError(f"a connection of kind {number >> _VALUE_BITS}") from None


def read_wish(wish: bytes, secret: bytes) -> tuple[int, int]:
    """The node and port to which a rank of this host wants to be connected.

    Raises:
        NotProvenError: it is not of a rank of this job.
    """
    content, proof = wish[: WISH.size], wish[WISH.size :]
    magic, node, port, _ = WISH.unpack(content)
    if magic != WISH_MAGIC or not hmac.compare_digest(proof, hmac.new(secret, content, "sha256").digest()):
        raise NotProvenError("not of a rank of this job")
    return int(node), int(port)
