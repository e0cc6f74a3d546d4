"""The job's store: rank 0 or the launcher opens it, the other ranks connect to it."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ringdp.errors import HandshakeError, InvalidArgumentError

FIRST_NOTICE_S = 10.0  # until the log names the ranks or the store that are waited for; then at doubling intervals
_CONNECT_S = 2.0  # for one attempt to reach the store
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between two of them
_LEAST_S = 1.0  # for torch to say why it cannot reach the store
_log = logging.getLogger("ringdp.process_group")


def open_store(
    init_method: str | None, rank: int, world_size: int, timeout: timedelta, *, agent_store: bool, start: str
) -> Store:
    """The store at ``init_method``; rank 0 keeps it, unless the launcher's agent does. None: a store of our own.

    Args:
        start: a key that differs for each rendezvous of these ranks.

    Raises:
        HandshakeError: it cannot be reached or kept there.
        InvalidArgumentError: ``init_method`` cannot be used.
    """
    if init_method is None:
        return HashStore()
    try:
        start = "" if agent_store else start
        store = _open_store(init_method, rank, world_size, timeout, keep=rank == 0 and not agent_store, start=start)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            advice = "the port is taken by a job that still runs or another program: choose another MASTER_PORT"
        else:
            advice = "does rank 0 run, is the address its own, and is there no firewall between?"
        raise HandshakeError(
            f"rank {rank} of {world_size} could not reach the job's store ({init_method}): {advice}\n{error}",
            rank=rank,
            advice=advice,
        ) from error
    store.set_timeout(timeout)
    return store


def _open_store(init_method: str, rank: int, world_size: int, timeout: timedelta, *, keep: bool, start: str) -> Store:
    url = urllib.parse.urlsplit(init_method)
    if url.scheme == "tcp" and url.hostname and url.port:
        # Not by torch's rendezvous: there rank 0 would wait for the others inside, and could not name the missing ones.
        where = contextlib.nullcontext() if keep else _logging_the_wait(url.hostname, url.port, rank, world_size)
        with where:
            deadline = time.monotonic() + timeout.total_seconds()
            while True:
                left = timeout if keep else _await_listener(url.hostname, url.port, deadline)
                store: Store = TCPStore(
                    url.hostname, url.port, world_size, keep, timeout=left, wait_for_workers=False, multi_tenant=True
                )
                if not start or _is_of_this_start(store, start, deadline, keep=keep):
                    return store
    try:
        store = next(rendezvous(init_method, rank, world_size, timeout=timeout))[0]
    except (ValueError, RuntimeError) as error:
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
            raise
        raise InvalidArgumentError(f"init_method={init_method} cannot be used: {error}") from error
    return store


def _is_of_this_start(store: Store, start: str, deadline: float, *, keep: bool) -> bool:
    """False: rank 0 kept that store for the last start, and has ended it; it is about to keep another one there."""
    if keep:
        store.set(start, "")
        return True
    pause_s = _SHORTEST_PAUSE_S
    try:
        while not store.check([start]) and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    except dist.DistNetworkError:
        return False
    return True  # or rank 0 has not come: the ranks that wait for it say so


def _await_listener(host: str, port: int, deadline: float) -> timedelta:
    """Wait until the store's port is open, or until the error should be torch's. Returns the time that is left.

    A rank that comes before the store has opened its port would sleep for seconds inside torch, which tries again at
    intervals that grow from about a second.
    """
    pause_s = _SHORTEST_PAUSE_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            # As bytes: Python would import its codec for international names, which takes longer than all the rest.
            address: Any = (host.encode(), port)
            socket.create_connection(address, timeout=min(left_s, _CONNECT_S)).close()
            break
        except ConnectionRefusedError:
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        except OSError:
            break
    return timedelta(seconds=max(_LEAST_S, deadline - time.monotonic()))


@contextlib.contextmanager
def _logging_the_wait(host: str, port: int, rank: int, world_size: int) -> Iterator[None]:
    """Inside the block the log has a line that this rank waits for the store, with the reason.

    After ten seconds, then at doubling intervals: torch itself tries again until the timeout and logs nothing.
    """
    reached = threading.Event()

    def log() -> None:
        wait_s = FIRST_NOTICE_S
        while not reached.wait(wait_s):
            wait_s *= 2
            try:
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
                why = "it accepts connections and does not answer"
            except OSError as error:
                why = f"{error}; has rank 0 started, and is there no firewall between?"
            if not reached.is_set():
                text = "rank %d of %d waits for the job's store at %s:%d: %s"
                _log.warning(text, rank, world_size, host, port, why)

    threading.Thread(target=log, name="ringdp-store", daemon=True).start()
    try:
        yield
    finally:
        reached.set()
