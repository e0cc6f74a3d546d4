"""tests/at_once.py: the text of a failure is there although the run does not reach its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = """
import os

def test_fails():
    assert 1 == 2, "one is not two"

def test_ends_all():
    os._exit(3)
"""


@pytest.mark.parametrize("plugin, told", [(["-p", "tests.at_once"], 1), ([], 0)], ids=["with", "without"])
def test_a_failure_is_told_before_the_end(tmp_path: Path, plugin: list[str], told: int) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    words = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--tb=short", *plugin]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert done.stdout.count("AssertionError: one is not two") == told, done.stdout
