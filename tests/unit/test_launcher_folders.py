"""Temporary folders of launchers: those of killed ones are removed by the next, those of living ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ringdp.launcher import temporary

KEEPS = """
import sys, tempfile, time
from ringdp.launcher import temporary
path = temporary.make_folder("secret")
(path / "secret").write_text("ab")
print(path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", KEEPS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_launcher_removes_what_a_killed_one_left(there: Path) -> None:
    killed, left = started()
    living, kept = started()
    try:
        assert left.stat().st_mode & 0o777 == 0o700
        mine = temporary.make_folder("door")
        assert left.exists()
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (left / "secret").exists()
        foreign = there / "ringdp-of-somebody"
        foreign.mkdir()
        temporary.remove_folder(temporary.make_folder("logs"))
        assert sorted(there.iterdir()) == sorted([foreign, kept, mine])
        temporary.remove_folder(mine)
        assert not mine.exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()


def test_a_link_to_another_folder_is_left_alone(there: Path) -> None:
    """What another user of the machine puts into the temporary folder leads nowhere."""
    elsewhere = there / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "launcher-lives").touch()
    (there / "ringdp-secret-x").symlink_to(elsewhere)
    temporary.remove_folder(temporary.make_folder("logs"))
    assert (elsewhere / "launcher-lives").exists()
