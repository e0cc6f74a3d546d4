"""The tools that measure compression: they simulate the real exchange, and their verdicts follow from the rows."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import need  # noqa: E402

need("sklearn", "scikit-learn")  # the digits

from benchmarks.compression import kernels, quality, quality_runs, time_to_loss  # noqa: E402
from benchmarks.compression.exchanged_ranks import ExchangedRanks  # noqa: E402
from benchmarks.lib import measure, session  # noqa: E402
from benchmarks.lib.ranks import compiler  # noqa: E402
from ringdp import compression, testing  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


def run_tool(name: str, *options: str) -> str:
    words = [sys.executable, "-m", "benchmarks", name, *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ANY_KIND = ["exact", "int8", "int6", "qsgd", "terngrad", "sign", "topk", "dgc", "randomk", "powersgd", "signsgd"]


@pytest.mark.parametrize("name", ANY_KIND)
def test_a_whole_model_goes_through_the_exchange_as_its_parameters_do(name: str) -> None:
    ranks, draw = 3, torch.Generator().manual_seed(7)
    shapes = {"first": (40, 50), "second": (70,), "exact": (30, 50)}
    one = {"exact": None, "dgc": compression.TopK(error_feedback=compression.DGC())}.get(name, name)
    compressor = compression.get(one)
    together = ExchangedRanks(shapes, compressor, ranks, exact=["exact"])
    alone: dict[str, testing.Simulation | None] = dict.fromkeys(shapes)
    for turn in range(3):
        gradients = [[torch.randn(shape, generator=draw) for shape in shapes.values()] for _ in range(ranks)]
        means = together.average(gradients)
        for index, parameter in enumerate(shapes):
            spec = None if parameter == "exact" else compressor
            rows = [of_rank[index] for of_rank in gradients]
            done = alone[parameter] = testing.simulate(spec, rows, ranks, name=parameter, after=alone[parameter])
            assert torch.equal(means[index], done.mean), f"{parameter}, step {turn}"


def test_an_overflow_leaves_nothing_in_the_whole_model() -> None:
    together = ExchangedRanks({"x": (40, 50)}, compression.get("topk"), 2)
    again = ExchangedRanks({"x": (40, 50)}, compression.get("topk"), 2)
    first, bad, last = ([[torch.randn(40, 50)] for _ in range(2)] for _ in range(3))
    bad[1][0][3, 4] = math.inf
    again.average(first)
    again.step += 1
    together.average(first)
    assert not together.average(bad)[0].isfinite().all()
    assert torch.equal(together.average(last)[0], again.average(last)[0])


def test_momentum_is_on_the_ranks_or_in_the_optimizer() -> None:
    options = quality_runs.small_gpt_options(steps=1, width=16, optimizer="sgd")
    model = torch.nn.Linear(64, 64)
    seen = {}
    for name in ("exact", "topk", "topk DGC"):
        groups = quality_runs.gpt_optimizer(model, quality_runs.METHODS[name], options).param_groups
        seen[name] = [(group["momentum"], len(group["params"])) for group in groups]
    assert seen == {"exact": [(0.9, 2)], "topk": [(0.9, 2)], "topk DGC": [(0.0, 1), (0.9, 1)]}  # the bias is exact
    with pytest.raises(SystemExit):
        session.parse(quality, ["gpt", "--methods", "exact;topk DGC"])


def test_exact_steps_come_first_and_are_counted() -> None:
    method = quality_runs.Method("powersgd", exact_steps=2)
    averaged = quality_runs.Averaged(torch.nn.Linear(64, 64), method, 2)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    seen = []
    for _ in range(3):
        averaged.backward([lambda: averaged.model(x).square().sum(), lambda: averaged.model(-x).sum()])
        weight = averaged.named["weight"].grad
        assert weight is not None
        seen.append(weight.clone())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert averaged.simulated is not None
    assert averaged.simulated.step == 3


def test_the_interval_is_student_s() -> None:
    mean, half = measure.interval([0.0, 2.0])
    assert mean == 1.0
    assert half == pytest.approx(12.71)
    assert measure.interval([3.0])[1] == math.inf


def test_codes_are_measured_on_gradients_of_both_kinds() -> None:
    text = run_tool("compression_quality", "codes", "--steps", "2", "--width", "16", "--codes", "int8;topk")
    assert [
        len(re.findall(f"^{name} +{source}", text, re.M)) for name in ("int8", "topk") for source in ("Gau", "GPT")
    ] == [1] * 4


def test_what_a_file_has_is_not_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "gpt.csv"
    options = ["gpt", "--steps", "3", "--width", "16", "--methods", "exact;int8, overflows", "--csv", str(path)]
    first = run_tool("compression_quality", *options, "--seeds", "1")
    rows = list(csv.DictReader(path.open()))
    assert [(row["method"], row["seed"]) for row in rows] == [("exact", "0"), ("int8, overflows", "0")]
    assert f"{float(rows[0]['result']):.4f}" in first
    path.write_text(path.read_text().replace(rows[0]["result"], "1.25"))
    run_tool("compression_quality", *options, "--seeds", "2")
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


def test_a_resnet_is_trained_in_modes_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "resnet.json"
    modes = "ddp-ring-powersgd,ringdp-topk-dgc,ringdp-signsgd"
    options = ["--model", "resnet", "--steps", "3", "--window", "2", "--width", "8", "--batch-size", "4"]
    run_tool("time_to_loss", *options, "--pixels", "8", "--modes", modes, "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [row["mode"] for row in rows] == modes.split(",")
    assert all(math.isfinite(loss) for row in rows for loss in row["losses"])


def test_a_loss_is_reached_when_the_mean_over_the_window_is_so_low() -> None:
    losses = [3.0] * time_to_loss.WINDOW + [1.0] * time_to_loss.WINDOW
    row = {"losses": losses, "seconds": [0.5 * (step + 1) for step in range(len(losses))]}
    assert time_to_loss.smooth(losses)[-1] == 1.0
    assert time_to_loss.seconds_until(row, 2.0) == 0.5 * (time_to_loss.WINDOW + time_to_loss.WINDOW / 2)
    assert time_to_loss.seconds_until(row, 0.5) is None


def test_time_to_loss_keeps_what_other_modes_measured(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    options = ["--steps", "3", "--window", "2", "--width", "16", "--layers", "1", "--add-to", str(path)]
    for modes in ("ddp-ring-fp16", "ringdp"):
        text = run_tool("time_to_loss", "--modes", modes, *options)
    assert re.search(r"^ddp-ring-fp16 .*\n^ringdp ", text, re.MULTILINE), text
    assert [row["mode"] for row in json.loads(path.read_text())["rows"]] == ["ddp-ring-fp16", "ringdp"]


@pytest.mark.slow
def test_kernels_are_timed_beside_memcpy() -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    text = run_tool("kernels", "--size", "1m", "--rounds", "1", "--isa", "scalar")
    copies = [line.split()[0] for line in text.splitlines() if line.startswith(kernels.CODECS) and " memcpy " in line]
    assert copies == list(kernels.CODECS)
