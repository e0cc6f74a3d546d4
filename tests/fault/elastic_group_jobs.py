"""What the ranks of test_elastic_groups.py do beside tests/fault/elastic_jobs.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ringdp
from tests.fault.elastic_jobs import Net, Told, group_of, one_step, telling
from tests.fault.faults import Faults


def numbers(folder: str, faults: Faults) -> dict[str, Any]:
    """Of the ranks of a group that has lost none, before the default group knows of the loss, and then."""
    with telling(folder) as (_, place):
        group = group_of([[0, 2], [1, 3]], None)
        model = ringdp.RingDP(Net(8), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            one_step(model, optimizer, place, step, faults.at(place, step), Told())
        told: dict[str, Any] = {"before": _numbers(group)}
        ringdp.metrics.mean(1.0)
        told["after"] = _numbers(group)
        told["world"] = dist.get_process_group_ranks(dist.group.WORLD)
        value = torch.tensor([float(place)])
        if group.size() == 2:
            dist.broadcast(value, src=2, group=group)
        told["from"] = value.item()
        ones = torch.ones(1)
        dist.all_reduce(ones, group=dist.new_group([0, 1, 2]))
        told["of a new group"] = ones.item()
    return told


def _numbers(group: dist.ProcessGroup) -> tuple[list[int], int, int]:
    return dist.get_process_group_ranks(group), dist.get_process_group_ranks(group).index(ringdp.rank()), group.size()
