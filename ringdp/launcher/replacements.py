"""Processes in the place of ranks that have died, in a job whose script lets newcomers in (`ringdp.elastic.Job`)."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ringdp.config import ADMITS_MARK
from ringdp.launcher.logs import RankLogs

PERIOD_S = 600.0
SAME_S = 60.0
"""A replacement that ends in the same way so soon after its start is the last one of its rank."""


@dataclasses.dataclass
class _Slot:
    """One local rank. `began_s`: of its last replacement; `due_s`: of the next one; None: none is to come."""

    began_s: float | None = None
    code: int | None = None
    due_s: float | None = None
    count: int = 0


class Replacements:
    """Of the ranks of this host. Used by the agent's loop alone.

    Args:
        most: replacements in ten minutes.
        logs_of: the files of the process with which a local rank began.
    """

    def __init__(self, most: int, logs_of: Callable[[int], RankLogs]) -> None:
        self._most, self._logs_of = most, logs_of
        self._slots: dict[int, _Slot] = {}
        self._started_s: deque[float] = deque()

    def clear(self) -> None:
        """All ranks are started again."""
        self._slots.clear()

    def replaced(self, local_rank: int) -> bool:
        """The process of this rank is a replacement."""
        return local_rank in self._slots and self._slots[local_rank].began_s is not None

    def note_death(self, context: SubprocessContext, local_rank: int, code: int) -> str | None:
        """A rank has died. Returns why nothing comes in its place; None: something does, or nothing can."""
        if not any(beside(context, one, ADMITS_MARK).exists() for one in context.subprocess_handlers):
            return None
        slot, now_s = self._slots.setdefault(local_rank, _Slot()), time.monotonic()
        while self._started_s and now_s - self._started_s[0] > PERIOD_S:
            self._started_s.popleft()
        again = slot.began_s is not None and now_s - slot.began_s < SAME_S and slot.code == code
        slot.code, slot.due_s = code, None
        if self._most == 0:
            return None
        if again:
            return f"its replacement has ended in the same way within {SAME_S:g} s, so it gets no other one"
        if len(self._started_s) >= self._most:
            return f"{self._most} ranks were replaced in {PERIOD_S / 60:g} minutes (--max-replacements), so it is not"
        slot.due_s = now_s + (0.0 if slot.count == 0 else min(2.0 ** (slot.count - 1), 30.0))
        return None

    def start(self, context: SubprocessContext) -> dict[int, RankLogs]:
        """Start what is due. Returns the logs of the new processes, by local rank."""
        started = {}
        for local_rank, slot in self._slots.items():
            if slot.due_s is None or time.monotonic() < slot.due_s:
                continue
            slot.due_s, slot.began_s = None, time.monotonic()
            slot.count += 1
            self._started_s.append(slot.began_s)
            started[local_rank] = self._logs_of(local_rank).of_replacement(slot.count)
            _start(context, started[local_rank])
        return started

    def due(self) -> bool:
        """One is to be started, now or later."""
        return any(slot.due_s is not None for slot in self._slots.values())


def beside(context: SubprocessContext, local_rank: int, name: str) -> Path:
    """The file of that name beside the report of a local rank's process, where it leaves marks for the launcher."""
    return Path(context.envs[local_rank]["RINGDP_REPORT_FILE"]).with_name(name)


class _Appending(SubprocessHandler):
    """A process that appends to the files of its streams: a user's (--logs-specs) have those of the one before."""

    def __init__(self, logs: RankLogs, **named: Any) -> None:
        self._files = logs.stdout, logs.stderr
        super().__init__(stdout=None, stderr=None, **named)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        self._stdout, self._stderr = (open(path, "a") if path else None for path in self._files)  # noqa: SIM115
        return super()._popen(args, env)


def _start(context: SubprocessContext, logs: RankLogs) -> None:
    local_rank, environ = logs.local_rank, context.envs[logs.local_rank]
    # A replacement of a rank that has joined from another launcher joins there, too.
    join = os.environ.get("RINGDP_JOIN") or f"[{environ['MASTER_ADDR']}]:{environ['MASTER_PORT']}"
    context.envs[local_rank] = environ | logs.variables() | {"RINGDP_JOIN": join}
    context.error_files[local_rank] = logs.error_file
    context.subprocess_handlers[local_rank] = _Appending(
        logs,
        entrypoint=context.entrypoint,
        args=context.args[local_rank],
        env=context.envs[local_rank],
        local_rank_id=local_rank,
        numa_options=context._numa_options,
    )
