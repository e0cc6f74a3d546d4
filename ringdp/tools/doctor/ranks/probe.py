"""A small server on each rank, and its requests: hello, clock, bytes.

Plain TCP without ring: these sockets measure the network between two ranks over one connection. The server answers only
clients with the job's token, which is in its store.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TOKEN_BYTES = 16
CONNECT_S = 3.0
"""For one attempt; a firewall that swallows packets costs this much for each address."""

ANSWER_S = 5.0
PINGS, WARM_UP = 32, 4
PIECE_BYTES = 1 << 20
PING, SEND = b"P", b"S"
CLIENTS = 64
"""Connections that are served at once, at most."""

_TIME = struct.Struct("!d")


@dataclass(frozen=True)
class Reached:
    """The address at which another rank was reached, and the failed attempts.

    Attributes:
        address: the one that worked, ``ip:port``; empty where none did.
        tried: the other attempts, with the system's errors.
    """

    address: str = ""
    tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class Latency:
    """Of one round trip, and the other clock.

    Attributes:
        median_s, least_s: of the round trip of one byte (and eight back).
        clock_offset_s: the other clock minus this one, by the fastest round trip.
        clock_error_s: half of that round trip: the true offset is not further away.
    """

    median_s: float
    least_s: float
    clock_offset_s: float
    clock_error_s: float


class ProbeServer:
    """Listens on some addresses until `close`; each client is served by a thread of its own."""

    def __init__(self, addresses: Sequence[str], token: bytes, port_range: tuple[int, int] | None = None) -> None:
        """Raises OSError where no address can be listened on."""
        self._token = token
        self._listeners = list(_listen(addresses, port_range))
        self.addresses: list[str] = [_text(it.getsockname()) for it in self._listeners]
        self._selector = selectors.DefaultSelector()
        for it in self._listeners:
            it.setblocking(False)
            self._selector.register(it, selectors.EVENT_READ)
        self._slots = threading.BoundedSemaphore(CLIENTS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="ringdp-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Clients that are being served end by themselves."""
        self._closing.set()
        self._thread.join(ANSWER_S)
        self._selector.close()
        for it in self._listeners:
            it.close()

    def __enter__(self) -> ProbeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(0.1):
                listener = key.fileobj
                assert isinstance(listener, socket.socket)
                with contextlib.suppress(OSError):
                    client, _ = listener.accept()
                    if not self._slots.acquire(blocking=False):
                        client.close()
                        continue
                    threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            try:
                client.settimeout(ANSWER_S)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                said = _receive(client, TOKEN_BYTES + 1)
                if not hmac.compare_digest(said[:TOKEN_BYTES], self._token):
                    return
                if said[TOKEN_BYTES:] == PING:
                    while _receive(client, 1):
                        client.sendall(_TIME.pack(time.time()))
                elif said[TOKEN_BYTES:] == SEND:
                    piece = bytes(PIECE_BYTES)
                    while True:  # until the other end has measured enough and closes
                        client.sendall(piece)
            finally:
                self._slots.release()


@dataclass
class Client:
    """Asks the servers of other ranks. One thread.

    Attributes:
        token: the job's.
        networks: in which this host has addresses: those of others that lie there are tried first.
    """

    token: bytes
    networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network] = field(default_factory=list)

    def reach(self, addresses: Sequence[str], *, same_host: bool) -> Reached:
        """Try the addresses of a rank one after the other until a server with the token answers."""
        tried: list[str] = []
        for text in self._in_order(addresses, same_host=same_host):
            try:
                with self._ask(text, PING) as connection:
                    connection.sendall(b"?")
                    _receive(connection, _TIME.size)
                return Reached(text, tuple(tried))
            except OSError as error:
                tried.append(f"{text}: {_reason(error)}")
        return Reached("", tuple(tried))

    def latency(self, address: str) -> Latency:
        """By round trips of one byte. Raises OSError."""
        trips: list[tuple[float, float]] = []
        with self._ask(address, PING) as connection:
            for number in range(WARM_UP + PINGS):
                before, begin = time.time(), time.perf_counter()
                connection.sendall(b"?")
                (there,) = _TIME.unpack(_receive(connection, _TIME.size))
                trip = time.perf_counter() - begin
                if number >= WARM_UP:
                    trips.append((trip, there - before - trip / 2))
        fastest, offset = min(trips)
        return Latency(statistics.median(trip for trip, _ in trips), fastest, offset, fastest / 2)

    def rate_from(self, address: str, seconds: float) -> float:
        """Bytes a second that the rank there sends to this one, over one connection. Raises OSError.

        The first third of the time is not counted: the connection's window grows, and a rate limiter's bucket empties.
        """
        buffer = bytearray(PIECE_BYTES)
        with self._ask(address, SEND) as connection:
            # Closed with unread bytes, so that the kernel at the other end drops its queue instead of sending it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            begin = time.perf_counter()
            counted_from, end = begin + seconds / 3, begin + seconds
            received, started, last = 0, begin, begin
            while last < end:
                count = connection.recv_into(buffer)
                if count == 0:
                    raise ConnectionResetError("the other rank closed the connection")
                last = time.perf_counter()
                if last < counted_from:
                    started = last
                else:
                    received += count
        return received / (last - started) if last > started else 0.0

    def _ask(self, address: str, what: bytes) -> socket.socket:
        host, port = split(address)
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        try:
            connection.settimeout(ANSWER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self.token + what)
        except OSError:
            connection.close()
            raise
        return connection

    def _in_order(self, addresses: Sequence[str], *, same_host: bool) -> list[str]:
        def near(text: str) -> bool:
            try:
                ip = ipaddress.ip_address(split(text)[0].partition("%")[0])
            except ValueError:
                return False  # a name of RINGDP_ADVERTISE
            return same_host if ip.is_loopback else any(ip in network for network in self.networks)

        return sorted((it for it in addresses if same_host or not _is_loopback(it)), key=lambda it: not near(it))


def split(address: str) -> tuple[str, int]:
    """``ip:port`` or ``[ip]:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(split(address)[0].partition("%")[0]).is_loopback
    except ValueError:
        return False


def _text(name: tuple[object, ...]) -> str:
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(addresses: Sequence[str], port_range: tuple[int, int] | None) -> Iterator[socket.socket]:
    """A listener for each address; in a range of ports each takes the first that is free."""
    problem: OSError | None = None
    count = 0
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in [0] if port_range is None else range(port_range[0], port_range[1] + 1):
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                if port:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen(CLIENTS)
            except OSError as error:
                listener.close()
                problem = error
                continue
            count += 1
            yield listener
            break
    if count == 0:
        raise problem or OSError("there is no address to listen on")


def _receive(connection: socket.socket, count: int) -> bytes:
    """That many bytes. Raises OSError where the other end closes before."""
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        found += piece
    return found


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    return error.strerror or str(error)
