"""`python -m ringdp doctor` as a user starts it: alone, on ranks that it starts, without numpy, as another user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringdp import __main__ as command
from tests.helpers import need

need("ringdp._C", "ringdp's extension, built with `make build`,")

LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMIX_|SLURM_|TORCHELASTIC_|RINGDP_)")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if LAUNCHER.match(name):
            monkeypatch.delenv(name)


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    environ = clean | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_alone_it_reads_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ringdp doctor on ")
    for check in ("versions", "processor", "memory", "limits", "network", "ports", "wide-area links"):
        assert f"\n\n{check}\n  " in text
    assert re.search(r"\n\n0 problems, \d+ notes?\n$", text)


def test_a_threshold_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--json", "--min-descriptors", "1000000000"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    [problem] = [one for one in told["findings"] if one["verdict"] == "problem"]
    assert problem["check"] == "limits"
    assert "ulimit -n" in problem["remedy"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-n", "0"], "-n must be 1 or more"),
        (["-H", "a", "--hostfile", "b"], "both name hosts"),
    ],
)
def test_mistakes_are_explained(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--min-bandwidth", "fast"], ["--timeout", "0"], ["--max-latency", "3"]])
def test_what_argparse_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["doctor", *words])
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_half_of_a_launcher_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert command.main(["doctor"]) == 1
    assert "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in capsys.readouterr().err


def test_two_ranks_that_it_starts() -> None:
    done = run(
        sys.executable, "-m", "ringdp", "doctor", "-n", "2", "--seconds", "0.2", "--json", RINGDP_LOG_LEVEL="error"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ranks"] == 2
    edges = {(edge["source"], edge["target"]): edge for edge in told["matrix"]["edges"]}
    assert set(edges) == {(0, 1), (1, 0)}
    for edge in edges.values():
        assert edge["reached"]
        assert edge["bytes_per_s"] > 1e6
        assert 0 < edge["latency_s"] < 1
    [alike] = [one for one in told["findings"] if one["check"] == "versions and settings of the ranks"]
    assert alike["sentence"] == "all 2 ranks have the same versions and settings"
    [ring] = [one for one in told["findings"] if one["check"] == "ring"]
    assert "all-reduce" in ring["sentence"]
    [set_by_user] = [one for one in told["findings"] if one["check"] == "settings"]
    assert "RINGDP_LOG_LEVEL=error" in set_by_user["sentence"]


def test_without_numpy() -> None:
    source = "import sys; sys.modules['numpy'] = None; from ringdp.__main__ import main; sys.exit(main(['doctor']))"
    done = run(sys.executable, "-W", "ignore", "-c", source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 problems" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another user")
def test_as_another_user_who_may_read_little() -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if run(*nobody, sys.executable, "-c", "import torch").returncode != 0:
        pytest.skip("another user may not read this Python")
    done = run(*nobody, sys.executable, "-m", "ringdp", "doctor", HOME="/nonexistent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this check failed" not in done.stdout
