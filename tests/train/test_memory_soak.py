"""A long training whose shapes change keeps its memory, descriptors and threads; an hour: training/memory_soak.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_minutes() -> None:
    words = [sys.executable, "-m", "benchmarks", "memory_soak", "--minutes", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing grew" in done.stdout
