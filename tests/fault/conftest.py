"""What the files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import hosts
from tests.fault.launch_jobs import Job
from tests.fault.sshd import sshd


@pytest.fixture
def server() -> hosts.RankServer:
    """Forks ranks; the same for all files."""
    return hosts.rank_server()


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that reaches an sshd on loopback; a host's name follows."""
    with sshd(tmp_path / "sshd") as command:
        yield command


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """A list for the jobs that a test starts, which end with it."""
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()
