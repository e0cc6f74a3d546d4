"""`python -m ringdp` without a command, its version, and `env`: what a report of a fault needs."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import ringdp
from ringdp.__main__ import main
from ringdp.text import number_of_ranks
from ringdp.tools import top
from tests.helpers import need


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in ("bench", "doctor", "dump", "env", "explain", "timeline", "top", "track"):
        assert f"\n    {command} " in shown


def test_the_version_is_the_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    expected = f"ringdp {ringdp.__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
    assert capsys.readouterr().out == expected


def test_env_has_what_a_report_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RINGDP_TRANSPORT", "tcp")
    monkeypatch.setenv("MY_PASSWORD", "secret")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    facts = dict(line.split("  ", 1) for line in shown.splitlines())
    assert facts["versions"].strip().startswith(f"ringdp {ringdp.__version__}, torch {torch.__version__}")
    assert facts["RINGDP_TRANSPORT"].strip() == "tcp"
    assert {"built by", "system", "processor", "cores", "memory", "GPUs"} <= set(facts)
    assert "secret" not in shown


def note(folder: Path, host: str) -> Path:
    """The folder of a run whose only rank was a process that is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder.mkdir()
    (folder / "process_rank0.json").write_text(json.dumps({"pid": gone.pid, "host": host}))
    return folder


def test_dump_says_that_a_run_has_ended_or_runs_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = socket.gethostname()
    ended = note(tmp_path / "ended", here)
    assert main(["dump", str(ended)]) == 1
    expected = f"the ranks of {ended} on {here} have ended: python -m ringdp explain {ended} says how"
    assert expected in capsys.readouterr().err
    assert main(["dump", str(note(tmp_path / "elsewhere", "other"))]) == 1
    assert f"run on other, not on {here}: call this there" in capsys.readouterr().err


def test_top_waits_for_a_folder_that_the_first_step_will_make(tmp_path: Path) -> None:
    need("rich")
    assert str(top._now(tmp_path / "new")) == f"no rank has written a step yet: {tmp_path / 'new'} is not there"
    assert str(top._now(tmp_path)) == "no rank has written a step yet"


def test_one_rank_is_not_ranks() -> None:
    assert [number_of_ranks(count) for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
