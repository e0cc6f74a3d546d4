"""What the ranks of test_elastic_features.py do beside tests/fault/elastic_jobs.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ringdp
from ringdp.compression import Info
from ringdp.ddp.divergence import guard, options
from tests.fault.elastic_jobs import Net, Told, one_step, telling, train
from tests.fault.faults import Faults

GUARDED_WITHIN = 50  # steps


def reports(folder: str, faults: Faults, more: int) -> dict[str, Any]:
    """Steps that the ranks report to each other; in one a rank dies. Then a replica is changed; `more` follow.

    The guard is the one that there is by default, but for its period: the harness waits some seconds after a death.
    """
    os.environ["RINGDP_REPORT_EVERY"] = "2"
    with mock.patch.object(guard, "EVERY", GUARDED_WITHIN), telling(folder) as (said, place):
        model = ringdp.RingDP(Net(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        told: dict[str, Any] = {}

        def step(number: int) -> None:
            one_step(model, optimizer, place, number, faults.at(place, number), Told())

        for number in range(5):
            step(number)
        told["before"] = len(model.report().ranks)
        for number in range(5, 15):
            step(number)
        told["after"] = len(model.report().ranks)
        told["steps"] = model.report().step
        told["guarded"] = model.ringdp_features[options.ReplicaGuard].guard is not None
        if ringdp.rank() == 1:
            with torch.no_grad():
                model.module.last.bias += 1.0
        for number in range(15, 15 + more):
            step(number)
    told["differs"] = any("differ" in line for line in said.lines)
    return told


class Rounded:
    """A user's: of each element its sign and exponent, and what is left out in the next step."""

    error_feedback = True
    carries_nan = True

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor]:
        return (x.to(torch.float8_e5m2).view(torch.uint8),)

    def decompress(self, payload: Any, info: Info) -> Tensor:
        return payload[0].view(torch.float8_e5m2).float()


LINES = {"a": "1gbit", "b": "1gbit", "c": "1gbit", "d": "100mbit"}
"""Of each place's site."""


def on_unequal_links(
    folder: str,
    steps: range,
    faults: Faults | None = None,
    *,
    places: tuple[int, ...] | None = None,
    **options: Any,
) -> Told:
    rank = int(os.environ["RANK"])
    path = Path(folder, f"map-{rank}.json")
    path.write_text(json.dumps({"ringdp_tuning": 1, "uplinks": LINES}))
    os.environ |= {"RINGDP_SITE": [*LINES][places[rank] if places else rank], "RINGDP_TUNING": str(path)}
    return train(folder, steps, faults or Faults(), places=places, **options)
