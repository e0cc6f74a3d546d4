"""Where launchers of hosts that come later find a running elastic job: keys in the store of the rendezvous."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ringdp.config import JOB_STORE, read_address

_CONNECT_S = 3.0


def publish(store: Store, run_id: str, address: str) -> None:
    """The job of this rendezvous has its ranks' store there, "HOST:PORT". Other rendezvous may use the same store."""
    root = _root(store)
    root.set(f"{JOB_STORE}/{run_id}", address)
    ids = root.get(JOB_STORE).decode().split("\n") if root.check([JOB_STORE]) else []
    root.set(JOB_STORE, "\n".join(dict.fromkeys([*ids, run_id])))


def running(host: str, port: int, run_id: str) -> bool:
    """Whether a job of that name has begun at that rendezvous, and its store answers."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()  # TCPStore would try again for seconds
        root = TCPStore(host, port, None, False, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        key = f"{JOB_STORE}/{run_id}"
        if not root.check([key]):
            return False
        seconds = timedelta(seconds=_CONNECT_S)
        TCPStore(*read_address(root.get(key).decode()), None, False, timeout=seconds, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError, OSError, ValueError):
        return False
    return True


def _root(store: Any) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
