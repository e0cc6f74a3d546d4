"""Jobs of diagnosis.py that hang: what the first notice and `python -m ringdp explain` say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.ranks import RanksFailed, start, stop_all, torchrun_env

ROOT = Path(__file__).resolve().parents[1]
RANK = str(Path(__file__).with_name("diagnosis_hang_rank.py"))
NOTICE_S = 1.0
_PATIENCE_S = 60.0
_STANDS_S = 2.0  # `explain` blames nobody for what is younger

WORDS = {
    "stuck": ("Rank 1 never called all_reduce #", "is at diagnosis_hang_rank.py", "in spin"),
    "asleep": ("Rank 1 never called all_reduce #", "sleeps at diagnosis_hang_rank.py", "in main"),
    "lock": ("Rank 1 never called all_reduce #", "waits for a lock at diagnosis_hang_rank.py", "in wait_for_a_lock"),
    "other_group": ("rank 1 waits in barrier #1 of group", "for rank 0, which has not called it"),
    "crossed": ("Deadlock of 2 groups that are taken in other orders", "rank 1 waits in all_reduce #1"),
}
"""What `explain` has to say, by the cause."""


def run_case(cause: str, slow: int) -> dict[str, Any]:
    """The first notice, or the error instead of it, and the paragraph of `explain`. Raises RanksFailed."""
    with tempfile.TemporaryDirectory(prefix="ringdp-diagnosis-") as folder:
        dumps = Path(folder, "dumps")
        settings = json.dumps({"cause": cause, "folder": folder, "slow": slow})
        own = {"RINGDP_STALL_NOTICE": str(NOTICE_S), "RINGDP_DUMP_DIR": str(dumps), "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        ranks, logs = 2, []
        running: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(ranks):
                logs.append(Path(folder, f"log_{rank}"))
                place = torchrun_env(
                    rank=rank,
                    local_rank=rank,
                    world_size=ranks,
                    local_world_size=ranks,
                    host=0,
                    address="127.0.0.1",
                    port=1,
                )
                with open(logs[-1], "w") as log:
                    running.append(start([sys.executable, RANK, settings], env=env | place, stdout=log, stderr=log))
            began, notice = time.monotonic(), ""
            while not notice:
                ended = any(one.poll() is not None for one in running)
                lines = logs[0].read_text().splitlines()
                notice = next((line for line in lines if "has waited" in line or "MismatchError: deadlock" in line), "")
                if not notice and (ended or time.monotonic() - began > _PATIENCE_S):
                    raise RanksFailed(f"{cause}: no notice; rank 0 said: {logs[0].read_text()}")
                time.sleep(0.1)
            time.sleep(_STANDS_S)
            _tool("dump", str(dumps))  # after an error the ranks have done so themselves
            return {"notice": notice, "text": _tool("explain", str(dumps)).split("\n\n")[0].replace("\n", " ")}
        finally:
            stop_all(running)


def _tool(*words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ringdp", *words]
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60).stdout


def right(cause: str, found: dict[str, Any]) -> bool:
    """Whether the one notice names the rank, and `explain` what it does instead."""
    return "rank 1" in found["notice"] and all(words in found["text"] for words in WORDS[cause])
