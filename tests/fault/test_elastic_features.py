"""What a step of an elastic job may have: codes, weights, hooks, reports; the bits are those without elasticity."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel.distributed import _MixedPrecision

import ringdp
from ringdp.compression import Int8, PowerSGD, RandomK, Sparse2, TopK
from tests.fault import elastic_feature_jobs as jobs
from tests.fault.elastic_jobs import HOOKS
from tests.fault.elastic_jobs import train as jobs_train
from tests.fault.elastic_oracle import STEPS, compare, live, plain, survivors
from tests.fault.faults import PHASES, Faults, drawn, sampled
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.mark.parametrize("phase", ["last bucket", *sampled([it for it in PHASES if it != "last bucket"], 1)])
def test_int8_with_error_feedback_in_each_phase(tmp_path: Path, phase: str) -> None:
    told = compare(tmp_path, 3, Faults().kill(1, 2, phase), options={"compression": Int8(error_feedback=True)})
    for one in told.values():
        assert one.extra["coded"] > 100_000  # it was codes that were compared
        (line,) = [line for line in one.lines if "was lost" in line]
        assert "error feedback held is lost with them" in line


@pytest.mark.parametrize("codec", sampled(["int4", "bf16", "nf4"], 2))
def test_other_codecs_one_after_the_other_down_to_one(tmp_path: Path, codec: str) -> None:
    faults = Faults().kill(0, 1).kill(3, 2, "after backward").kill(1, 3, "first bucket")
    told = compare(tmp_path, 4, faults, options={"compression": codec})
    assert told[2].sizes == [4, 3, 2, 1] or told[2].sizes == [4, 3, 3, 1]


def test_codes_without_rank_order_and_warm_up(tmp_path: Path) -> None:
    options: dict[str, Any] = {"options": {"compression": "int8", "reproducible": False}}
    compare(tmp_path, 3, Faults().kill(2, 1), **options)


@pytest.mark.parametrize("compression", [Int8(error_feedback=True), None], ids=["codes", "exact"])
@pytest.mark.parametrize("victim", [1, 3], ids=["an owner", "the host that owns nothing"])
def test_on_unequal_links_the_map_shrinks_with_the_members(tmp_path: Path, victim: int, compression: Any) -> None:
    options: dict[str, Any] = {"compression": compression, "reproducible": False}
    faults = Faults().kill(victim, 1, "last bucket")
    told = compare(tmp_path, 4, faults, jobs.on_unequal_links, options=options)
    if compression is not None:  # owners encode the mean: its bits show who they are
        assert told[0].gradients[0] != plain(faults.members(4, STEPS), options=options)[0][0][0]


PYTHON = {
    "topk": TopK(0.05),
    "sparse2": Sparse2(0.05),
    "powersgd": PowerSGD(2),
    "signsgd": "signsgd",
    "randomk": RandomK(0.2),
    "qsgd": "qsgd",
    "one's own": jobs.Rounded(),
}


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_compressors_in_python(tmp_path: Path, name: str, phase: str) -> None:
    """Their states count once, and belong to the ranks that go on."""
    compare(tmp_path, 3, Faults().kill(1, 1, phase), options={"compression": PYTHON[name], "reproducible": False})


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["topk", "qsgd"])
def test_a_state_that_is_saved_between_a_loss_and_the_next_step(tmp_path: Path, name: str, world: int) -> None:
    """The loss is noticed in the mean of a metric."""
    options = {"compression": PYTHON[name], "reproducible": False}
    compare(tmp_path, world, Faults().kill(world - 1, 1, "optimizer"), options=options, each_step="mean and state")


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
@pytest.mark.parametrize("action", ["raise", "sync"])
def test_a_guard(tmp_path: Path, phase: str, action: str) -> None:
    compare(tmp_path, 3, Faults().kill(2, 1, phase), options={"guard": ringdp.Guard(2, action)})


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_mixed_precision(tmp_path: Path, phase: str) -> None:
    options = {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}
    compare(tmp_path, 3, Faults().kill(0, 1, phase), options=options)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_buckets_that_are_skipped(tmp_path: Path, phase: str, victim: int) -> None:
    """Each rank has a branch of its own: the bucket of the lost rank's is sent no more."""
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.002}
    compare(tmp_path, 3, Faults().kill(victim, 2, phase), options=options, branches=True)


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
@pytest.mark.parametrize("accumulate", [False, True])
def test_sparse_gradients(tmp_path: Path, phase: str, accumulate: bool) -> None:
    compare(tmp_path, 3, Faults().kill(1, 1, phase), sparse=True, accumulate=accumulate)


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
@pytest.mark.parametrize("accumulate", [False, True])
def test_optimizers_in_backward(tmp_path: Path, phase: str, accumulate: bool) -> None:
    told = compare(tmp_path, 3, Faults().kill(1, 1, phase), in_backward=True, accumulate=accumulate)
    assert len(set(told[0].parameters)) == 4  # each step has changed them


@pytest.mark.parametrize("phase", sampled(list(PHASES), 1))
def test_a_delayed_all_reduce(tmp_path: Path, phase: str) -> None:
    """It follows the step, as a unit of its own."""
    compare(tmp_path, 3, Faults().kill(1, 1, phase), delayed=True, width=8)


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_a_hook_that_says_that_it_is_repeatable(tmp_path: Path, phase: str) -> None:
    compare(tmp_path, 3, Faults().kill(1, 1, phase), hook="one's own")


STATEFUL = ("one's own with a state", "torch powerSGD", "ddp_hook")


@pytest.mark.parametrize("phase", ["last bucket", *sampled([it for it in PHASES if it != "last bucket"], 1)])
@pytest.mark.parametrize("hook", STATEFUL)
def test_hooks_with_a_state(tmp_path: Path, hook: str, phase: str) -> None:
    """It is what the steps that count have left, each once."""
    options = {"reproducible": False, "bucket_cap_mb": 0.002 if hook == "ddp_hook" else 0.1}  # some buckets are exact
    compare(tmp_path, 3, Faults().kill(1, 2, phase), hook=hook, options=options)


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_measured_compression(tmp_path: Path, phase: str) -> None:
    compare(tmp_path, 3, Faults().kill(1, 2, phase), options={"compression": "int8"}, hook="measured")


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_chosen_compression(tmp_path: Path, phase: str) -> None:
    """By measured speeds, so that no other job has to have the same bits; all ranks have."""
    told = live(
        tmp_path,
        4,
        Faults().kill(2, 1, phase).kill(0, 2),
        jobs_train,
        options={"compression": "auto", "reproducible": False},
    )
    assert told[1].parameters == told[3].parameters
    assert len(told[1].parameters) == 4


def test_compressors_in_python_one_after_the_other(tmp_path: Path) -> None:
    faults = Faults().kill(0, 1, "first bucket").kill(3, 2, "after backward")
    compare(tmp_path, 4, faults, options={"compression": PYTHON["topk"], "reproducible": False}, accumulate=True)


@pytest.mark.parametrize(("width", "phase"), sampled([(width, phase) for width in (8, 300) for phase in PHASES], 6))
def test_weights_by_samples(tmp_path: Path, phase: str, width: int) -> None:
    options: dict[str, Any] = {"options": {"weight": "samples"}, "uneven": True, "width": width}
    told = compare(tmp_path, 3, Faults().kill(1, 1, phase), **options)
    for one in told.values():
        (line,) = [line for line in one.lines if "was lost" in line]
        known = "step 2 was made again without the part of rank 1: its batch, of weight 8, is not in it"
        if phase in ("first bucket", "last bucket"):  # the ranks have told each other their weights
            assert known in line
        else:
            assert "weight" not in line
            assert (phase == "forward") == ("step 2 was made again" in line)


@pytest.mark.parametrize("phase", sampled(list(PHASES), 2))
def test_weights_of_sparse_gradients(tmp_path: Path, phase: str) -> None:
    options: dict[str, Any] = {"options": {"weight": "samples"}, "uneven": True, "sparse": True}
    compare(tmp_path, 3, Faults().kill(1, 1, phase), **options)


def test_weights_of_micro_batches_with_buffers_and_codes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"options": {"weight": "samples", "compression": "int4"}, "uneven": True}
    options |= {"accumulate": True, "norm": True}
    compare(tmp_path, 4, Faults().kill(0, 1, "first bucket").kill(2, 2, "forward"), **options)


@pytest.mark.parametrize("hook", sampled([hook for hook in HOOKS if hook not in STATEFUL], 3))
def test_hooks_of_one_operation(tmp_path: Path, hook: str) -> None:
    compare(tmp_path, 3, Faults().kill(1, 1, "first bucket").kill(2, 2), hook=hook, width=300)


@pytest.mark.parametrize("phase", ["last bucket", *sampled([it for it in PHASES if it != "last bucket"], 1)])
def test_reports_and_the_guard_go_on(tmp_path: Path, phase: str) -> None:
    more = jobs.GUARDED_WITHIN + 10 if phase == "last bucket" else 0  # the guard needs them to see each parameter
    faults = Faults().kill(1, 5, phase)
    told = survivors(
        run_outcomes(jobs.reports, str(tmp_path), faults, more, world_size=3, backend=None), faults.ended()
    )
    for one in told.values():
        assert one["before"] == 3  # rows of the report
        assert one["after"] == 2
        assert one["guarded"] is True
        assert one["differs"] == (more > 0)  # a replica that was changed on purpose is found
    assert told[0]["steps"] == told[2]["steps"]


COMPRESSIONS = [None, None, "int8", "bf16", Int8(error_feedback=True), *PYTHON.values()]


def drawn_job(number: int) -> tuple[Faults, dict[str, Any]]:
    """One or two ranks of four are lost, at once or one after the other."""
    draw = random.Random(number)
    faults, places = Faults(), draw.sample(range(4), draw.choice([1, 1, 2]))
    step = draw.randrange(4)
    for place in places:
        faults = faults.kill(place, step, draw.choice(PHASES))
        step = min(step + draw.randrange(2), 3)
    options: dict[str, Any] = {"bucket_cap_mb": draw.choice([0.1, 0.002]), "reproducible": False}
    job: dict[str, Any] = {"options": options, "width": 300, "norm": draw.random() < 0.2}
    job[draw.choice(["accumulate", "branches", "uneven", "norm"])] = True
    if job.get("uneven"):
        options["weight"] = "samples"
    if job.get("branches"):
        options["find_unused_parameters"] = draw.choice([None, True])
        options["skip_all_reduce_unused_params"] = options["find_unused_parameters"] is True and draw.random() < 0.5
    chosen = draw.choice(["compression", "compression", "scaler", "hook", "mixed", "sparse"])
    if chosen in ("compression", "scaler"):
        options["compression"] = draw.choice(COMPRESSIONS)
        if chosen == "scaler":
            job = {"options": options, "width": 300, "norm": draw.random() < 0.3}
            options.pop("weight", None)
            job["overflow"] = draw.randrange(4), draw.randrange(4)
    elif chosen == "hook":
        job["hook"] = draw.choice(["allreduce", "builtin fp16", "torch fp16", "bf16", *STATEFUL])
        if job["hook"] in ("torch powerSGD", "ddp_hook"):
            # A new job may lay out its buckets anew: they are known by their numbers, or added in another order.
            job |= {"norm": False, "branches": False}
    elif chosen == "sparse":
        job["sparse"] = True
    else:
        options["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16)
        job["norm"] = False  # its buffers are not of that type
    if job.get("accumulate") and job.get("hook") not in ("torch powerSGD", "ddp_hook") and draw.random() < 0.5:
        # What micro-batches have left of a parameter that is frozen then is averaged in the forward, as a unit.
        lost = {it.step for it in faults.all}
        job["freeze"] = tuple(step for step in range(4) if draw.random() < 0.5 and step not in lost)
    elif chosen == "compression" and draw.random() < 0.3:
        job["replace"] = draw.randrange(4)
    if draw.random() < 0.3:
        options["guard"] = draw.choice([2, 3])
    options["gradient_as_bucket_view"] = draw.random() < 0.7
    if job.get("branches"):  # the bits are the same also where a job that is compared with it has other buckets
        options["reproducible"] = options.get("compression") is not PYTHON["powersgd"]
    return faults, job


@pytest.mark.parametrize("number", drawn(200, quick=90))
def test_a_drawn_job(tmp_path: Path, number: int) -> None:
    faults, job = drawn_job(number)
    compare(tmp_path, 4, faults, **job)
