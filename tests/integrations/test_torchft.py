"""torchft over ring: replica groups train, one is killed and comes back. Needs torchft's wheel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.environment import ROOT, output_of, python_with, run_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]

PACKAGE = "torchft-nightly"
JOB = "tests.integrations.torchft_job"
PAGE = (ROOT / "docs" / "how-to" / "torchft.md").read_text()


def require_reconfigure() -> None:
    import torch.distributed as dist

    if not hasattr(dist, "_reconfigure"):
        pytest.skip("torch before 2.14 has process groups that keep their members")


def check(groups: list[dict[str, Any]], *, backend: str, dropped: range) -> None:
    """What all groups know at the end is the same, to the bit, and each survivor dropped so many steps."""
    *survivors, victim = groups
    for group in groups:
        assert group["backend"] == backend
        assert group["step"] == groups[0]["step"]
        for key in ("weights", "momentum"):
            for ours, theirs in zip(group[key], groups[0][key], strict=True):
                assert torch.equal(ours, theirs)
        assert group["lines"][-1]["participants"] == len(groups)
    for group in survivors:
        assert len({line["pid"] for line in group["lines"]}) == 1  # nobody started it again
        assert sum(not line["committed"] for line in group["lines"]) in dropped
    # It was started again, and took the others' state: its steps go on from theirs.
    first, second = dict.fromkeys(line["pid"] for line in victim["lines"])
    before = [line["step"] for line in victim["lines"] if line["pid"] == first]
    after = [line["step"] for line in victim["lines"] if line["pid"] == second]
    assert before[-1] < after[0] - 1


@pytest.mark.parametrize("count", [2, 3])
def test_a_group_dies_inside_an_all_reduce_and_comes_back(count: int) -> None:
    groups = run_ranks(python_with(PACKAGE), JOB, "ring", count, "inside", launcher=None, ranks=count)
    check(groups, backend="torchft-ring", dropped=range(1, 2))


@pytest.mark.slow
def test_a_group_dies_between_two_steps_and_comes_back() -> None:
    groups = run_ranks(python_with(PACKAGE), JOB, "ring", 2, "between", launcher=None, ranks=2)
    check(groups, backend="torchft-ring", dropped=range(2))  # one where it died inside a step after all


@pytest.mark.parametrize("count", [2, 3])
def test_torchs_own_group_is_reconfigured_by_torchft(count: int) -> None:
    require_reconfigure()
    groups = run_ranks(python_with(PACKAGE), JOB, "native", count, "inside", launcher=None, ranks=count)
    check(groups, backend="ring", dropped=range(1, 2))


def test_groups_of_all_quorums_leave_nothing_and_the_default_group_alone() -> None:
    results = run_ranks(python_with(PACKAGE), "tests.integrations.torchft_groups_job")
    for rank, result in enumerate(results):
        assert result["sums"] == [1.0 + 2 * quorum for quorum in range(16)]
        assert result["default"] == 4.0
        assert result["again"] == 2.0
        threads, descriptors = zip(*result["sizes"], strict=True)
        assert threads[1] == threads[-1], f"rank {rank}"
        assert descriptors[-1] <= descriptors[0] + 3, f"rank {rank}"  # connections to the store may close late
    assert "aborted on rank" in results[1]["error"]


STARTER = """
import os, subprocess, sys
from torchft.coordination import LighthouseServer
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
groups = [subprocess.Popen([sys.executable, "replica.py", str(replica)]) for replica in range(2)]
sys.exit(max(abs(group.wait()) for group in groups))
"""


@pytest.mark.parametrize("how", ["ring", "native"])
def test_the_pages_script_trains_two_replica_groups(how: str, tmp_path: Path) -> None:
    script, native = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if how == "native":
        require_reconfigure()
        script = script.replace("manager = ", f"{native}manager = ").replace("ProcessGroupRing(timeout=30)", "group")
        assert "pg=group," in script
    (tmp_path / "replica.py").write_text(script)
    said = output_of([str(python_with(PACKAGE)), "-c", STARTER], tmp_path)
    assert len(re.findall(r"step 200 with 2 groups", said)) == 2, said[-3000:]
