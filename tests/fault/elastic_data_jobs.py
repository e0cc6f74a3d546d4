"""What the ranks of test_elastic_data.py do: train with samplers, and write down which samples each step has had."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringdp
from ringdp.data import BalancedSampler, Limits, follow
from ringdp.data import sampler as sampler_module
from tests.fault.elastic_jobs import group_of, telling
from tests.fault.faults import Faults
from tests.train.harness import default_group

FEATURES = 4


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.tanh().sum(1, keepdim=True)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def ahead_by(batches: int, iterator: Iterator[list[int]]) -> Iterator[list[int]]:
    """As a DataLoader with workers draws: so many batches before they are used."""
    drawn: deque[list[int]] = deque()
    for one in iterator:
        drawn.append(one)
        if len(drawn) > batches:
            yield drawn.popleft()
    yield from drawn


def balanced(
    folder: str,
    faults: Faults,
    *,
    samples: int,
    batch: int,
    epochs: int,
    ahead: tuple[int, ...],
    balance: Any = "equal",
    limits: Limits | None = None,
    drop_last: bool = False,
    cost: bool = False,
    save_at: int | None = None,
    groups: tuple[tuple[int, ...], ...] = (),
) -> dict[str, Any]:
    """`ahead`: by place, the batches that are drawn before they are used. `save_at`: the sampler's state behind it.
    `groups`: of places; each trains a model of its own, with all samples. `balance`: if numbers, by place."""
    x, y = data(samples)
    log = logging.FileHandler(Path(folder, f"log-{os.environ['RANK']}"))  # also of a rank that dies
    logging.getLogger("ringdp").addHandler(log)
    with telling(folder) as (told, place), Path(folder, f"samples-{place}").open("w", buffering=1) as audit:
        group = group_of(groups, None) if groups else default_group()
        model = ringdp.RingDP(net(), weight="samples", bucket_cap_mb=0.0001, process_group=group)
        if groups and not isinstance(balance, str):
            balance = [balance[one] for one in next(places for places in groups if place in places)]
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        options: dict[str, Any] = {"seed": 3, "balance": balance, "limits": limits, "drop_last": drop_last}
        options |= {"group": group, "cost": (lambda index: 1 + index % 3) if cost else None}
        sampler = BalancedSampler(samples, batch, **options)
        sampler.watch(model)
        step, saved = 0, None
        for epoch in range(epochs):
            assert sampler.epoch in (epoch, epoch - 1)
            for mine in ahead_by(ahead[place], iter(sampler)):
                audit.write(json.dumps([epoch, step, mine]) + "\n")
                here = faults.at(place, step)
                here("forward")
                loss = (model(x[mine]) - y[mine]).square().mean()
                parameters = list(model.parameters())
                handles = [
                    parameters[-1].register_hook(lambda gradient, here=here: here("first bucket")),
                    parameters[0].register_hook(lambda gradient, here=here: here("last bucket")),
                ]
                loss.backward()
                for handle in handles:
                    handle.remove()
                here("after backward")
                optimizer.step()
                here("optimizer")
                optimizer.zero_grad()
                if step == save_at:
                    saved = sampler.state_dict()
                step += 1
        weights = [one.detach().clone() for one in model.parameters()]
    logging.getLogger("ringdp").removeHandler(log)
    return {"weights": weights, "lines": told.lines, "steps": step, "saved": saved, "epoch": sampler.epoch}


def followed(
    folder: str, faults: Faults, samples: int, epochs: int, groups: tuple[tuple[int, ...], ...] = ()
) -> list[list[int]]:
    """torch's sampler; the samples of each epoch. `groups`: of places, each of which visits all samples."""
    x, y = data(samples)
    seen: list[list[int]] = []
    with telling(folder) as (_, place):
        group = group_of(groups, None) if groups else default_group()
        model = ringdp.RingDP(net(), process_group=group)
        dataset = TensorDataset(torch.arange(samples))
        sampler = follow(DistributedSampler(dataset, group.size(), group.rank(), seed=2), group)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            seen.append([])
            for number, (mine,) in enumerate(loader):
                if number == 1:
                    faults.at(place, epoch)("forward")
                seen[-1] += mine.tolist()
                (model(x[mine]) - y[mine]).square().mean().backward()
    return seen


def prepared(folder: str, faults: Faults, samples: int, epochs: int) -> list[list[int]]:
    """As `followed`, by `ringdp.prepare`."""
    x, y = data(samples)
    seen: list[list[int]] = []
    with telling(folder) as (_, place):
        model = ringdp.RingDP(net())
        loader = ringdp.prepare(DataLoader(TensorDataset(torch.arange(samples)), batch_size=4, shuffle=True))
        for epoch in range(epochs):
            seen.append([])
            for number, (mine,) in enumerate(loader):
                if number == 1:
                    faults.at(place, epoch)("forward")
                seen[-1] += mine.tolist()
                (model(x[mine]) - y[mine]).square().mean().backward()
    return seen


def lost_when_it_was_made(folder: str) -> list[int]:
    """Rank 0 dies when the samplers have been compared, and the others notice before theirs go on. Returns an epoch's
    samples."""
    x, y = data(48)
    seen: list[int] = []
    compare: Any = getattr(sampler_module, "compare_settings")  # noqa: B009

    def then_lost(*given: Any) -> Any:
        found = compare(*given)
        if place == 0:
            os._exit(9)
        ringdp.metrics.mean(1.0)
        return found

    with telling(folder) as (_, place):
        model = ringdp.RingDP(net(), weight="samples")
        with mock.patch.object(sampler_module, "compare_settings", then_lost):
            sampler = BalancedSampler(48, 12, seed=3, balance="equal")
        sampler.watch(model)
        for mine in sampler:
            seen += mine
            (model(x[mine]) - y[mine]).square().mean().backward()
    return seen
