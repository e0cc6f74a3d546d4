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
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # the tools are scripts: they find each other beside themselves

import allreduce_exchange  # noqa: E402
import ceiling  # noqa: E402
import compression_quality  # noqa: E402
import kernels  # noqa: E402
import measure  # noqa: E402
import quality_runs  # noqa: E402
import time_to_loss  # noqa: E402
from exchanged_ranks import ExchangedRanks  # noqa: E402
from simulated_ranks import SimulatedRanks  # noqa: E402

from ringdp import compression, testing  # noqa: E402
from ringdp.compression.codecs.core_codec import CoreCodec  # noqa: E402
from tests.registries import CODEC_COMPRESSORS  # noqa: E402

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


def run_tool(name: str, *options: str) -> str:
    words = [sys.executable, str(FOLDER / name), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CODEC_COMPRESSORS)
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


@pytest.mark.parametrize("name", compression.names())
def test_the_short_way_is_for_codes_of_blocks_alone(name: str) -> None:
    one = compression.get(name)
    assert one is not None
    assert SimulatedRanks.serves(one) == isinstance(one, CoreCodec)


def test_the_short_way_is_for_plain_error_feedback_alone() -> None:
    assert not SimulatedRanks.serves(compression.Int4(error_feedback=compression.EF21()))
    assert not SimulatedRanks.serves(compression.Int4(block=96))
    assert not SimulatedRanks.serves(compression.Int4(rotate=True))


def test_momentum_is_on_the_ranks_or_in_the_optimizer() -> None:
    options = quality_runs.small_gpt_options(steps=1, width=16, optimizer="sgd")
    model = torch.nn.Linear(64, 64)
    seen = {}
    for name in ("exact", "topk", "topk DGC"):
        groups = quality_runs.gpt_optimizer(model, quality_runs.METHODS[name], options).param_groups
        seen[name] = [(group["momentum"], len(group["params"])) for group in groups]
    assert seen == {"exact": [(0.9, 2)], "topk": [(0.9, 2)], "topk DGC": [(0.0, 1), (0.9, 1)]}  # the bias is exact
    with pytest.raises(SystemExit):
        compression_quality.parse(["gpt", "--methods", "exact;topk DGC"])


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
    assert averaged.simulated.step == 3  # type: ignore[union-attr]


def test_the_interval_is_student_s() -> None:
    mean, half = measure.interval([0.0, 2.0])
    assert mean == 1.0
    assert half == pytest.approx(12.71)
    assert measure.interval([3.0])[1] == math.inf


def test_a_difference_is_within_its_limit_with_its_whole_interval() -> None:
    known = {("exact", seed): 1.0 for seed in range(3)}
    known |= {("int8", seed): 1.0 + 0.001 * seed for seed in range(3)}
    known |= {("int4", seed): 1.0 + 0.01 * seed for seed in range(3)}
    aims = dict.fromkeys(("int8", "int4"), compression_quality.Aim(0.01))
    lines = compression_quality.report(known, ["exact", "int8", "int4"], 3, aims, "loss").splitlines()
    assert [re.findall("holds|MISSED", line) for line in lines[-2:]] == [["holds"], ["MISSED"]]


def test_an_aim_of_one_side_lets_a_method_be_better() -> None:
    assert compression_quality.Aim(0.02, both_ways=False).words(-0.5, 0.1).startswith("holds")
    assert compression_quality.Aim(0.02).words(-0.5, 0.1).startswith("MISSED")
    assert compression_quality.Aim(0.02, both_ways=False).words(0.01, 0.02).startswith("MISSED")


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
    assert sum("before: GPT" in line for line in lines) == len(compression_quality.BEFORE)
    assert sum(line.startswith("int8, GPT") for line in lines) == 1
    assert any(line.endswith("below int4's") for line in lines)


def test_all_reduce_through_codes_is_measured_beside_the_exact_one(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.json"
    options = ["--sizes", "4k,64k", "--peers", "none", "--compressed", "int8,int4", "--json", str(path)]
    run_tool("allreduce.py", *options, "--rounds", "1", "--block-seconds", "0.01")
    rows = json.loads(path.read_text())["rows"]
    assert {row["backend"] for row in rows} == {"ring", "ring-int8", "ring-int4"}
    sent = {row["backend"]: row["wire_bytes"] for row in rows if row["size_bytes"] == 65536}
    assert sent == {"ring": 65536, "ring-int8": 16384 + 64 * 4, "ring-int4": 8192 + 256 * 2}


def test_all_reduce_through_python_is_held_against_its_simulation_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "allreduce.json"
    options = ["--sizes", "2m", "--peers", "none", "--compressed", "topk,powersgd", "--json", str(path)]
    run_tool("allreduce.py", *options, "--rounds", "1", "--block-seconds", "0.01")
    rows = json.loads(path.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["ring", "ring-topk", "ring-powersgd"]
    assert ["wire_bytes" in row for row in rows] == [True, False, False]


def test_buckets_are_filled_from_the_last_parameter_and_grow() -> None:
    mib = 1 << 20
    assert allreduce_exchange.buckets_of([mib] * 7) == [[6], [4, 5], [0, 1, 2, 3]]
    assert allreduce_exchange.buckets_of([60 * mib, 8 * mib]) == [[1], [0]]


def test_what_is_cut_into_matrices_is_all_there() -> None:
    for numel in (1, 5000, 2048 * 2048, 2048 * 2049, 3 * 2048 * 2048 + 7):
        assert sum(math.prod(shape) for _, shape in allreduce_exchange.square_shapes(numel)) == numel


def test_a_step_through_python_trains_as_one_process_does() -> None:
    modes = "ringdp-topk,ringdp-topk-dgc,ringdp-powersgd,ddp-ring-powersgd"
    text = run_tool("step.py", "--models", "small", "--modes", modes, "--rounds", "1", "--block-seconds", "0.01")
    assert all(re.search(rf"small +{mode} ", text) for mode in modes.split(","))


def test_a_resnet_is_trained_in_modes_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "resnet.json"
    modes = "ddp-ring-powersgd,ringdp-topk-dgc,ringdp-signsgd"
    options = ["--model", "resnet", "--steps", "3", "--window", "2", "--width", "8", "--batch-size", "4"]
    run_tool("time_to_loss.py", *options, "--pixels", "8", "--modes", modes, "--json", str(path))
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
        text = run_tool("time_to_loss.py", "--modes", modes, *options)
    assert re.search(r"^ddp-ring-fp16 .*\n^ringdp ", text, re.MULTILINE), text
    assert [row["mode"] for row in json.loads(path.read_text())["rows"]] == ["ddp-ring-fp16", "ringdp"]


@pytest.mark.slow
def test_kernels_are_timed_beside_memcpy() -> None:
    if ceiling.compiler() is None:
        pytest.skip("no C++ compiler")
    text = run_tool("kernels.py", "--size", "1m", "--rounds", "1", "--isa", "scalar")
    copies = [line.split()[0] for line in text.splitlines() if line.startswith(kernels.CODECS) and " memcpy " in line]
    assert copies == list(kernels.CODECS)


def test_auto_compression_compares_pairs_of_blocks() -> None:
    text = run_tool("auto_compression.py", "compare", "--ranks", "2", "--model", "small", "--blocks", "2",
                    "--block-steps", "2")  # fmt: skip
    assert "auto / exact, 2 pairs" in text
    assert "all ranks share memory" in text


def test_selection_is_checked_before_it_is_timed() -> None:
    text = run_tool("selection.py", "--numel", "100000", "--rounds", "1")
    assert "torch.topk" in text
    assert "memcpy" in text
