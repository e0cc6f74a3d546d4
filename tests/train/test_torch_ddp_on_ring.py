"""examples/torch_ddp_on_ring.py: torch's own DDP, whose only change is the name of the backend."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers import need
from tests.train.test_digits import ROOT, run

need("sklearn.datasets", "scikit-learn")

from examples import torch_ddp_on_ring  # noqa: E402

SCRIPT = ROOT / "examples" / "torch_ddp_on_ring.py"


def checksum(output: str) -> str:
    found = re.search(r"ok +parameters bit-identical on all ranks: (\w{16})", output)
    assert found, output
    return found[1]


OPTIONS = [str(SCRIPT), "--epochs", "2", "--min-accuracy", "0.8"]


def on_ring(folder: Path) -> str:
    code, output = run([str(ROOT / "launch.py"), "--nproc-per-node", "2", *OPTIONS], folder)
    assert code == 0, output
    return output


def test_two_ranks_on_ring(tmp_path: Path) -> None:
    output = on_ring(tmp_path)
    assert re.search(r"2 ranks, backend ring, 44 steps, [\d.]+ s, [\d,]+ samples/s", output), output
    checksum(output)


@pytest.mark.slow  # once in nine runs a gloo process aborted while it left, after all was printed
def test_ring_and_gloo_train_the_same_parameters(tmp_path: Path) -> None:
    """ring through its own launcher, gloo through torchrun; two ranks have one way to add."""
    ring = on_ring(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, gloo = run([*torchrun, *OPTIONS, "--backend", "gloo"], tmp_path)
    assert code == 0, gloo
    assert "2 ranks, backend gloo, 44 steps" in gloo
    assert checksum(ring) == checksum(gloo)


def test_nothing_but_the_backend_is_ringdp() -> None:
    lines = [line for line in SCRIPT.read_text().split('"""')[2].splitlines() if "ring" in line.replace("string", "")]
    assert len(lines) == 2, lines
    assert lines[0].startswith("import ringdp  # noqa: F401")
    assert 'choices=("ring", "gloo"), default="ring"' in lines[1]


def test_one_rank_needs_no_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RINGDP_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK", raising=False)
    code = torch_ddp_on_ring.main(["--epochs", "1", "--min-accuracy", "0"])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "1 rank, backend ring" in output
    assert torch_ddp_on_ring.main(["--epochs", "1", "--min-accuracy", "1.01"]) == 1
    again = capsys.readouterr().out
    assert checksum(again) == checksum(output), "the seed decides"
    assert "FAILED test accuracy" in again
    torch_ddp_on_ring.main(["--epochs", "1", "--min-accuracy", "0", "--seed", "1"])
    assert checksum(capsys.readouterr().out) != checksum(output)


def test_a_wrong_option_is_answered_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        torch_ddp_on_ring.main(["--backend", "nccl"])
    assert ended.value.code == 2
    assert "invalid choice: 'nccl'" in capsys.readouterr().err
