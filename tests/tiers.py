"""Which tests run when. A test that is not named here and not marked `slow` is of the default tier, `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# CI runs these beside the default tier (`make test-ci`): the sanitizers, and what a change of the core, the reducer, a
# compressor or the launcher does not break by itself. Folders, files, or single tests as FILE::TEST.
CI = (
    "cpp/",
    "unit/test_tools_bench.py",
    "unit/test_docs.py::test_a_walk_shows_what_the_page_shows",
    "unit/test_compression_check.py::test_what_the_tests_use_keeps_its_promises",
    "fault/test_elastic_launch.py::test_a_rank_that_raises_while_its_buckets_are_in_flight_is_lost_to_the_others[shutdown",
    "fault/test_elastic_launch.py::test_a_rank_that_raises_while_its_buckets_are_in_flight_is_lost_to_the_others[destroy",
    "fault/test_inheritance.py::test_what_a_rank_starts_disturbs_its_job_in_nothing",
    "fault/test_launch_end.py::test_a_launcher_that_is_not_heard_of_any_more",
    "train/test_digits.py",
    "train/test_examples.py",
    "train/test_gradient_pool.py::test_switched_off_the_process_is_as_it_was[-",
    "train/test_gradient_pool.py::test_switched_off_the_process_is_as_it_was[device_ids",
    "train/test_hook_exceptions.py::test_the_process_ends_by_it[exit-7-gloo",
    "train/test_hook_exceptions.py::test_the_process_ends_by_it[interrupt--2-gloo",
    "train/test_kvstore.py::test_codes_are_those_of_a_simulation[3",
    "train/test_kvstore.py::test_it_trains_as_ringdp_with_the_same_optimizer[1",
    "train/test_kvstore.py::test_it_trains_as_ringdp_with_the_same_optimizer[3",
    "train/test_reproducible.py::test_beside_other_options[compiled-{}]",
    "train/test_reproducible.py::test_beside_other_options[joined-{}]",
    "train/test_reproducible.py::test_beside_other_options[scaled-{}]",
    "train/test_reproducible.py::test_beside_other_options[weighted-{'weight': 'samples'}]",
    "train/test_reproducible.py::test_compressors_in_python[qsgd",
    "train/test_reproducible.py::test_compressors_in_python[randomk",
    "train/test_reproducible.py::test_compressors_in_python[sign]",
    "train/test_reproducible.py::test_compressors_in_python[terngrad",
    "train/test_sharded_embedding.py::test_it_equals_one_process[1",
    "train/test_sharded_embedding.py::test_it_equals_one_process[3",
    "train/test_sharded_embedding.py::test_it_equals_one_process[4",
    "train/test_weights.py::test_compiled_model",
    "train/test_c_example.py",
    "train/test_custom_compressor.py",
    "clients/test_ringdp_compile.py",
    "clients/test_torch_suite.py",
)

# What is about the scaffolding and about programs of others: `make test-nightly` runs these, and CI does not.
NIGHTLY = (
    "unit/test_benchmarks.py",
    "unit/test_benchmark_commands.py",
    "unit/test_long_line.py",
    "unit/test_compression_benchmarks.py",
    "unit/test_run_tests.py",
    "unit/test_build.py",
    "unit/test_wheel.py",
    "unit/test_cuda_toolkit.py",
    "unit/test_cuda_bindings.py::test_the_benchmark_of_the_kernels_says_that_it_needs_a_gpu",
    "clients/test_libraries.py",
    "clients/test_ringdp_libraries.py",
    "fault/test_slurm.py",
)

# Only `make test-slow` runs these, which take half a minute and longer, or repeat another one under other variables.
SLOW = (
    "fault/test_hosts_apart.py::test_a_cable_that_is_pulled_ends_both",
    "fault/test_kubernetes.py::test_two_pods_are_stopped_and_go_on[of_the_operator]",
    "unit/test_compression_benchmarks.py",
    "unit/test_docs.py::test_a_walk_shows_what_the_page_shows[docs/start/slow_network.md]",
    "unit/test_benchmarks.py::test_what_a_tool_started_ends_with_it",
    "unit/test_compression_low_rank.py::test_it_keeps_its_promises",
    "unit/test_compression_sparse.py::test_it_keeps_its_promises",
    "unit/test_run_tests.py::test_not_where_many_fail",
    "unit/test_tools_bench.py::test_all_collectives_beside_gloo_and_compressors_without_numpy",
    "unit/test_wheel.py::test_trains_without_a_compiler",
    "train/test_digits.py::test_one_rank_needs_no_launcher",
    "train/test_examples.py::test_one_rank_needs_no_launcher_and_a_check_can_fail",
    "train/test_hybrid_2d.py",
)

# These measure time or memory: nothing runs beside them. The other files of fault/ have bounds too, but wide ones: they
# passed while a dozen processes shared two cores. What nevertheless fails is run again, alone.
ALONE = (
    "fault/test_false_alarms.py",
    "fault/test_hostile.py",
    "fault/test_launch_stop.py",
    "fault/test_rank_liveness.py",
    "train/test_parallel_memory.py",
)

# These files begin first: they take longest, so that none of them is left for one process alone at the end. The others
# follow by name, at the end those of unit/, which are short.
FIRST = (
    "cpp/test_cpp.py",
    "unit/test_wheel.py",
    "unit/test_build.py",
    "unit/test_benchmarks.py",
    "unit/test_init.py",
    "unit/test_docs.py",
    "train/test_ddp_parity.py",
    "train/test_reproducible.py",
    "fault/test_many_hosts.py",
    "fault/test_elastic_launch.py",
    "fault/test_shared_memory.py",
    "fault/test_rank_handshake.py",
)


def place(item: pytest.Item) -> int:
    """Where a test's file comes among the others."""
    name = str(item.path.relative_to(HERE)) if HERE in item.path.parents else ""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def mark(item: pytest.Item) -> None:
    """Add the markers `ci`, `nightly`, `slow` and `alone` to a test of these tables."""
    if item.get_closest_marker("alone"):
        raise pytest.UsageError(f"{item.nodeid}: what runs alone is named in tests/tiers.py, not marked")
    name = f"{item.path.relative_to(HERE)}::{item.name}" if HERE in item.path.parents else ""
    if name.startswith(CI):
        item.add_marker(pytest.mark.ci)
    if name.startswith(NIGHTLY):
        item.add_marker(pytest.mark.nightly)
    if name.startswith(SLOW):
        item.add_marker(pytest.mark.slow)
    if name.startswith(ALONE):
        item.add_marker(pytest.mark.alone)
