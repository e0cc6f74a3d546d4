"""What benchmarks/failures/joins.py makes of what the ranks of a job have told."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.failures import joins
from benchmarks.lib.ranks import Failed


def steps(at: list[float], first: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"what": "step", "at": time, "number": first + number, "bits": first + number, "takes_part": True, **more}
        for number, time in enumerate(at)
    ]


def story() -> dict[int, list[dict[str, Any]]]:
    """Killed at 3.5; a step takes a second, the ones after the loss two and three, the one with the newcomer four."""
    newcomer = [{"what": "ready", "at": 7.5}, *steps([12.0 + it for it in range(6)], first=6)]
    return {1: steps([0.0, 1, 2, 3, 5, 8, 12, *(13.0 + it for it in range(7))]), 2: newcomer}


def test_gaps_are_those_of_the_others_less_their_usual_step() -> None:
    found = joins.measures(story(), 2, at=3.5)
    assert found == {"ready_s": 4.0, "takes_part_s": 4.5, "loss_s": 2.0, "pause_s": 3.0}


def test_a_newcomer_with_other_means_gives_no_figures() -> None:
    told = story()
    told[2][-1]["bits"] += 1
    with pytest.raises(Failed, match="other means or parameters"):
        joins.measures(told, 2, at=3.5)
