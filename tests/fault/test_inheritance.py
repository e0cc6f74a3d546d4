"""What a process that a rank has started takes over from it, and what it does not."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ringdp
from ringdp import config
from ringdp.config import inheritance
from ringdp.errors import InvalidStateError
from tests.fault.launch_jobs import Job, script
from tests.helpers import free_port
from tests.train.harness import ring_is_built, run_ranks

PLACES = {
    "RINGDP_METRICS_DIR": "/outer",
    "RINGDP_TIMELINE": "/time",
    "RINGDP_REPORT_FILE": "/r",
    "RINGDP_DUMP_DIR": "/d",
}
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "x", **PLACES}
MEET = "tcp://h:7"


def marked(pid: int, environ: dict[str, str] | None = None) -> dict[str, str]:
    environ = RANK if environ is None else environ
    return {**environ, inheritance.MARK: inheritance.mark(environ, pid=pid, rank=1, world_size=2, meet=MEET)}


def test_the_rank_itself_keeps_everything() -> None:
    """After an exec, too, which keeps pid and start."""
    environ = marked(os.getpid())
    assert inheritance.without_places(environ) == environ
    inheritance.refuse_inside_rank(environ, MEET)
    assert inheritance.has_own_agent(environ)


def test_what_a_rank_has_started_is_no_rank_and_has_no_places_of_its_job() -> None:
    environ = marked(os.getppid())
    assert not PLACES.keys() & inheritance.without_places(environ).keys()
    assert config.metrics_dir(environ) is None
    assert config.timeline_dir(environ) is None
    assert config.report_file(environ) is None
    assert config.RingConfig.from_environment(environ).dump_dir == ""
    with pytest.raises(InvalidStateError, match=rf"inside rank 1 \(pid {os.getppid()}\) of a running job of 2 ranks"):
        inheritance.refuse_inside_rank(environ, MEET)
    assert not inheritance.has_own_agent(environ)


def test_what_is_set_on_purpose_counts() -> None:
    environ = marked(os.getppid()) | {"RINGDP_METRICS_DIR": "/inner", "TORCHELASTIC_RUN_ID": "y"}
    assert config.metrics_dir(environ) == "/inner"
    assert config.timeline_dir(environ) is None
    inheritance.refuse_inside_rank(environ, "tcp://h:8")
    inheritance.refuse_inside_rank(environ, None)
    assert inheritance.has_own_agent(environ)


def test_what_outlives_the_rank_may_take_its_place() -> None:
    child = subprocess.Popen(["sleep", "60"])
    environ = marked(child.pid)
    child.kill()
    child.wait()
    inheritance.refuse_inside_rank(environ, MEET)
    assert inheritance.without_places(environ).keys() == environ.keys() - PLACES.keys()


@pytest.mark.parametrize("pid", [0, os.getppid()])
def test_a_launcher_hands_on_nothing_of_the_job_around_it(pid: int) -> None:
    environ = marked(pid) | {"PET_NNODES": "2", "RINGDP_METRICS_DIR": "/inner", "RINGDP_IFACE": "eth0"}
    left = environ.keys() - set(inheritance.inherited_by_launcher(environ))
    assert left == {"PET_NNODES", "RINGDP_METRICS_DIR", "RINGDP_IFACE"}


@pytest.mark.parametrize("text", ["", "1", "{}", "[1]", '{"pid": 1}'])
def test_a_mark_that_cannot_be_read_is_none(text: str) -> None:
    environ = {**RANK, inheritance.MARK: text}
    assert inheritance.without_places(environ) == environ


# Rank 0 of two trains, starts others meanwhile, and trains on.
PROGRAM = """
    import os, pathlib, subprocess, sys, torch, ringdp
    ringdp.init(timeout=150)
    model = ringdp.RingDP(torch.nn.Linear(3, 1))
    def steps(count):
        for _ in range(count):
            model(torch.ones(2, 3)).sum().backward()
    def start(name, *words, **variables):
        log = open(f"{name}.said", "w")
        words = words or (sys.executable, f"{name}.py")
        return subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **variables})
    steps(3)
    if ringdp.rank() == 0:
        launch = (sys.executable, "-m", "ringdp.launch", "-n", "2", "--log-dir", "inner", "job.py")
        for child in (start("script"), start("job", *launch)):
            child.wait()
    steps(3)
    ringdp.shutdown()
"""

TRAIN = """
    import os, torch, ringdp
    def train():
        assert "RINGDP_METRICS_DIR" not in os.environ
        ringdp.RingDP(torch.nn.Linear(3, 1))(torch.ones(2, 3)).sum().backward()
        return ringdp.world_size()
"""
ALONE = """
    for call in (ringdp.init, lambda: torch.distributed.init_process_group("ring")):
        try:
            call()
        except ringdp.errors.InvalidStateError as error:
            print("refused:", error)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="A_FREE_ONE")
    ringdp.init()
    print("ranks:", train())
"""
CHILDREN = {
    "script": TRAIN + ALONE,
    "job": TRAIN + "    ringdp.init(); print('ranks:', train(), flush=True)",
}

needs_ring = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.mark.ci
@needs_ring
def test_what_a_rank_starts_disturbs_its_job_in_nothing(tmp_path: Path, jobs: list[Job]) -> None:
    for name, text in CHILDREN.items():
        script(tmp_path, text.replace("A_FREE_ONE", str(free_port())) if name == "script" else text, f"{name}.py")
    path = script(tmp_path, PROGRAM, "outer.py")
    job = Job(tmp_path, "-n", "2", "--metrics-dir", tmp_path / "metrics", path)
    jobs.append(job)
    assert job.wait(200) == 0, job.err
    for rank in range(2):
        lines = (tmp_path / "metrics" / f"rank_{rank:05}.jsonl").read_text().splitlines()
        assert sum("step" in json.loads(line) for line in lines) == 6
    said = {name: (tmp_path / f"{name}.said").read_text() for name in CHILDREN}
    assert said["script"].count("refused: this process (pid") == 2, said["script"]
    assert said["script"].count("inside rank 0 (pid") == 2
    assert "ranks: 1\n" in said["script"], said["script"]
    assert "ranks: 2\n" in said["job"], said["job"]
    assert list((tmp_path / "inner").glob("*/attempt_0/1/report.json"))


@needs_ring
def test_a_rank_of_another_job_takes_no_place_of_the_one_around_it() -> None:
    """One of `ringdp.launch` or torchrun inside a rank: they hand on their environment."""
    [left] = run_ranks(_join_another_job, marked(os.getpid()), world_size=1, backend=None)
    assert left == {"RINGDP_TIMELINE": "/mine"}


def _join_another_job(environ: dict[str, str]) -> dict[str, str]:
    os.environ.update(environ, RINGDP_TIMELINE="/mine")
    ringdp.init(rank=0, world_size=1)
    found = {name: value for name, value in os.environ.items() if name in PLACES}
    ringdp.shutdown()
    return found


@needs_ring
def test_a_process_that_a_rank_has_forked() -> None:
    [said] = run_ranks(_init_in_a_fork, world_size=1, backend=None)
    assert "was forked by rank 0 (pid" in said


def _init_in_a_fork() -> str:
    ringdp.init(rank=0, world_size=1, init_method="file:///not-used")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_try_init, args=(theirs,))
    child.start()
    said = ours.recv() if ours.poll(30) else "nothing"
    child.join()
    ringdp.shutdown()
    return str(said)


def _try_init(pipe: Any) -> None:
    try:
        ringdp.init()
    except InvalidStateError as error:
        pipe.send(str(error))


@needs_ring
@pytest.mark.parametrize("name", ["script.py", "torch.py"])
def test_what_a_rank_starts_after_it_has_left_may_take_its_place(tmp_path: Path, name: str) -> None:
    text = """
    import subprocess, sys, torch, ringdp
    ringdp.init()
    if len(sys.argv) == 1:
        torch.distributed.destroy_process_group() if sys.argv[0].endswith("torch.py") else ringdp.shutdown()
        sys.exit(subprocess.run([sys.executable, __file__, "second"]).returncode)
    """
    path = script(tmp_path, text, f"by_{name}")
    environ = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    assert subprocess.run([sys.executable, path], env=environ, timeout=60).returncode == 0
