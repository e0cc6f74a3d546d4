"""examples/digits.py, what a new user runs first, by the launcher. How its checks fail is in test_examples.py."""

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


def test_two_ranks_train_and_all_checks_hold(tmp_path: Path) -> None:
    command = [str(ROOT / "launch.py"), "--nproc-per-node", "2", str(ROOT / "examples" / "digits.py")]
    code, output = run([*command, "--epochs", "4", "--min-accuracy", "0.9"], tmp_path)
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


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--nonsense"]])
def test_a_wrong_option_is_answered_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        digits.main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
