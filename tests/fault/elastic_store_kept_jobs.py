"""What the ranks of test_elastic_kept.py do: a key-value store and a sharded table in an elastic job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ringdp
from ringdp.errors import MembershipChanged
from tests.fault.elastic_jobs import joined
from tests.fault.faults import Faults

SHAPES = {"big": (1500,), "small": (7,), "matrix": (40, 30)}
ROWS, DIM, SAVED = 40, 4, 1  # the table is saved behind step 1


def pushed(name: str, place: int, step: int) -> Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * step + 10 * place + len(name))
    return torch.randint(-9, 9, SHAPES[name], generator=generator).float()


def store(folder: str, steps: range, faults: Faults, way: str, optimizer: str | None) -> dict[str, Any]:
    """`way`: how gradients get into the store: "push", "pushpull" or "attach"."""
    with joined(folder, elastic=True) as place:
        kv = ringdp.kvstore.create("dist_sync")
        values = {name: torch.full(shape, float(place)) for name, shape in SHAPES.items()}
        model = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in values.items()})
        attached = kv.attach(model) if way == "attach" else None
        if attached is None:
            kv.init(list(SHAPES), list(values.values()))
        if optimizer is not None:
            kv.set_optimizer(optimizer, learning_rate=0.5)
        sizes = []
        for step in steps:
            here = faults.at(place, step)
            here("forward")
            given = {name: pushed(name, place, step) for name in SHAPES}
            here("last bucket")
            if attached is not None:
                sum((model[name] * given[name]).sum() for name in SHAPES).backward()
                attached.step()
                model.zero_grad()
            elif way == "push":
                kv.push(list(SHAPES), list(given.values()))
                kv.flush()
            else:
                out = [torch.empty(shape) for shape in SHAPES.values()]
                kv.pushpull(list(SHAPES), list(given.values()), out)
            here("after backward")
            sizes.append(kv.num_workers)
        found = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        kv.pull(list(SHAPES), list(found.values()))
        state = kv.state_dict()
    return {"values": found, "sizes": sizes, "state": state}


def compressed(folder: str, steps: range, faults: Faults, compression: dict[str, Any], flushes: int) -> dict[str, Any]:
    """Those whom a fault ends push zeros: what they owe is nothing. The last pushes are of zeros, on all ranks."""
    ended = faults.ended()
    with joined(folder, elastic=True) as place:
        kv = ringdp.kvstore.create("dist_sync")
        kv.set_gradient_compression(compression)
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.init("matrix", torch.zeros(SHAPES["matrix"]))
        for step in range(steps.start, steps.stop + flushes):
            here = faults.at(place, step)
            here("forward")
            given = pushed("matrix", place, step)
            here("last bucket")
            kv.push("matrix", given if step < steps.stop and place not in ended else torch.zeros_like(given))
            kv.flush()
            here("after backward")
        found = torch.empty(SHAPES["matrix"])
        kv.pull("matrix", found)
    return {"matrix": found}


def table_step(table: Any, place: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + place)
    ids = torch.randint(0, ROWS, (6, 3), generator=generator)
    table(ids).square().sum().backward()
    table.step()


def table(folder: str, steps: range, faults: Faults, saved: str, *, elastic: bool) -> dict[str, Any]:
    """After a loss: the last save, and on from there. Without elasticity: the same from a save that is there."""
    told: dict[str, Any] = {"error": ""}
    with joined(folder, elastic=elastic):
        place = int(os.environ["RANK"])
        rows = ringdp.nn.ShardedEmbedding(ROWS, DIM, lr=0.1, reduce="mean", weight=ringdp.nn.Normal(seed=4))
        step = steps.start
        if step > 0:
            rows.load(Path(saved))
        while step < steps.stop:
            try:
                faults.at(place, step)("forward")
                table_step(rows, place, step)
                if step == SAVED and elastic:
                    rows.save(Path(saved))
            except MembershipChanged as error:
                told["error"] = str(error)
                rows.load(Path(saved))
                step = SAVED
            step += 1
        told["rows"] = rows.rows(torch.arange(ROWS))
        told["local"] = rows.local_rows
    return told
