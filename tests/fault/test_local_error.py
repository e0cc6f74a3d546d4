"""A system error inside one rank's core: it is named as that rank's, and an elastic job goes on without the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault import local_error_jobs as jobs
from tests.fault.elastic_oracle import STEPS, plain
from tests.train.harness import ring_is_built, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_elastic_job_goes_on_without_the_rank(tmp_path: Path, transport: str, victim: int) -> None:
    folder = str(tmp_path)
    told = run_ranks(jobs.train, folder, STEPS, victim=victim, transport=transport, world_size=3, backend=None)
    mine = told.pop(victim)
    assert (mine.extra["error"], mine.extra["rank"]) == ("SystemResourceError", victim)
    assert f"rank {victim} (host" in mine.extra["text"]
    assert "Bad file descriptor" in mine.extra["text"]
    left = tuple(place for place in range(3) if place != victim)
    gradients, parameters = plain(tmp_path, [(0, 1, 2), left, left, left], jobs.train, transport=transport)
    for one in told:
        assert "error" not in one.extra, one.extra
        assert (one.gradients, one.parameters, one.sizes) == (gradients, parameters, [3, 2, 2, 2])
        assert one.seconds[1] < jobs.OUTLIVES_S / 2


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_all_ranks_of_another_job_name_the_rank(tmp_path: Path, transport: str) -> None:
    named: dict[str, Any] = {"elastic": False, "victim": 1, "transport": transport}
    told = run_ranks(jobs.train, str(tmp_path), STEPS, **named, world_size=3, backend=None)
    for place, one in enumerate(told):
        assert one.extra["error"] == "SystemResourceError", one.extra
        assert one.extra["rank"] == place
        assert one.extra["peer"] == (None if place == 1 else 1)
        assert ("(reported by rank 1 (" in one.extra["text"]) == (place != 1), one.extra
        assert one.seconds[1] < jobs.OUTLIVES_S / 2
