"""examples/digits.py, what a new user runs first: it trains, its checks hold, and each of them can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import digits
from tests.helpers import need

need("sklearn.datasets", "scikit-learn")

pytestmark = pytest.mark.ci
ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.py"

# The example with RingDP replaced by a wrapper that forgets to communicate.
SILENT = f"""
import sys
sys.path.insert(0, {str(DIGITS.parent)!r})
import torch
import digits, ringdp

class Silent(ringdp.RingDP):
    def forward(self, *args):
        with self.no_sync():
            return super().forward(*args)

ringdp.RingDP = Silent
sys.exit(digits.main())
"""


def run(command: list[str], folder: Path) -> tuple[int, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RINGDP_", "TORCHELASTIC_"))}
    process = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return process.returncode, process.stdout + process.stderr


def launch(script: Path, *arguments: str, folder: Path) -> tuple[int, str]:
    return run([str(ROOT / "launch.py"), "--nproc-per-node", "2", str(script), *arguments], folder)


def test_two_ranks_train_and_all_checks_hold(tmp_path: Path) -> None:
    code, output = launch(DIGITS, "--epochs", "4", "--min-accuracy", "0.9", folder=tmp_path)
    assert code == 0, output
    assert "2 ranks, backend ring, cpu, 88 steps" in output
    assert len(re.findall(r"^ *ok ", output, re.MULTILINE)) == 3, output
    sent = int(re.search(r"([\d,]+) bytes sent per step over ring", output)[1].replace(",", ""))  # type: ignore[index]
    gradients = 4 * 151_306
    assert gradients <= sent <= 1.02 * gradients, "two ranks send each gradient once, and little besides"
    assert re.search(r"[\d,]+ samples/s", output)
    assert re.search(r"[\d.]+ ms exposed communication per step", output)
    assert "step 88/88" in output, "without a terminal, a line now and then"
    assert output.count("step 88/88") == 1, "from rank 0 only"


@pytest.mark.slow
def test_one_rank_needs_no_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RINGDP_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    code = digits.main(["--epochs", "1", "--min-accuracy", "0"])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "1 rank, backend ring" in output
    assert " 0 bytes sent per step" in output


def test_a_wrapper_that_does_not_communicate_is_found_out(tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text(SILENT)
    code, output = launch(script, "--epochs", "1", "--min-accuracy", "1.01", folder=tmp_path)
    assert code == 1, output
    for check in ("parameters bit-identical: ranks \\[1\\] differ", "loss after 20 steps", "test accuracy"):
        assert re.search(rf"FAILED {check}", output), output


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--nonsense"]])
def test_a_wrong_option_is_answered_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        digits.main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_says_how_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        digits.main(["--help"])
    assert ended.value.code == 0
    assert "python launch.py --nproc-per-node 2 examples/digits.py" in capsys.readouterr().out
