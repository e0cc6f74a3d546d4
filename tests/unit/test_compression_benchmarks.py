"""The tools that measure compression: they simulate the real exchange, and their verdicts follow from the rows."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import need  # noqa: E402

need("sklearn", "scikit-learn")  # the digits
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # the tools are scripts: they find each other beside themselves

import ceiling  # noqa: E402
import compression_quality  # noqa: E402
import kernels  # noqa: E402
import quality_runs  # noqa: E402
from simulated_ranks import SimulatedRanks  # noqa: E402

from ringdp import compression, testing  # noqa: E402


def run_tool(name: str, *options: str) -> str:
    words = [sys.executable, str(FOLDER / name), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["int8", "int4", "fp16", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_whole_model_at_once_has_the_bits_of_the_exchange(name: str, ranks: int) -> None:
    draw = torch.Generator().manual_seed(ranks)
    counts = {"first": 5000, "second": 70, "third": 256 * ranks, "exact": 1500}
    one = compression.get(name)
    assert one is not None
    together = SimulatedRanks(counts, one, ranks, exact=["exact"])
    alone = dict.fromkeys(counts)
    for step in range(4):
        factor = 2.0**step
        gradients = [[factor * torch.randn(n, generator=draw) for n in counts.values()] for _ in range(ranks)]
        if step == 2:
            gradients[1][0][300] = math.inf
        means = together.average(gradients, factor)
        for index, parameter in enumerate(counts):
            spec = None if parameter == "exact" else one
            if step == 2 and parameter != "first":
                continue  # a real step is undone as a whole; here each parameter is a step of its own
            rows = [of_rank[index] for of_rank in gradients]
            done = testing.simulate(spec, rows, ranks, name=parameter, scale=factor, after=alone[parameter])
            assert means[index].isfinite().all() == (step != 2)
            if step != 2:
                alone[parameter] = done
                assert torch.equal(means[index], done.mean), f"{parameter}, step {step}"


def test_the_interval_is_student_s() -> None:
    mean, half = compression_quality.interval([0.0, 2.0])
    assert mean == 1.0
    assert half == pytest.approx(12.71)
    assert compression_quality.interval([3.0])[1] == math.inf


def test_a_difference_is_within_its_limit_with_its_whole_interval() -> None:
    known = {("exact", seed): 1.0 for seed in range(3)}
    known |= {("int8", seed): 1.0 + 0.001 * seed for seed in range(3)}
    known |= {("int4", seed): 1.0 + 0.01 * seed for seed in range(3)}
    lines = compression_quality.report(known, ["exact", "int8", "int4"], 3, 0.01, "loss").splitlines()
    assert [line.split()[-1] for line in lines[-2:]] == ["holds", "MISSED"]


def test_what_a_file_has_is_not_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "gpt.csv"
    options = ["gpt", "--steps", "3", "--width", "16", "--methods", "exact;int8, overflows", "--csv", str(path)]
    first = run_tool("compression_quality.py", *options, "--seeds", "1")
    rows = list(csv.DictReader(path.open()))
    assert [(row["method"], row["seed"]) for row in rows] == [("exact", "0"), ("int8, overflows", "0")]
    assert f"{float(rows[0]['result']):.4f}" in first
    path.write_text(path.read_text().replace(rows[0]["result"], "1.25"))
    run_tool("compression_quality.py", *options, "--seeds", "2")
    rows = list(csv.DictReader(path.open()))
    assert [row["seed"] for row in rows] == ["0", "0", "1", "1"]
    assert rows[0]["result"] == "1.25"


def test_a_step_that_overflows_changes_nothing_but_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_runs, "OVERFLOW_EVERY", 3)
    seen = []

    def look(step: int, averaged: quality_runs.Averaged) -> None:
        finite = all(bool(it.grad.isfinite().all()) for it in averaged.named.values() if it.grad is not None)
        seen.append((finite, averaged.scaler.get_scale(), sum(it.sum().item() for it in averaged.named.values())))

    options = quality_runs.small_gpt_options(steps=5, width=16)
    assert math.isfinite(quality_runs.train_gpt(quality_runs.METHODS["int8, overflows"], 0, options, on_step=look))
    assert [finite for finite, _, _ in seen] == [True, True, False, True, True]
    assert seen[3][1] == seen[2][1] / 2
    assert seen[3][2] == seen[2][2]


def test_codes_stand_beside_what_was_measured_before() -> None:
    lines = run_tool("compression_quality.py", "codes", "--steps", "2", "--width", "16").splitlines()
    assert sum("before: GPT" in line for line in lines) == 4
    assert sum(line.startswith("int8, GPT") for line in lines) == 1


@pytest.mark.slow
def test_kernels_are_timed_beside_memcpy() -> None:
    if ceiling.compiler() is None:
        pytest.skip("no C++ compiler")
    text = run_tool("kernels.py", "--size", "1m", "--rounds", "1", "--isa", "scalar")
    assert sum(line.split()[1] == "memcpy" for line in text.splitlines() if line.startswith(kernels.CODECS)) == 4
