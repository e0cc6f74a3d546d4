"""ringdp.launch: a function on several ranks, from a script, a module or a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.fault.launch_jobs import ROOT, wait_until
from tests.helpers import need

need("ringdp._C", "ringdp's extension, built with `make build`,")

import ringdp  # noqa: E402
from ringdp.errors import InvalidArgumentError  # noqa: E402

# What a notebook does: code without a file, in a process that has torch and has computed.
CELL = """
import json, os
import torch
import ringdp

torch.ones(1000, 1000).matmul(torch.ones(1000, 1000))

def train(scale, offset=0):
    x = torch.full((3,), float(ringdp.rank() + 1), requires_grad=True)
    model = ringdp.RingDP(torch.nn.Linear(3, 1))
    model(x).sum().backward()
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="fork")
    return ringdp.rank(), ringdp.world_size(), scale * len(list(loader)) + offset, os.getpid()

print(json.dumps(ringdp.launch(train, (2,), {"offset": 1}, nprocs=2)))
"""
FAILS = """
import os
import ringdp

def fails():
    if ringdp.rank() == 1:
        raise KeyError("no such column")
    ringdp.monitored_barrier()

try:
    ringdp.launch(fails, nprocs=2)
except ringdp.RankError as error:
    print(error)
"""
COMPUTED = """
import signal, threading
import torch
import ringdp

torch.set_num_threads(2)
torch.ones(700, 700).matmul(torch.ones(700, 700)).sum()

def train():
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # which only a main thread may
    torch.set_num_threads(2)
    return float(torch.ones(700, 700).matmul(torch.ones(700, 700))[0, 0]), torch.get_num_threads()

def launch():
    print(ringdp.launch(train, nprocs=2, timeout=60))

"""
LATE = """
import time
import ringdp

def sleeps():
    time.sleep(600 if ringdp.rank() == 1 else 0)

try:
    ringdp.launch(sleeps, nprocs=2, timeout=5)
except ringdp.RankError as error:
    print(error)
"""
STAYS = """
import pathlib, time
import ringdp

def stay(folder):
    pathlib.Path(folder, f"pid-{ringdp.rank()}").write_text(str(__import__("os").getpid()))
    time.sleep(600)

ringdp.launch(stay, (FOLDER,), nprocs=2)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False
    )


def test_from_a_notebook() -> None:
    done = run(CELL)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert [result[:3] for result in results] == [[0, 2, 9], [1, 2, 9]]
    assert len({result[3] for result in results}) == 2


def test_a_function_of_a_module_in_fresh_processes() -> None:
    # A function of the library itself stands for one of a user's module.
    assert ringdp.launch(ringdp.world_size, nprocs=2, device="cpu", timeout=60) == [2, 2]


def test_the_error_has_the_rank_and_its_traceback() -> None:
    done = run(FAILS)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.startswith("fails failed on 2 of 2 ranks: rank 1 raised KeyError: 'no such column'\n--- rank 0 ---\n")
    of_rank_0, _, of_rank_1 = text.partition("--- rank 1 ---\nTraceback")
    assert "it called ringdp.shutdown() after KeyError: 'no such column'" in of_rank_0
    assert "KeyError: 'no such column'" in of_rank_1
    assert " log" not in text  # no rank has one


@pytest.mark.parametrize(
    "call",
    ["launch()", "thread = threading.Thread(target=launch)\nthread.start()\nthread.join()"],
    ids=["main", "thread"],
)
def test_forked_ranks_compute_with_threads_where_the_caller_has_done_so(call: str) -> None:
    done = run(COMPUTED + call)
    assert done.stdout == "[(700.0, 2), (700.0, 2)]\n", done.stderr


def test_the_error_of_a_rank_that_takes_too_long_has_its_stack() -> None:
    done = run(LATE)
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("--- rank 1 ---\n")[2]
    assert told.startswith("did not end in time; its threads then:\n")
    assert "in sleeps" in told.partition("--- rank")[0]


def test_ranks_end_with_the_process_that_called(tmp_path: Path) -> None:
    code = STAYS.replace("FOLDER", repr(str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)), "both ranks", 60)
    time.sleep(0.1)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of the ranks", 5)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one rank, not nprocs=0"):
        ringdp.launch(ringdp.rank, nprocs=0)
    with pytest.raises(InvalidArgumentError, match="'spawn' or 'fork', not 'forkserver'"):
        ringdp.launch(ringdp.rank, start_method="forkserver")


@pytest.mark.parametrize(
    "arguments",
    [
        *({"nprocs": one} for one in ("2", "", None, True, 1.5, 2.0, -1, 10**12)),
        *({"timeout": one} for one in ("2", True, 0, -1, float("nan"), 1e300)),
        *({"args": one} for one in ("ab", 3)),
        *({"kwargs": one} for one in ([1], "ab", {1: 2})),
        *({"backend": one} for one in ("", 3)),
        *({"start_method": one} for one in ("", 3, True)),
        {"function": None},
        {"function": "train"},
    ],
    ids=str,
)
def test_arguments_of_other_types_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ringdp.launch(**{"function": ringdp.rank} | arguments)
    assert next(iter(arguments)) in str(caught.value)


def test_importing_the_module_of_that_name_leaves_the_function() -> None:
    code = "import ringdp.launch, ringdp; from ringdp import launch; print(ringdp.launch is launch, launch.__module__)"
    assert run(code).stdout == "True ringdp.job.local_ranks\n"


def test_a_rank_forks_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forked ranks would be told that they have called init before."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ringdp.InvalidStateError, match=r"a rank of a job itself: call ringdp.shutdown\(\) before"):
        ringdp.launch(lambda: 1, nprocs=1)
