"""What the ranks of test_elastic_store.py do: train, and be killed at an access to the store in a change of members."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

from torch._C._distributed_c10d import Store

from ringdp import _C
from tests.fault import elastic_jobs
from tests.fault.elastic_jobs import Told
from tests.fault.faults import Faults

OF_A_CHANGE = "/elastic/"
"""In the keys of a change, and in no others."""


def train(folder: str, steps: range, faults: Faults, *, place: int, at: int | str, **options: Any) -> Told:
    """As `elastic_jobs.train`; `place` is killed as `DyingStore` has it."""
    if int(os.environ["RANK"]) != place:
        return elastic_jobs.train(folder, steps, faults, **options)
    create = _C.create_process_group
    stores = []

    def create_with_it(**named: Any) -> Any:
        stores.append(DyingStore(named["store"], at))
        return create(**named | {"store": stores[-1]})

    with mock.patch.object(_C, "create_process_group", create_with_it):
        return elastic_jobs.train(folder, steps, faults, **options)


class DyingStore(Store):
    """The launcher's store, which kills the rank that uses it.

    `at`: 3 is before its third access in a change; "before set" and "after set" are at the first one of that name.
    """

    def __init__(self, inner: Store, at: int | str) -> None:
        super().__init__()
        self._inner, self._at, self._accesses = inner, at, 0

    def _access(self, name: str, key: str, call: Callable[[], Any]) -> Any:
        if OF_A_CHANGE not in key:
            return call()
        self._accesses += 1
        self._die_at(self._accesses)
        self._die_at(f"before {name}")
        answer = call()
        self._die_at(f"after {name}")
        return answer

    def _die_at(self, here: int | str) -> None:
        if here == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._access("set", key, lambda: self._inner.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        found: bytes = self._access("get", key, lambda: self._inner.get(key))
        return found

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        def call() -> bytes:
            return self._inner.compare_set(key, expected, desired)  # type: ignore[arg-type]

        found: bytes = self._access("compare_set", key, call)
        return found

    def check(self, keys: list[str]) -> bool:
        found: bool = self._access("check", keys[0], lambda: self._inner.check(keys))
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._inner.multi_get(keys)

    def wait(self, *arguments: Any) -> None:
        self._inner.wait(*arguments)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def has_extended_api(self) -> bool:
        found: bool = self._inner.has_extended_api()  # type: ignore[attr-defined]
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def clone(self) -> DyingStore:
        return self
