"""The handshake of each connection with a door: three messages that prove the job's secret in both directions, and what
the connection is for (docs/reference/wire_format.md)."""

from __future__ import annotations

import asyncio
import enum
import hmac
import socket
import struct
from collections.abc import Callable

from ringdp import config

_HELLO, _REPLY, _REFUSAL, _CONFIRM = 1, 2, 3, 4
_VALUE_BITS = 48
ANSWER_S = 10.0
"""For the other side's next message."""

WISH = struct.Struct("<8sII16s")
"""What a rank says to its launcher first: to which host (node) and port to connect it; then its HMAC."""
WISH_MAGIC = b"RINGDPVI"
MAGIC = b"RINGDP\r\n"
"""Of a handshake."""
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


class Trust:
    """What launchers of a job prove to each other, and how they protect what follows.

    Attributes:
        secret: the job's, 32 bytes.
        tls: 0 where nothing is protected, else the way of TLS (`tls_mode` of the core), the same at both ends.
        config: of a RingConfig.

    Raises:
        RingError: there is no OpenSSL for TLS, or its files cannot be used.
    """

    def __init__(self, settings: config.RingConfig) -> None:
        from ringdp import _C

        assert settings.secret is not None
        self.secret, self.config = settings.secret, settings.as_dict()
        self.tls = _C.tls_mode(self.config)

    def key_of(self, messages: bytes) -> bytes:
        """Of the connection with this handshake."""
        return hmac.new(self.secret, b"ringdp connection" + messages, "sha256").digest()


def _tls_words(mode: int) -> str:
    return ("no TLS", "TLS with the job's secret (--tls)", "TLS with certificates (RINGDP_TLS_CERT)")[min(mode, 2)]


class NotProvenError(Exception):
    """The other end is not one of this job, or not a door."""


class RefusedError(Exception):
    """The door does not let this host in; says why.

    Attributes:
        no_door: what listens there is something else.
    """

    def __init__(self, text: str, *, no_door: bool = False) -> None:
        super().__init__(text)
        self.no_door = no_door


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


async def ask(connection: socket.socket, trust: Trust, kind: Kind, value: int = 0) -> bytes:
    """Of the side that has dialled a door: from now on the connection is that. Returns its key.

    Raises:
        NotProvenError: what listens there is no door of this job.
        RefusedError: it is, and has another version, or another way of TLS.
    """
    from ringdp import _C

    loop = asyncio.get_running_loop()
    number = kind << _VALUE_BITS | value
    hello = _C.seal_door_message(trust.secret, b"", _HELLO, number, trust.tls)
    await loop.sock_sendall(connection, hello)
    reply = await asyncio.wait_for(receive(connection, _C.handshake_bytes()), ANSWER_S)
    said = _C.open_door_message(trust.secret, hello, reply)
    if said is None or said[0] not in (_REPLY, _REFUSAL) or said[2] != number:
        raise NotProvenError("what answers there is no door of this job")
    if said[1] != _C.protocol_version():
        raise RefusedError(f"it speaks version {said[1]} of the protocol, this ringdp {_C.protocol_version()}")
    if said[3] != trust.tls:
        raise RefusedError(f"the job has {_tls_words(said[3])}, and this launcher {_tls_words(trust.tls)}")
    confirm = _C.seal_door_message(trust.secret, hello + reply, _CONFIRM, number, trust.tls)
    await loop.sock_sendall(connection, confirm)
    return trust.key_of(hello + reply + confirm)


async def hear(
    connection: socket.socket, trust: Trust, authentic: Callable[[], None] = lambda: None
) -> tuple[Kind, int, bytes]:
    """Of the door: what a connection is for, its value, and its key.

    Args:
        authentic: is called when its hello is; it may be a replay.

    Raises:
        NotProvenError: it is not of this job.
    """
    from ringdp import _C

    loop = asyncio.get_running_loop()
    hello = await receive(connection, _C.handshake_bytes())
    said = _C.open_door_message(trust.secret, b"", hello)
    if said is None or said[0] != _HELLO:
        raise NotProvenError("no hello of this job")
    authentic()
    _, version, number, tls = said
    if version != _C.protocol_version() or tls != trust.tls:
        await loop.sock_sendall(connection, _C.seal_door_message(trust.secret, hello, _REFUSAL, number, trust.tls))
        raise NotProvenError(f"it speaks version {version} of the protocol, and {_tls_words(tls)}")
    reply = _C.seal_door_message(trust.secret, hello, _REPLY, number, trust.tls)
    await loop.sock_sendall(connection, reply)
    confirm = await receive(connection, _C.handshake_bytes())
    confirmed = _C.open_door_message(trust.secret, hello + reply, confirm)
    if confirmed is None or confirmed[0] != _CONFIRM or confirmed[2] != number:
        raise NotProvenError("a handshake was replayed")
    try:
        kind = Kind(number >> _VALUE_BITS)
    except ValueError:
        raise NotProvenError(f"a connection of kind {number >> _VALUE_BITS}") from None
    return kind, number & ((1 << _VALUE_BITS) - 1), trust.key_of(hello + reply + confirm)


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
