"""examples/hybrid_2d.py: replicas of tensor-parallel and pipelined models train as one process does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers import need
from tests.train.test_digits import ROOT, run

need("sklearn.datasets", "scikit-learn")

from examples import hybrid_2d  # noqa: E402

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "examples" / "hybrid_2d.py"

# The example with RingDP replaced by a wrapper that averages nothing.
SILENT = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import hybrid_2d, ringdp
from torch import nn

class Silent(nn.Module):
    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

ringdp.RingDP = Silent
sys.exit(hybrid_2d.main())
"""


def launch(script: Path, *arguments: str, folder: Path, ranks: int) -> tuple[int, str]:
    return run([str(ROOT / "launch.py"), "--nproc-per-node", str(ranks), str(script), *arguments], folder)


@pytest.mark.parametrize("mode", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_two_by_two_ranks_equal_one_process(mode: str, tmp_path: Path) -> None:
    code, output = launch(SCRIPT, "--mode", mode, "--epochs", "1", "--min-accuracy", "0.7", folder=tmp_path, ranks=4)
    assert code == 0, output
    assert f"2 replicas x 2 ranks, mode {mode}, backend ring, 22 steps" in output
    assert len(re.findall(r"^ *ok ", output, re.MULTILINE)) == 3, output
    assert re.search(r"equals one process: loss after 20 steps \d\.\d{6}, on the joined batches \d\.\d{6}", output)


def test_losses_that_differ_are_found_out() -> None:
    assert hybrid_2d.same_losses([1.0, 0.5, 0.3], [1.0, 0.50001])[0]
    passed, text = hybrid_2d.same_losses([1.0, 0.5, 0.3], [1.0, 0.501])
    assert not passed
    assert "largest difference 1.0e-03" in text


@pytest.mark.slow
def test_without_averaging_it_is_not_one_process(tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text(SILENT)
    options = ["--inner", "1", "--epochs", "1", "--min-accuracy", "1.01"]
    code, output = launch(script, *options, folder=tmp_path, ranks=2)
    assert code == 1, output
    for check in (
        "equals one process",
        r"parameters of all replicas bit-identical: ranks \[1\] differ",
        "test accuracy",
    ):
        assert re.search(rf"FAILED {check}", output), output


@pytest.mark.parametrize("mode", ["tp", "pp"])
def test_one_rank_needs_no_launcher(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("RINGDP_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    code = hybrid_2d.main(["--mode", mode, "--epochs", "1", "--min-accuracy", "0"])
    output = capsys.readouterr().out
    assert code == 0, output
    assert f"1 replica x 1 rank, mode {mode}, backend ring" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mode", "dp"], "invalid choice: 'dp'"),
        (["--batch-size", "30"], "--batch-size 30 is no multiple of 4, the microbatches"),
        (["--inner", "0"], "0 is below 1"),
    ],
)
def test_a_wrong_option_is_answered_before_anything_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        hybrid_2d.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
