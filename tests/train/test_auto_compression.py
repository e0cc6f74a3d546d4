"""compression="auto" on real ranks: it compresses where the network is slow, loses nothing when it changes its mind."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringdp import Compression
from ringdp.compression import Auto
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.hooks import ddp_hook
from tests.train import compressed_training as training
from tests.train.given_gradients import Given, hash_of, noise
from tests.train.harness import each, run_ranks, same_everywhere

SHAPES = {"first": (40, 50), "bias": (30,), "second": (70, 33), "third": (1500,)}


@contextlib.contextmanager
def network(folder: Path, mbit: int) -> Iterator[None]:
    """A group whose ranks are connected by a network that slow."""
    with mock.patch.dict(os.environ, RINGDP_TRANSPORT="tcp", RINGDP_RATE=f"{mbit}mbit"):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("ring", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
        yield
        dist.destroy_process_group()


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 400), nn.ReLU(), nn.Linear(400, 10))


def train(model: nn.Module, steps: int) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step in range(steps):
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seen.append(training.digest(model.parameters()))
    return seen


def on_a_slow_link(folder: Path) -> Any:
    with network(folder, 100), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model = RingDP(large(), compression="auto", bucket_cap_mb=0.5)
        seen = train(model, 12)
        stats = model.compression_stats()
    return seen, [(one.step, one.reason) for one in stats.decisions], stats.parameters


def test_a_slow_link_is_noticed_and_all_ranks_do_the_same(tmp_path: Path) -> None:
    results = run_ranks(on_a_slow_link, tmp_path, world_size=2, backend=None)
    assert results[0] == results[1]
    _, decisions, parameters = results[0]
    assert decisions, "nothing was decided"
    assert "instead of exact for all buckets" in decisions[0][1]
    assert parameters["0.bias"] == "exact"
    assert "auto: int8" in parameters.values()


def in_a_host_it_is_exact_to_the_bit() -> None:
    model = RingDP(large(), compression="auto")
    assert train(model, 3) == train(RingDP(large()), 3)
    reasons = [it.reason for it in model.compression_stats().decisions]
    assert reasons == ["exact: all ranks share memory, nothing crosses a network"]


def force(model: RingDP, level: str) -> None:
    """Whatever the tuner says: from the next forward on all buckets that it could choose for get that level."""
    auto = model.ringdp_features[GradientCompression].attached("test").auto
    assert auto is not None

    def before_forward() -> None:
        auto._begin_again(model.reducer.plan.layout())
        auto._apply(tuple(level if row["free"] else "exact" for row in model.reducer.report.bucket_rows()))

    auto.before_forward = before_forward  # type: ignore[method-assign]


def forced(folder: Path, allow: str, plan: list[str], *, bad_step: int | None = None) -> None:
    with network(folder, 10_000):
        run_plan(allow, plan, bad_step)


def run_plan(allow: str, plan: list[str], bad_step: int | None) -> None:
    """Each step's buckets all get that step's level; the last is exact. What arrived adds up to the exact means."""
    model = RingDP(Given(SHAPES), compression=Compression("auto", allow=allow))
    arrived = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    wanted = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step, level in enumerate(plan):
        force(model, level)
        gradients = noise(SHAPES, dist.get_rank(), step)
        if step == bad_step and dist.get_rank() == 1:
            gradients["second"][3, 3] = torch.inf
        model.zero_grad()
        model(gradients).backward()
        means = {name: parameter.grad for name, parameter in model.module.named_parameters()}
        assert same_everywhere(hash_of(means))
        if step == bad_step:
            continue
        for rank in range(dist.get_world_size()):
            for name, gradient in noise(SHAPES, rank, step).items():
                wanted[name] += gradient / dist.get_world_size()
        for name, mean in means.items():
            arrived[name] += mean
    for name in SHAPES:
        torch.testing.assert_close(arrived[name], wanted[name], rtol=0, atol=0.02 if "bf16" in plan else 1e-4)


PLANS = {
    "4bit": ["int4", "int4", "int8", "int4", "bf16", "exact", "int4", "exact"],
    "aggressive": ["topk", "topk", "int4", "topk", "exact", "topk", "int8", "topk", "exact"],
}


@pytest.mark.parametrize("allow", PLANS)
def test_nothing_is_lost_when_the_code_changes(allow: str, tmp_path: Path) -> None:
    run_ranks(forced, tmp_path, allow, PLANS[allow], world_size=3, backend=None)


def test_an_overflow_in_the_step_that_pays_takes_nothing_away(tmp_path: Path) -> None:
    run_ranks(forced, tmp_path, "4bit", ["int4", "int4", "exact", "exact"], bad_step=2, world_size=2, backend=None)


def a_checkpoint_has_what_is_owed(folder: Path) -> None:
    with network(folder, 10_000):
        model = RingDP(Given(SHAPES), compression=Auto("aggressive"))
        force(model, "topk")
        for step in range(3):
            model.zero_grad()
            model(noise(SHAPES, dist.get_rank(), step)).backward()
        state = model.compression_state_dict()
        assert float(state["ranks"][str(dist.get_rank())]["first"]["residual"].abs().sum()) > 1
        again = RingDP(Given(SHAPES), compression=Auto("aggressive"))
        again.load_compression_state_dict(state)
        model.zero_grad()
        went_on = noise(SHAPES, dist.get_rank(), 3)
        force(model, "exact")
        model(went_on).backward()
        again(went_on).backward()
        assert hash_of({n: p.grad for n, p in model.named_parameters() if p.grad is not None}) == hash_of(
            {n: p.grad for n, p in again.named_parameters() if p.grad is not None}
        )


def test_a_checkpoint_has_what_is_owed_whoever_owes_it(tmp_path: Path) -> None:
    run_ranks(a_checkpoint_has_what_is_owed, tmp_path, world_size=2, backend=None)


def what_cannot_be_chosen_is_refused() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("exact, near, 4bit, aggressive", {"compression": Compression("auto", allow="everything")}),
        ("'int8'", {"compression": Compression("int8", allow="near")}),
        ("Auto\\(allow='4bit'\\)", {"compression": Compression(Auto("near"), [("0.*", Auto("4bit"))])}),
        ("gloo", {"compression": "auto"}),
    ]
    for words, arguments in wrong:
        with pytest.raises(InvalidArgumentError, match=words):
            RingDP(large(), **arguments)
    with pytest.raises(InvalidArgumentError, match="RingDP"):
        ddp_hook("auto")


def test_what_cannot_be_chosen_is_refused() -> None:
    run_ranks(what_cannot_be_chosen_is_refused, world_size=2, backend="gloo")


def ranks_that_allow_different_things_are_told() -> None:
    with pytest.raises(MismatchError) as caught:
        RingDP(large(), compression=Compression("auto", allow=["near", "4bit"][dist.get_rank()]))
    assert "Auto(allow='near')" in str(caught.value)
    assert "Auto(allow='4bit')" in str(caught.value)


def test_two_ranks_of_a_host() -> None:
    run_ranks(each, in_a_host_it_is_exact_to_the_bit, ranks_that_allow_different_things_are_told, backend="ring")
