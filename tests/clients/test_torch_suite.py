"""PyTorch's own tests of its distributed package: what gloo passes, ring passes; what DDP passes, RingDP passes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients import torch_files
from tests.clients.torch_suite import Verdict, only_on_gloo, run_apart
from tests.helpers import need

torch = need("torch")
need("expecttest")
pytestmark = pytest.mark.ci

# What cannot pass, and why.
EXPLAINED = {
    "test_ddp_logging_data_cpu": "torch calls every backend from outside 'custom' in DDP's logging data",
    "test_monitored_barrier_gloo": "torch.distributed.monitored_barrier refuses all but gloo: ringdp.monitored_barrier",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_gloo_rank_0_timeout": "other words for the same timeout",
}
# Fewer than this would mean that the suite was not run at all.
AT_LEAST = 80

# The tests that make a DDP, and those of them in whose place RingDP cannot pass.
DDP_TESTS = "ddp,DDP,DistributedDataParallel,accumulate_gradients,static_graph,stateless,sync_bn_logged,verify_model"
EXPLAINED_IN_DDPS_PLACE = {
    "test_ddp_control_flow_different_across_ranks": "reads the C++ reducer's map of used parameters",
    "test_ddp_control_flow_same_across_ranks": "the same",
    "test_detect_ddp_is_actually_static": "reads what the C++ reducer keeps about the graph",
    "test_ddp_profiling_torch_profiler": "looks for the profiler's event of DDP's search for unused parameters",
    "test_ddp_logging_data_cpu": "expects gradient_as_bucket_view to be False by default",
    "test_ddp_unused_params_rebuild_buckets_exception": "wants TORCH_DISTRIBUTED_DEBUG recommended: ours has the names",
    "test_ddp_device": "needs a GPU: asks tensors for its number",
    "test_ddp_logging_data_gpu": "needs a GPU: device_ids",
    "test_ddp_uneven_inputs": "needs GPUs: takes more than minutes on CPUs, for DDP too",
    "test_ddp_compile_static_graph": "passes, but compiling takes longer than the limit for one test on a busy machine",
}
# These expect the error that DDP's default of find_unused_parameters, False, raises; RingDP's None ends the backward.
WITH_DDPS_DEFAULT = "multiple_nested_unused_params"
A_FEW = (
    "test_DistributedDataParallelCPU,test_ddp_ignore_params_arg,test_ddp_buffer_hook_allreduce,test_ddp_namedtuple,"
    "static_graph_nested_types,join_model_equivalence,native_mixed_precision_grad_as_bucket_view_set,"
    "test_invalid_static_graph,test_static_graph_api_cpu"
)

# The same of PyTorch's test/distributed (RINGDP_TORCH_TESTS names it), written for 2.6.
FILES_EXPLAINED = {
    "find_unused_parameters_kwarg": "expects an error about parameters that are used outside forward: RingDP averages"
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_as_on_gloo(world_size: int) -> None:
    gloo = run_apart("gloo", world_size)
    ring = run_apart("ring", world_size)
    assert sum(verdict.outcome == "passed" for verdict in gloo.values()) >= AT_LEAST
    none_unexplained({name: verdict for name, verdict in only_on_gloo(gloo, ring).items() if name not in EXPLAINED})


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", (2, 3))
def test_all_to_all_as_on_gloo(world_size: int) -> None:
    """The suite runs these on MPI only."""
    chosen = ("-k", "all_to_all", "--like", "mpi")
    gloo = run_apart("gloo", world_size, *chosen)
    ring = run_apart("ring", world_size, *chosen)
    assert sum(verdict.outcome == "passed" for verdict in ring.values()) >= 8
    assert not only_on_gloo(gloo, ring)


def in_ddps_place(backend: str, world_size: int, words: str, ddp: str = "ringdp") -> dict[str, Verdict]:
    return run_apart(backend, world_size, "-k", words, "--ddp", ddp, "--pretend-gpus", "--timeout", "60")


def none_unexplained(verdicts: dict[str, Verdict]) -> None:
    assert not verdicts, "\n".join(f"{name}: {verdict.outcome}\n{verdict.text}" for name, verdict in verdicts.items())


def failed(verdicts: dict[str, Verdict]) -> dict[str, Verdict]:
    return {name: verdict for name, verdict in verdicts.items() if verdict.outcome == "failed"}


def test_a_few_with_ringdp_in_ddps_place() -> None:
    verdicts = in_ddps_place("ring", 2, A_FEW)
    assert sum(verdict.outcome == "passed" for verdict in verdicts.values()) >= 11
    none_unexplained(failed(verdicts))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("backend", ("ring", "gloo"))
def test_ringdp_in_ddps_place(backend: str, world_size: int) -> None:
    verdicts = in_ddps_place(backend, world_size, DDP_TESTS)
    assert sum(verdict.outcome == "passed" for verdict in verdicts.values()) >= 65
    words = WITH_DDPS_DEFAULT.split(",")
    strict = {name for name in verdicts if any(word in name for word in words)}
    assert 2 <= len(strict) <= 3  # torch 2.15 has two of them
    unexplained = set(failed(verdicts)) - set(EXPLAINED_IN_DDPS_PLACE) - strict
    none_unexplained({name: verdicts[name] for name in unexplained})
    none_unexplained(failed(in_ddps_place(backend, world_size, WITH_DDPS_DEFAULT, "ringdp-strict")))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    "RINGDP_TORCH_TESTS" not in os.environ, reason="RINGDP_TORCH_TESTS names PyTorch's test/distributed"
)
@pytest.mark.parametrize("backend", ("ring", "gloo"))
def test_files_with_ringdp_in_ddps_place(backend: str) -> None:
    source = Path(os.environ["RINGDP_TORCH_TESTS"])
    theirs = torch_files.run_apart(source, "gloo", "torch")
    ours = torch_files.run_apart(source, backend, "ringdp")
    missing = {
        name: ours[name]
        for name, verdict in theirs.items()
        if verdict.outcome == "passed" and ours[name].outcome != "passed" and not explained_file(name)
    }
    assert sum(verdict.outcome == "passed" for verdict in theirs.values()) >= 130
    none_unexplained(missing)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    "RINGDP_TORCH_TESTS" not in os.environ, reason="RINGDP_TORCH_TESTS names PyTorch's test/distributed"
)
@pytest.mark.skipif(not hasattr(torch.distributed, "_reconfigure"), reason="torch has reconfigure since 2.14")
def test_fault_tolerance_as_on_gloo() -> None:
    source = Path(os.environ["RINGDP_TORCH_TESTS"])
    gloo, ring = (
        torch_files.run_apart(source, backend, "torch", "-k", "FaultTolerance") for backend in ("gloo", "ring")
    )
    passed = [name.partition(".")[2].partition(".")[2] for name, it in gloo.items() if it.outcome == "passed"]
    ours = {name.partition(".")[2].partition(".")[2]: it for name, it in ring.items()}
    assert len(passed) >= 13
    none_unexplained({name: ours[name] for name in passed if ours[name].outcome != "passed"})


def explained_file(name: str) -> bool:
    return any(part in name for part in FILES_EXPLAINED)
