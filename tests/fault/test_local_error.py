"""A system error inside one rank's core: it is named as that rank's, and an elastic job goes on without the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.elastic_oracle import STEPS, check_equal, live, plain
from tests.fault.faults import Faults, sampled
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.mark.parametrize(("transport", "victim"), sampled([("auto", 2), ("tcp", 0), ("auto", 0), ("tcp", 2)], 2))
def test_an_elastic_job_goes_on_without_the_rank(tmp_path: Path, transport: str, victim: int) -> None:
    faults = Faults().close_pollers(victim, 1, "backward")
    options: dict[str, Any] = {"width": 60, "options": {"bucket_cap_mb": 0.01, "reproducible": True}}
    options["transport"] = transport
    for place in {0, 1, 2} - {victim}:  # so that the other one has to wait
        faults = faults.sleep(place, 1, "backward", 0.3)
    told = live(tmp_path, 3, faults, catch=True, **options)
    mine = told.pop(victim)
    assert (mine.extra["error"], mine.extra["rank"]) == ("SystemResourceError", victim)
    assert f"rank {victim} (host" in mine.extra["text"]
    assert "Bad file descriptor" in mine.extra["text"]
    check_equal(told, plain(Faults().kill(victim, 1).members(3, STEPS), **options))
    for one in told.values():
        assert "error" not in one.extra, one.extra
        assert one.sizes == [3, 2, 2, 2]


@pytest.mark.parametrize("transport", sampled(["tcp", "auto"], 1))
def test_all_ranks_of_another_job_name_the_rank(tmp_path: Path, transport: str) -> None:
    faults = Faults().close_pollers(1, 1, "backward").sleep(0, 1, "backward", 0.3).sleep(2, 1, "backward", 0.3)
    told = live(tmp_path, 3, faults, elastic=False, catch=True, transport=transport)
    for place, one in told.items():
        assert one.extra["error"] == "SystemResourceError", one.extra
        assert one.extra["rank"] == place
        assert one.extra["peer"] == (None if place == 1 else 1)
        assert ("(reported by rank 1 (" in one.extra["text"]) == (place != 1), one.extra
