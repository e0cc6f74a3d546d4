"""PyTorch's own tests of its distributed package: what gloo passes, ring passes."""

from __future__ import annotations

import pytest

from tests.clients.torch_suite import only_on_gloo, run_apart
from tests.helpers import need
from tests.train.harness import ring_is_built

need("torch")
need("expecttest")
pytestmark = [
    pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

# What cannot pass, and why.
EXPLAINED = {
    "test_ddp_logging_data_cpu": "torch calls every backend from outside 'custom' in DDP's logging data",
    "test_monitored_barrier_gloo": "torch.distributed.monitored_barrier refuses all but gloo: ringdp.monitored_barrier",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_gloo_rank_0_timeout": "other words for the same timeout",
}
# Fewer than this would mean that the suite was not run at all.
AT_LEAST = 80


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_as_on_gloo(world_size: int) -> None:
    gloo = run_apart("gloo", world_size)
    ring = run_apart("ring", world_size)
    assert sum(verdict.outcome == "passed" for verdict in gloo.values()) >= AT_LEAST
    missing = {name: verdict for name, verdict in only_on_gloo(gloo, ring).items() if name not in EXPLAINED}
    assert not missing, "\n".join(f"{name}: {verdict.outcome}\n{verdict.text}" for name, verdict in missing.items())


@pytest.mark.parametrize("world_size", (2, 3))
def test_all_to_all_as_on_gloo(world_size: int) -> None:
    """The suite runs these on MPI only."""
    chosen = ("-k", "all_to_all", "--like", "mpi")
    gloo = run_apart("gloo", world_size, *chosen)
    ring = run_apart("ring", world_size, *chosen)
    assert sum(verdict.outcome == "passed" for verdict in ring.values()) >= 8
    assert not only_on_gloo(gloo, ring)
