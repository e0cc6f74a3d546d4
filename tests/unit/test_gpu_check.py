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
LASTS_S = 4.5 * 60
# Of which a GPU's name, the carried build, imports, and a part that does not end when it is told: what no part has.
BESIDE_PARTS_S = 30 + 15
BEGINS = re.compile(r"^== .* \(at most (\d+) s\)$", re.M)
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


@pytest.mark.parametrize("call", ["", "nccl"])
def test_another_call_is_refused(tmp_path: Path, call: str) -> None:
    assert ended(start(tmp_path, call)) == (
        2,
        "gpu_check: say which call: right or speed, or carry for a build to take along\n",
    )


def waves(text: str) -> list[list[int]]:
    """The seconds of the parts, those together that began before another one's output."""
    found: list[list[int]] = [[]]
    for line in filter(None, text.splitlines()):
        if begins := BEGINS.match(line):
            found[-1].append(int(begins[1]))
        elif found[-1]:
            found.append([])
    return found[:-1]


@pytest.mark.parametrize("call", ["right", "speed"])
def test_every_part_has_its_time_within_that_of_the_call(tmp_path: Path, call: str) -> None:
    status, text = ended(start(tmp_path, call, python=stand_in(tmp_path)))
    assert status == 0, text
    beside = waves(text)
    assert len(beside) > 1
    assert (max(map(len, beside)) > 1) == (call == "right"), "what is timed has the machine for itself"
    assert sum(map(max, beside)) + BESIDE_PARTS_S <= LASTS_S
    assert text.count("ran ") == sum(map(len, beside))
    assert text.endswith(f"gpu_check {call}: every part passed\n")
    assert kept(tmp_path, call) == text


def test_the_build_is_put_in_its_place_before_any_part(tmp_path: Path) -> None:
    at = tmp_path / "used"
    status, text = ended(start(tmp_path, "right", python=stand_in(tmp_path, use=f"echo used >>{at}", then=f"cat {at}")))
    assert status == 0, text
    assert at.read_text() == "used\n", "processes that import the modules run beside each other"


def test_it_builds_where_what_was_carried_is_not_used(tmp_path: Path) -> None:
    _, used = ended(start(tmp_path, "speed", python=stand_in(tmp_path)))
    assert "== build" not in used
    _, built = ended(start(tmp_path, "speed", python=stand_in(tmp_path, use="exit 1")))
    assert "== build" in built
    status, failed = ended(start(tmp_path, "speed", python=stand_in(tmp_path, use="exit 1", build="exit 3")))
    assert status == 1
    assert re.search(r"^build .*FAILED: exit code 3$", failed, re.M)
    assert "ran " not in failed, "without a build all else would fail"


@pytest.mark.parametrize("call", ["right", "speed"])
def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path, call: str) -> None:
    status, text = ended(start(tmp_path, call, python=stand_in(tmp_path, then="exit 5")))
    assert status == 1
    _, summary = text.split(f"== summary of {call}\n")
    assert summary.count("FAILED: exit code 5") == text.count("ran ") == len(BEGINS.findall(text)) > 2


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    status, text = ended(start(tmp_path, "speed", python=stand_in(tmp_path), MINUTES="0"))
    assert status == 1
    assert "not run: no time left" in text
    assert text.endswith("gpu_check speed: FAILED\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_cut_short_keeps_what_was_printed(tmp_path: Path, number: int) -> None:
    """Of parts that run, and before that of one that has ended while others run."""
    sleeps = f'case "$*" in *test_kernels*) ;; *) touch {tmp_path}/began-$$; exec sleep 60 ;; esac'
    process = start(tmp_path, "right", python=stand_in(tmp_path, then=sleeps))
    until = time.monotonic() + ENDS_WITHIN_S
    while len([*tmp_path.glob("began-*")]) < 3 or "test_kernels" not in kept(tmp_path, "right"):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    status, text = ended(process)
    assert status == 1
    _, summary = text.split("== summary of right\n")
    assert re.search(r"^tests: kernels .* passed$", summary, re.M)
    interrupted = re.findall(r"^(.*?)  .*FAILED: interrupted$", summary, re.M)
    assert sorted(interrupted) == sorted(
        ["tests: training", "tests: elastic jobs", "tests: ring, codes, init, ranks on CPUs"]
    )
    for name in interrupted:
        assert re.search(rf"^== {name}, after .*: FAILED: interrupted\nran -m pytest ", text, re.M)
    assert kept(tmp_path, "right") == text
