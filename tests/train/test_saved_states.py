"""Compression states in files that earlier commits wrote load, and training goes on with the bits that it had then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.harness import ring_is_built, run_ranks
from tests.train.saved_states import CASES, FOLDER, Case, joined, went_on

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")


def loads(case: Case, folder: Path, states: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    import torch.distributed as dist

    with joined(case, folder):
        own, mean = states[dist.get_rank()], states[-1]
        return went_on(case, own), went_on(case, mean)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_of_an_earlier_commit_goes_on_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    held = torch.load(case.path, weights_only=True)
    states = [*held["exact"], held["mean"]]
    for seen in run_ranks(loads, case, tmp_path, states, world_size=case.ranks, backend=case.group):
        for after, wanted in zip(seen, (held["after exact"], held["after mean"]), strict=True):
            if case.same_bits_everywhere:
                assert after == wanted
            else:
                torch.testing.assert_close(after, wanted)


def test_there_is_a_case_for_every_file() -> None:
    assert {path.name for path in FOLDER.glob("*.pt")} == {case.path.name for case in CASES}
