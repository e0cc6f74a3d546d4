"""The tools that measure compression: they simulate the real exchange, and their verdicts follow from the rows."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import need  # noqa: E402

need("sklearn", "scikit-learn")  # the digits
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # the tools are scripts: they find each other beside themselves

import allreduce  # noqa: E402
import ceiling  # noqa: E402
import compression_plots  # noqa: E402
import compression_quality  # noqa: E402
import kernels  # noqa: E402
import plots  # noqa: E402
import quality_runs  # noqa: E402
import step  # noqa: E402
import time_to_loss  # noqa: E402
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
    for turn in range(4):
        factor = 2.0**turn
        gradients = [[factor * torch.randn(n, generator=draw) for n in counts.values()] for _ in range(ranks)]
        if turn == 2:
            gradients[1][0][300] = math.inf
        means = together.average(gradients, factor)
        for index, parameter in enumerate(counts):
            spec = None if parameter == "exact" else one
            if turn == 2 and parameter != "first":
                continue  # a real step is undone as a whole; here each parameter is a step of its own
            rows = [of_rank[index] for of_rank in gradients]
            done = testing.simulate(spec, rows, ranks, name=parameter, scale=factor, after=alone[parameter])
            assert means[index].isfinite().all() == (turn != 2)
            if turn != 2:
                alone[parameter] = done
                assert torch.equal(means[index], done.mean), f"{parameter}, step {turn}"


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


def test_all_reduce_through_codes_is_measured_beside_the_exact_one(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.json"
    options = ["--sizes", "4k,64k", "--peers", "none", "--compressed", "int8,int4", "--json", str(path)]
    run_tool("allreduce.py", *options, "--rounds", "1", "--block-seconds", "0.01")
    rows = json.loads(path.read_text())["rows"]
    assert {row["backend"] for row in rows} == {"ring", "ring-int8", "ring-int4"}
    sent = {row["backend"]: row["wire_bytes"] for row in rows if row["size_bytes"] == 65536}
    assert sent == {"ring": 65536, "ring-int8": 16384 + 64 * 4, "ring-int4": 8192 + 256 * 2}


def test_a_loss_is_reached_when_the_mean_over_the_window_is_so_low() -> None:
    losses = [3.0] * time_to_loss.WINDOW + [1.0] * time_to_loss.WINDOW
    row = {"losses": losses, "seconds": [0.5 * (step + 1) for step in range(len(losses))]}
    assert time_to_loss.smooth(losses)[-1] == 1.0
    assert time_to_loss.seconds_until(row, 2.0) == 0.5 * (time_to_loss.WINDOW + time_to_loss.WINDOW / 2)
    assert time_to_loss.seconds_until(row, 0.5) is None


def test_time_to_loss_keeps_what_other_modes_measured(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    options = ["--steps", "20", "--width", "16", "--layers", "1", "--add-to", str(path)]
    for modes in ("ddp-ring-fp16", "ringdp"):
        text = run_tool("time_to_loss.py", "--modes", modes, *options)
    assert re.search(r"^ddp-ring-fp16 .*\n^ringdp ", text, re.MULTILINE), text
    assert [row["mode"] for row in json.loads(path.read_text())["rows"]] == ["ddp-ring-fp16", "ringdp"]


@pytest.mark.parametrize("document", sorted((FOLDER.parent / "docs").glob("compression*.md")))
def test_the_commands_in_the_documents_parse(document: Path) -> None:
    parsers = {
        "allreduce.py": allreduce.parse,
        "compression_plots.py": compression_plots.parse,
        "compression_quality.py": compression_quality.parse,
        "kernels.py": kernels.parse,
        "plots.py": plots.parse,
        "step.py": step.parse,
        "time_to_loss.py": time_to_loss.parse,
    }
    lines = re.findall(r"^(?:sudo )?python benchmarks/(\S+) ?(.*)$", document.read_text(), re.MULTILINE)
    for tool, options in lines:
        parsers[tool](shlex.split(options))


@pytest.mark.slow
def test_kernels_are_timed_beside_memcpy() -> None:
    if ceiling.compiler() is None:
        pytest.skip("no C++ compiler")
    text = run_tool("kernels.py", "--size", "1m", "--rounds", "1", "--isa", "scalar")
    assert sum(line.split()[1] == "memcpy" for line in text.splitlines() if line.startswith(kernels.CODECS)) == 4
