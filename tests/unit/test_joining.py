"""How a launcher finds a running elastic job."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringdp.launcher import joining
from tests.helpers import free_port


def test_a_job_is_found_whose_store_does_not_answer_at_first() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    joining.publish(store, "mine", f"127.0.0.1:{store.port}")
    opened = joining._open
    asked: list[float] = []

    def once_silent(host: str, port: int, *timeout_s: float) -> Any:
        asked.extend(timeout_s or [joining._CONNECT_S])
        if len(asked) == 1:
            raise dist.DistNetworkError("timed out")
        return opened(host, port, *timeout_s)

    with mock.patch.object(joining, "_open", once_silent):
        assert joining.running("127.0.0.1", store.port, "mine")
        assert not joining.running("127.0.0.1", store.port, "another")
    assert asked[1] > asked[0]


def test_where_nothing_listens_there_is_no_job_at_once() -> None:
    began = time.monotonic()
    assert not joining.running("127.0.0.1", free_port(), "mine")
    assert time.monotonic() - began < 1
