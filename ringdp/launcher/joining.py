"""Launchers of hosts that come later: where they find a running elastic job, by keys in the store of the rendezvous,
and how they show the launcher that keeps the ranks' store that theirs go on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ringdp.config import JOB_OVER, JOB_START, JOB_STORE, STORE_KEPT, read_address

_CONNECT_S = 3.0
_BUSY_S = 15.0  # a store's host may be busy, or wait for a name server that does not answer
_GUESTS = f"{JOB_START}/guests"
_BEAT_S = 0.5
_SILENT_S = 10.0


def publish(store: Store, run_id: str, address: str) -> None:
    """The job of this rendezvous has its ranks' store there, "HOST:PORT". Other rendezvous may use the same store."""
    root = _root(store)
    root.set(f"{JOB_STORE}/{run_id}", address)
    ids = root.get(JOB_STORE).decode().split("\n") if root.check([JOB_STORE]) else []
    root.set(JOB_STORE, "\n".join(dict.fromkeys([*ids, run_id])))


def kept(store: Store, run_id: str) -> tuple[str, int] | None:
    """The address of the rendezvous's store, if a process of its own keeps it, for this job; None: a launcher does.

    Raises:
        ValueError: it is that of another job.
    """
    root = _root(store)
    if not root.check([STORE_KEPT]):
        return None
    if (name := root.compare_set(STORE_KEPT, "", run_id).decode()) != run_id:
        raise ValueError(f"the store at {root.host}:{root.port} is that of the job {name}: start one for each job")
    return root.host, root.port


def running(host: str, port: int, run_id: str) -> bool:
    """Whether a job of that name has begun at that rendezvous, and its store answers: within 18 s each, if something
    listens there."""
    try:
        root = _open_where_one_listens(host, port)
        key = f"{JOB_STORE}/{run_id}"
        if not root.check([key]):
            return False
        _open_where_one_listens(*read_address(root.get(key).decode()))
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError):
        return False
    return True


def is_store(host: str, port: int) -> bool:
    """Whether a store of torch answers there."""
    try:
        _open(host, port).check([JOB_START])
    except (dist.DistNetworkError, dist.DistStoreError, OSError):
        return False
    return True


def _open(host: str, port: int, timeout_s: float = _CONNECT_S) -> TCPStore:
    return TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _open_where_one_listens(host: str, port: int) -> TCPStore:
    """Raises OSError at once where nothing does: TCPStore would try again for seconds."""
    socket.create_connection((host, port), timeout=_CONNECT_S).close()
    try:
        return _open(host, port)
    except (dist.DistNetworkError, dist.DistStoreError):
        return _open(host, port, _BUSY_S)


class Guest:
    """Of a launcher that has joined a job: a count in the ranks' store goes on while one of its ranks is a member.

    Attributes:
        member: one is; set by the agent's loop.
    """

    def __init__(self, host: str, port: int, name: str) -> None:
        self.member = False
        self._where = host, port, name
        threading.Thread(target=self._run, name="ringdp-guest", daemon=True).start()

    def _run(self) -> None:
        while True:  # until the process ends; a store that does not answer once, on a busy host, is asked again
            with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError, OSError, ValueError):
                store = self._store()
                store.add(_GUESTS, 1)  # one may be a member before the agent's loop has seen it
                while True:
                    time.sleep(_BEAT_S)
                    if self.member:
                        store.add(_GUESTS, 1)
            time.sleep(_BEAT_S)

    def _store(self) -> TCPStore:
        host, port, name = self._where
        store = _open(host, port)
        names = store.get(JOB_STORE).decode().split("\n") if store.check([JOB_STORE]) else []
        return _open(*read_address(store.get(f"{JOB_STORE}/{name or names[0]}").decode())) if names else store


class Guests:
    """Of the launcher that keeps the ranks' store: whether ranks of launchers that have joined the job are members of
    it. Used by the agent's loop alone."""

    def __init__(self, host: str, port: int) -> None:
        self._where = host, port
        self._store: TCPStore | None = None
        self._seen = 0, 0.0  # their count, and when it was found to have gone on
        self._silent_since: float | None = None  # the store

    def go_on(self) -> bool:
        """A guest that is silent for 10 s is gone; so are all where the store is. A busy host may miss a question."""
        now = time.monotonic()
        try:
            if self._store is None:
                self._store = _open(*self._where)
            count, over = self._store.add(_GUESTS, 0), _is_over(self._store)
        except (dist.DistNetworkError, dist.DistStoreError):
            self._silent_since = now if self._silent_since is None else self._silent_since
            return now - self._silent_since < _SILENT_S
        self._silent_since = None
        if count != self._seen[0]:
            self._seen = count, time.monotonic()
        count, since = self._seen
        return count > 0 and time.monotonic() - since < _SILENT_S and not over

    def ended_well(self) -> bool:
        """The training has, on whatever ranks."""
        return self._store is not None and _is_over(self._store)


def _is_over(store: Store) -> bool:
    """Whether the job with this store says that its training has ended."""
    if not store.check([JOB_START]):
        return False
    number = store.get(JOB_START).decode().split()[0]
    return store.check([f"{JOB_START}/{number}/{JOB_OVER}"])


def _root(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
