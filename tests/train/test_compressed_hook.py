"""Compressing hooks on torch's DDP: the same bits on all ranks and in the simulation, overflow, checkpoints, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringdp.hooks import ddp_hook
from ringdp.testing import Simulation, simulate
from tests.train.compressed import COMPRESSORS, build, digest, loss_of, wrapped
from tests.train.harness import backends, run_ranks

pytestmark = pytest.mark.parametrize("backend", backends())

COMPRESSED = ("0.weight", "2.weight")  # the others are exact by default


def trained(name: str, steps: int, overflow_at: int | None = None) -> list[dict[str, Any]]:
    """By step: every parameter's own and averaged gradient, and the parameters' digest."""
    model, rank = build(), dist.get_rank()
    ddp = wrapped(model)
    alone = build()
    hook, function = ddp_hook(COMPRESSORS[name], model=ddp)
    ddp.register_comm_hook(hook, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        overflow = step == overflow_at and rank == dist.get_world_size() - 1
        alone.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(ddp, step, rank, overflow=overflow).backward()
        loss_of(alone, step, rank, overflow=overflow).backward()
        averaged = {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        own = {n: p.grad.clone() for n, p in alone.named_parameters()}  # type: ignore[union-attr]
        if step != overflow_at:
            optimizer.step()
        seen.append({"own": own, "averaged": averaged, "digest": digest(model.parameters())})
    return seen


def check_bits(compressor: Any, ranks: list[list[dict[str, Any]]]) -> None:
    """All ranks agree in every step, and are where the simulation is."""
    world = len(ranks)
    for step, seen in enumerate(zip(*ranks, strict=True)):
        assert len({it["digest"] for it in seen}) == 1, step
        assert len({digest(it["averaged"].values()) for it in seen}) == 1, step
    for name in ranks[0][0]["own"]:
        if name in COMPRESSED:
            before: Simulation | None = None
            for step in range(len(ranks[0])):
                before = simulate(compressor, [it[step]["own"][name] for it in ranks], world, name=name, after=before)
                torch.testing.assert_close(
                    ranks[0][step]["averaged"][name], before.mean, rtol=0, atol=0, equal_nan=True, msg=f"{name} {step}"
                )
        else:
            for step in range(len(ranks[0])):
                mean = sum(it[step]["own"][name].double() for it in ranks) / world
                torch.testing.assert_close(ranks[0][step]["averaged"][name].double(), mean, equal_nan=True)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_all_ranks_have_the_bits_of_the_simulation(backend: str, name: str) -> None:
    # Two ranks where the order of a sum of floats is the backend's.
    world = 2 if name == "folded" else 3
    check_bits(COMPRESSORS[name], run_ranks(trained, name, 4, world_size=world, backend=backend))


@pytest.mark.parametrize(
    "world", [2, 4, pytest.param(5, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["int4", "large"])
def test_in_other_worlds(backend: str, name: str, world: int) -> None:
    check_bits(COMPRESSORS[name], run_ranks(trained, name, 3, world_size=world, backend=backend, timeout_s=100))


@pytest.mark.parametrize("name", ["int8", "int4 EF21", "steps", "gathered", "large", "folded", "rounded"])
def test_an_overflow_on_one_rank_is_seen_by_all_and_leaves_no_trace(backend: str, name: str) -> None:
    world = 2
    ranks = run_ranks(trained, name, 4, 1, world_size=world, backend=backend)
    for seen in ranks:
        for parameter in COMPRESSED:
            assert not seen[1]["averaged"][parameter].isfinite().any()
            assert seen[2]["averaged"][parameter].isfinite().all()
    check_bits(COMPRESSORS[name], ranks)
