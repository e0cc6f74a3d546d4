"""benchmarks/gpu/check.sh, mostly with a script in place of Python: what it runs, and what is left when it is cut."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "check.sh"
ENDS_WITHIN_S = 60.0
NINE_MINUTES_S = 9 * 60
# Of which a GPU's name, the carried build, imports: what no part of a call has.
BEFORE_PARTS_S = 30
STAND_IN = """#!/bin/sh
case "$1 $2" in
  "- "*) echo 9.0 ;;
  "-c "*) exit 0 ;;
  "tools/carried_build.py use") {use} ;;
  "tools/environment.py "*) {build} ;;
  *) echo "ran $*"; {then} ;;
esac
"""


def start(folder: Path, call: str, *, python: str = "", **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(SCRIPT), call, *filter(None, [python])],
        env={**os.environ, "OUT": str(folder / "out"), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stand_in(folder: Path, *, use: str = "exit 0", build: str = "exit 0", then: str = "exit 0") -> str:
    path = folder / "python"
    path.write_text(STAND_IN.format(use=use, build=build, then=then))
    path.chmod(0o755)
    return str(path)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=ENDS_WITHIN_S)
    return process.returncode, text


def kept(folder: Path, call: str) -> str:
    return (folder / "out" / f"gpu_check_{call}.txt").read_text()


def test_without_a_gpu_it_says_so_and_builds_nothing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, text = ended(start(tmp_path, "right", python=sys.executable))
    assert status == 2
    assert re.search(
        r"^gpu_check: Python .*, torch .* sees no GPU, and all that is checked here needs one$", text, re.M
    )
    assert "== build" not in text
    assert kept(tmp_path, "right") == text


@pytest.mark.parametrize("call", ["", "left"])
def test_another_call_is_refused(tmp_path: Path, call: str) -> None:
    assert ended(start(tmp_path, call)) == (
        2,
        "gpu_check: say which call: right, nccl or speed, or carry for a build to take along\n",
    )


@pytest.mark.parametrize("call", ["right", "nccl", "speed"])
def test_every_part_has_its_time_within_nine_minutes(tmp_path: Path, call: str) -> None:
    status, text = ended(start(tmp_path, call, python=stand_in(tmp_path)))
    assert status == 0, text
    limits = [int(word) for word in re.findall(r"^== .* \(at most (\d+) s\)$", text, re.M)]
    assert len(limits) > 2
    assert sum(limits) + BEFORE_PARTS_S <= NINE_MINUTES_S
    assert text.endswith(f"gpu_check {call}: every part passed\n")
    assert kept(tmp_path, call) == text


def test_it_builds_where_what_was_carried_is_not_used(tmp_path: Path) -> None:
    _, used = ended(start(tmp_path, "nccl", python=stand_in(tmp_path)))
    assert "== build" not in used
    _, built = ended(start(tmp_path, "nccl", python=stand_in(tmp_path, use="exit 1")))
    assert "== build" in built
    status, failed = ended(start(tmp_path, "nccl", python=stand_in(tmp_path, use="exit 1", build="exit 3")))
    assert status == 1
    assert re.search(r"^build .*FAILED: exit code 3$", failed, re.M)
    assert "ran " not in failed, "without a build all else would fail"


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    status, text = ended(start(tmp_path, "speed", python=stand_in(tmp_path, then="exit 5")))
    assert status == 1
    assert text.count("FAILED: exit code 5") == text.count("ran ") > 2


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    status, text = ended(start(tmp_path, "speed", python=stand_in(tmp_path), MINUTES="0"))
    assert status == 1
    assert "not run: no time left" in text
    assert text.endswith("gpu_check speed: FAILED\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_cut_short_keeps_what_was_printed(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "right", python=stand_in(tmp_path, then="exec sleep 60"))
    until = time.monotonic() + ENDS_WITHIN_S
    while "ran " not in (kept(tmp_path, "right") if (tmp_path / "out").exists() else ""):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    status, text = ended(process)
    assert status == 1
    assert re.search(r"^tests: kernels .*FAILED: interrupted$", text, re.M)
    assert kept(tmp_path, "right") == text
