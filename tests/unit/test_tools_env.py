"""`python -m ringdp` without a command, its version, and `env`: what a report of a fault needs."""

from __future__ import annotations

import platform

import pytest
import torch

import ringdp
from ringdp.__main__ import main


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in ("bench", "doctor", "dump", "env", "explain", "timeline", "top"):
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
