"""The rendezvous of a job's ranks for the doctor, in the job's own store, with a deadline for each step."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ringdp.config import LaunchEnvironment
from ringdp.job import job_store

POLL_S = 0.02
LAST_S = 3.0
"""For which rank 0 waits for the others to go, so that its store does not end before they have."""


class Missing(Exception):
    """Ranks did not take part in a step in time.

    Attributes:
        ranks: those that did not.
        what: that step.
    """

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        super().__init__(f"{describe_ranks(ranks)} did not {what}")
        self.ranks, self.what = list(ranks), what


class Meeting:
    """This rank and the others, on the job's store. Every rank calls the same methods in the same order; one thread."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store = store
        self._rounds = 0

    @classmethod
    def of_launcher(cls, place: LaunchEnvironment, timeout_s: float, *, epoch: int = 0) -> Meeting:
        """Connect to the store of the launcher's address.

        Raises:
            HandshakeError: the store cannot be reached or kept there.
        """
        start = f"ringdp/doctor/{epoch}"
        store = job_store.open_store(
            place.init_method,
            place.rank,
            place.world_size,
            timedelta(seconds=timeout_s),
            agent_store=place.agent_store,
            start=f"{start}/kept",
        )
        return cls(PrefixStore(start, store), place.rank, place.world_size, timeout_s)

    def all_say(self, topic: str, content: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
        """The `content` (for JSON) of every rank. Raises Missing: some rank did not `what` in time."""
        found, missing = self.gather_present(topic, content, timeout_s=timeout_s)
        if missing:
            raise Missing(missing, what)
        return [found[rank] for rank in range(self.world_size)]

    def gather_present(
        self, topic: str, content: Any, *, timeout_s: float | None = None
    ) -> tuple[dict[int, Any], list[int]]:
        """The content of every rank that wrote it in time, and the other ranks."""
        self._rounds += 1
        key = f"{self._rounds}/{topic}"
        self._store.set(f"{key}/{self.rank}", json.dumps(content))
        left = set(range(self.world_size))
        found: dict[int, Any] = {}
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while left:
            here = [rank for rank in sorted(left) if self._store.check([f"{key}/{rank}"])]
            for rank in here:
                found[rank] = json.loads(self._store.get(f"{key}/{rank}"))
            left -= set(here)
            if left and time.monotonic() > deadline:
                break
            if left and not here:
                time.sleep(POLL_S)
        return found, sorted(left)

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. Raises Missing: some did not `what` in time."""
        self._rounds += 1
        key = f"{self._rounds}/barrier"
        self._store.set(f"{key}/{self.rank}", "")
        if self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(f"{key}/all", "")
        limit = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        try:
            self._store.wait([f"{key}/all"], limit)  # without polling, which would disturb the others' measurements
        except RuntimeError:
            missing = [rank for rank in range(self.world_size) if not self._store.check([f"{key}/{rank}"])]
            if missing:
                raise Missing(missing, what) from None
            if not self._store.check([f"{key}/all"]):
                raise

    def leave(self) -> None:
        """Leave the store: rank 0, which may keep it, leaves last, as long as the others leave within a few seconds."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                everyone = [f"left/{rank}" for rank in range(self.world_size)]
                self._store.wait(everyone, timedelta(seconds=LAST_S))


def describe_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 1, 2 and 7``, ``ranks 1, 2, … (40 of them)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most:
        return f"ranks {', '.join(map(str, ranks[:most]))}, … ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
