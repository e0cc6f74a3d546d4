"""A long training whose shapes change keeps its memory, descriptors and threads; an hour: benchmarks/memory_soak.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_soak.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_minutes() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--minutes", "2"], capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing grew" in done.stdout
