"""Ranks that fight for cores, beside a process that never rests: nobody is called lost, stuck or late."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.fault.launch_jobs import ROOT
from tests.helpers import need
from tests.train import harness

need("torch")

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")


def run(minutes: float, *options: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks", "false_alarms", "--minutes", str(minutes), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=minutes * 60 + 90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, float] = json.loads(done.stdout)
    return report


def test_busy_cores_raise_no_alarm() -> None:
    report = run(1 / 12)
    assert report["calls"] >= 10


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("options", [(), ("--elastic", "--ranks", "8")], ids=["collectives", "elastic"])
def test_busy_cores_raise_no_alarm_for_half_an_hour(options: tuple[str, ...]) -> None:
    report = run(30, *options)
    assert report["calls"] >= 20
