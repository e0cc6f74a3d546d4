"""What tests/integrations/test_torchft.py runs: `python -m tests.integrations.torchft_job FOLDER HOW REPLICAS WHEN`.

A lighthouse and REPLICAS replica groups (torchft_replica.py). The last of them dies by SIGKILL: WHEN is `inside` an
all-reduce that the others have begun, or `between` two steps. The others go on without it; it is started again, and all
train together before they end. FOLDER/rank<r>.pt tells what each group found, with the lines of all its steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torchft.coordination import LighthouseServer

HEARTBEAT_TIMEOUT_MS = 1000  # after it the lighthouse counts a replica group as dead
TOGETHER = 10  # steps with all groups, before the death and after it
PATIENCE_S = 90.0


class Replica:
    """A replica group of one process, which may be started again."""

    def __init__(self, folder: Path, number: int, how: str, lighthouse: str) -> None:
        self._folder = folder
        self._number = number
        self._how = how
        self._environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse}
        self.process: subprocess.Popen[bytes]

    def start(self, *, die: int | None = None) -> None:
        command = [sys.executable, "-m", "tests.integrations.torchft_replica", str(self._folder), str(self._number)]
        command += [self._how, *([] if die is None else [str(die)])]
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def lines(self, *, since: float = 0.0) -> Iterator[dict[str, Any]]:
        """What it wrote after each step that ended later than `since`."""
        path = self._folder / f"replica{self._number}.jsonl"
        for text in path.read_text().splitlines(keepends=True) if path.exists() else []:
            if text.endswith("\n") and (line := json.loads(text))["ended_at"] > since:
                yield line

    def steps_with(self, participants: int, *, since: float = 0.0) -> int:
        return sum(line["committed"] and line["participants"] == participants for line in self.lines(since=since))

    def require_success(self) -> None:
        if self.process.poll() not in (None, 0):
            said = self._log.read_text(errors="replace")
            raise SystemExit(f"replica {self._number} ended with {self.process.returncode}:\n{said[-4000:]}")

    def add_lines_to_results(self) -> None:
        path = self._folder / f"rank{self._number}.pt"
        torch.save({**torch.load(path), "lines": list(self.lines())}, path)

    @property
    def _log(self) -> Path:
        return self._folder / f"replica{self._number}.log"


def wait_until(reached: Callable[[], bool], replicas: list[Replica], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not reached():
        for replica in replicas:
            replica.require_success()
        if time.monotonic() > end:
            raise SystemExit(f"nothing in {PATIENCE_S:g} s: {what}")
        time.sleep(0.02)


def go_on(replicas: list[Replica], since: float, *, participants: int) -> None:
    """Wait until each of them made some steps with so many groups."""
    what = f"steps with {participants} groups"
    wait_until(lambda: all(it.steps_with(participants, since=since) >= TOGETHER for it in replicas), replicas, what)


def conduct(folder: Path, replicas: list[Replica], *, inside: bool) -> None:
    count, (*others, victim) = len(replicas), replicas
    for replica in replicas:
        replica.start(die=count if inside and replica is victim else None)
    if inside:
        wait_until(lambda: victim.process.poll() is not None, others, "a death inside an all-reduce")
        assert victim.process.returncode == -signal.SIGKILL
    else:
        wait_until(lambda: victim.steps_with(count) >= TOGETHER, replicas, "steps of all groups")
        victim.process.kill()
        victim.process.wait()
    died_at = time.time()
    wait_until(
        lambda: all(it.steps_with(count - 1, since=died_at) >= TOGETHER for it in others), others, "steps without"
    )
    started_at = time.time()
    victim.start()
    wait_until(lambda: all(it.steps_with(count, since=started_at) >= TOGETHER for it in replicas), replicas, "a return")
    last = max(line["step"] for it in replicas for line in it.lines()) + 5 * TOGETHER
    (folder / "last_step.new").write_text(str(last))
    (folder / "last_step.new").rename(folder / "last_step")
    wait_until(lambda: all(it.process.poll() == 0 for it in replicas), replicas, "the end")
    for replica in replicas:
        replica.add_lines_to_results()


def main() -> None:
    folder, how, count, when = sys.argv[1:]
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
    )
    replicas = [Replica(Path(folder), number, how, lighthouse.address()) for number in range(int(count))]
    conduct(Path(folder), replicas, inside=when == "inside")
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
