"""A rank is killed in the middle of training with unequal batches: no step counts twice or is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.errors import PeerLostError
from tests.helpers import need
from tests.train.harness import run_outcomes, run_ranks

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.ci

SAMPLES, BATCH, EPOCHS = 57, 10, 2
STEPS = EPOCHS * -(-SAMPLES // BATCH)  # the last of an epoch is short
WHERE = ("before forward", "in forward", "between micro-batches", "in backward", "after the optimizer")


@dataclass(frozen=True)
class Plan:
    """Of one job.

    Attributes:
        shares: of each rank in a batch; one of next to nothing gets empty ones.
        cuts: where each rank's batch is cut into micro-batches, from 0 to 1.
        victim: the rank that is killed; None: all live.
        step: in which.
        where: in that step, of `WHERE`.
    """

    shares: tuple[float, ...]
    cuts: tuple[float, ...] = ()
    victim: int | None = None
    step: int = 0
    where: str = ""


@dataclass
class Story:
    """What a rank that lives has seen.

    Attributes:
        taken: its samples of each step whose backward was begun.
        states: after 0, 1, … steps.
        lost: the rank that its error names.
    """

    taken: list[list[int]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    lost: int | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.dies = False

    def forward(self, x: Tensor) -> Tensor:
        if self.dies:
            die()
        return self.layers(x)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True).tanh()


def train(plan: Plan, state: dict[str, Any] | None = None) -> Story:
    import ringdp

    x, y = data()
    net = Net()
    model = ringdp.RingDP(net, weight="samples")
    sampler = ringdp.data.BalancedSampler(SAMPLES, BATCH, balance=plan.shares, limits=ringdp.data.Limits(0))
    sampler.watch(model, forwards=1 + len(plan.cuts))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    if state is not None:
        sampler.load_state_dict(state["sampler"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    story = Story(states=[] if state is None else [state])

    def remember() -> None:
        model_state = {name: value.clone() for name, value in model.state_dict().items()}
        momenta = {key: dict(value) for key, value in optimizer.state_dict()["state"].items()}
        for one in momenta.values():
            one["momentum_buffer"] = one["momentum_buffer"].clone()
        saved = {"state": momenta, "param_groups": optimizer.state_dict()["param_groups"]}
        story.states.append({"sampler": sampler.state_dict(), "model": model_state, "optimizer": saved})

    if state is None:
        remember()
    is_victim = plan.victim == dist.get_rank()
    try:
        while sampler.state_dict()["epoch"] < EPOCHS:
            for batch in sampler:
                dies = is_victim and len(story.taken) == plan.step
                step(model, x[batch], y[batch], plan.cuts, plan.where if dies else "")
                optimizer.step()
                optimizer.zero_grad()
                if dies:
                    die()
                story.taken.append(batch)
                remember()
    except PeerLostError as error:
        story.lost = error.peer
    return story


def step(model: Any, x: Tensor, y: Tensor, cuts: tuple[float, ...], dies: str) -> None:
    if dies == "before forward":
        die()
    places = [0, *sorted(int(cut * len(x)) for cut in cuts), len(x)]
    for number, (begin, end) in enumerate(itertools.pairwise(places)):
        last = number == len(cuts)
        model.module.dies = dies == "in forward" and last
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x[begin:end]), y[begin:end])
            if dies == "in backward" and last:
                model.module.layers[2].weight.register_hook(lambda _: die())
            loss.backward()
        if dies == "between micro-batches" and not last:
            die()


def alone() -> tuple[list[list[int]], list[list[Tensor]]]:
    """One process: its batches, and its weights after 0, 1, … steps."""
    from ringdp.data.order import GlobalBatches

    (x, y), net, batches = data(), Net(), GlobalBatches(SAMPLES, BATCH)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    taken, weights = [], [[p.detach().clone() for p in net.parameters()]]
    for epoch in range(EPOCHS):
        order = batches.order(epoch)
        for position in range(batches.count):
            batch = batches.batch(order, position)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[batch]), y[batch]).backward()
            optimizer.step()
            taken.append(batch)
            weights.append([p.detach().clone() for p in net.parameters()])
    return taken, weights


def close(state: dict[str, Any], weights: list[Tensor]) -> None:
    for ours, theirs in zip(state["model"].values(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def check(plan: Plan, after: Plan) -> None:
    taken, weights = alone()
    outcomes = run_outcomes(train, plan, world_size=len(plan.shares), backend="ring", timeout_s=50)
    lived = [one for one in outcomes if one.rank != plan.victim]
    assert [one.text for one in lived if one.text] == []
    stories: list[Story] = [one.value for one in lived]
    for story in stories:
        assert story.lost == plan.victim
        for number, state in enumerate(story.states):
            close(state, weights[number])  # each step that counted had every sample once, also the victim's
        for part, whole in zip(story.taken, taken, strict=False):
            assert set(part) <= set(whole)
    # A step may have ended on some ranks and not on others: what all have is where they go on.
    done = min(len(story.states) for story in stories) - 1
    assert plan.step - 1 <= done <= plan.step + 1
    assert stories[0].states[done]["sampler"] == stories[-1].states[done]["sampler"]
    again: list[Story] = run_ranks(
        train, after, stories[0].states[done], world_size=len(after.shares), backend="ring", timeout_s=50
    )
    together = [
        [sample for part in parts for sample in part] for parts in zip(*(one.taken for one in again), strict=True)
    ]
    assert together == taken[done:]
    for story in again:
        assert story.lost is None
        close(story.states[-1], weights[STEPS])


shares = st.floats(0.2, 4.0)


@given(st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_death(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 4))
    cuts = data.draw(st.lists(st.floats(0, 1), max_size=2).map(tuple))
    plan = Plan(
        shares=tuple(data.draw(st.lists(shares, min_size=ranks, max_size=ranks))),
        cuts=cuts,
        victim=data.draw(st.integers(0, ranks - 1)),
        step=data.draw(st.integers(0, STEPS - 2)),
        where=data.draw(st.sampled_from([one for one in WHERE if cuts or one != "between micro-batches"])),
    )
    after = data.draw(st.lists(shares, min_size=1, max_size=4))
    check(plan, Plan(shares=tuple(after), cuts=cuts))


@pytest.mark.parametrize("where", WHERE)
def test_each_place(where: str) -> None:
    check(
        Plan(shares=(1.0, 3.0, 0.01), cuts=(0.4,), victim=1, step=7, where=where), Plan(shares=(1.0, 2.0), cuts=(0.7,))
    )
