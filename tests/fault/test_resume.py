"""examples/checkpoint_resume.py: whoever dies, and whenever, training goes on to the same losses, bit for bit."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.hosts import Outcome, RankServer, RankSpec
from tests.fault.launch_jobs import ROOT, Job
from tests.helpers import need

need("sklearn.datasets", "scikit-learn")
need("tqdm")

STEPS, EVERY = 24, 5
LEFT_TO_DIE = "9"


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    server = RankServer("tests.fault.resume_jobs")
    yield server
    server.close()


class Run:
    """Attempts of one training, as a launcher with --max-restarts makes them, in processes forked from one."""

    def __init__(self, server: RankServer, folder: Path, world: int) -> None:
        self.server, self.folder, self.world = server, folder, world
        self.files = folder / "files"
        self.attempts = 0

    def attempt(self, kills: int = 0, **variables: str) -> list[Outcome]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        arguments = f"--steps {STEPS} --every {EVERY} --batch-size 8 --keep 2 --seed 0 --kills {kills}"
        common = {
            "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": str(self.attempts),
            "TORCHELASTIC_MAX_RESTARTS": LEFT_TO_DIE,
            "TEST_ARGUMENTS": f"{arguments} --folder {self.files}",
        }
        common |= variables
        specs = [
            RankSpec(r, self.world, variables=common | {"RANK": str(r)}, body="tests.fault.resume_jobs:train")
            for r in range(self.world)
        ]
        self.attempts += 1
        work = self.folder / f"attempt-{self.attempts}"
        work.mkdir(parents=True)
        return self.server.run(specs, work)

    def checkpoints(self) -> dict[int, Path]:
        return {int(path.name[5:17]): path for path in sorted(self.files.glob("step-*.pt"))}


def told(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes), outcomes
    return [json.loads(outcome.text) for outcome in outcomes]


def died(outcomes: list[Outcome]) -> list[int]:
    """Which ranks were killed; the others lost them."""
    killed = [rank for rank, outcome in enumerate(outcomes) if outcome.text == "code -9"]
    for rank, outcome in enumerate(outcomes):
        assert rank in killed or outcome.error in ("PeerLostError", "RuntimeError", "DistBackendError"), outcome
    return killed


@pytest.fixture(scope="module")
def undisturbed(server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of two ranks that nothing happens to."""
    losses: list[str] = told(Run(server, tmp_path_factory.mktemp("undisturbed"), 2).attempt())[0]["losses"]
    return losses


@pytest.mark.parametrize(
    ("world", "kills"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(
    server: RankServer, tmp_path: Path, undisturbed: list[str], world: int, kills: int
) -> None:
    if world != 2:
        undisturbed = told(Run(server, tmp_path / "undisturbed", world).attempt())[0]["losses"]
    run = Run(server, tmp_path / "killed", world)
    for _ in range(kills):
        assert len(died(run.attempt(kills))) == 1
    results = told(run.attempt(kills))
    for rank in range(world):
        assert len(results[rank]["losses"]) == STEPS
        assert results[rank]["losses"] == undisturbed
        assert results[rank]["code"] == 0
    assert re.search(r"continuing from step (5|10|15|20),", results[0]["printed"])
    assert results[0]["printed"].count("ok ") == 2
    assert sorted(run.checkpoints()) == [15, 20], "the last two are kept"
    assert sorted(path.name for path in run.files.iterdir()) == [it.name for it in run.checkpoints().values()]


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def altered(data: bytes) -> bytes:
    return data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]


def test_the_newest_file_is_harmed_and_the_one_before_it_serves(
    server: RankServer, tmp_path: Path, undisturbed: list[str]
) -> None:
    run = Run(server, tmp_path, 2)
    told(run.attempt())
    for harm in (torn, altered):
        newest = run.checkpoints()[20]
        newest.write_bytes(harm(newest.read_bytes()))
        results = told(run.attempt())
        assert f"checkpoint {newest} is left out, the one before it is taken: its checksum is" in results[0]["printed"]
        assert "continuing from step 15," in results[0]["printed"], harm
        assert "left out" not in results[1]["printed"], "one rank says it"
        assert results[0]["losses"] == results[1]["losses"] == undisturbed
        assert len(list(run.files.glob("*20.*"))) == 1, "step 20 was saved again, and the harmed one is gone"
    assert "continuing from step 20," in told(run.attempt())[0]["printed"]


def test_killed_in_the_middle_of_writing(server: RankServer, tmp_path: Path, undisturbed: list[str]) -> None:
    run = Run(server, tmp_path / "killed", 2)
    assert died(run.attempt(TEST_DIE_IN_WRITE="10")) == [0]
    assert run.checkpoints() == {}
    assert [path.name.rpartition(".")[2] for path in run.files.iterdir()] == ["unfinished"]
    results = told(run.attempt())
    assert "continuing" not in results[0]["printed"]
    assert results[0]["losses"] == undisturbed
    assert not list(run.files.glob(".*")), "what the dead one left is gone"


def test_another_number_of_ranks_is_told(server: RankServer, tmp_path: Path) -> None:
    told(Run(server, tmp_path, 2).attempt())
    larger = Run(server, tmp_path / "larger", 3)
    larger.files = tmp_path / "files"
    for outcome in larger.attempt():
        assert outcome.error == "SystemExit"
        assert "was written by 2 ranks, these are 3" in outcome.text


@pytest.mark.slow
def test_the_launcher_starts_it_again(tmp_path: Path) -> None:
    """The command of the example's first lines."""
    arguments: list[str | Path] = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        ROOT / "examples" / "checkpoint_resume.py",
    ]
    job = Job(tmp_path, *arguments, "--kills", "3", environ={"PYTHONPATH": str(ROOT)})
    try:
        assert job.wait(110) == 0, job.err
        assert job.err.count("starting again") == 3
        assert "120 steps in 4 attempts" in job.out
        assert job.out.count("  ok  ") == 2
        assert sorted(os.listdir(tmp_path)) == ["err.txt", "logs", "out.txt"], "the files are removed at the end"
    finally:
        job.kill()


def test_it_does_not_die_where_nobody_would_start_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import checkpoint_resume

    with pytest.raises(SystemExit) as ended:
        checkpoint_resume.main(["--kills", "2"])
    assert ended.value.code == 2
    assert "needs launch.py --max-restarts 2; it allows 0" in capsys.readouterr().err
