"""RingDP(bucket_cap_mb="auto") on real ranks: all take the same layouts, gradients stay what they are, refusals."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join

from ringdp.ddp import bucket_layout, layout_trial
from ringdp.diagnosis.window import Window
from ringdp.errors import InvalidArgumentError, MismatchError
from tests.helpers import logged
from tests.train.harness import RankFailed, default_group, ring_is_built, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
CAP_MB = 0.02  # in place of the default, so that a small model has several buckets
STEPS = 40  # until all is decided
SHORT: Any = {"BLOCK_STEPS": 2, "_ROUNDS": 2, "_PAIRS": 2, "_PAIRS_WON": 2}  # of ringdp.ddp.layout_trial


class Net(nn.Module):
    """Eight layers of 16 KiB, the last of which some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.sleep_s = 0.0
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sleep_s)
        for layer in list(self.layers)[: 7 if self.skips else 8]:
            x = torch.tanh(layer(x))
        return x


@contextlib.contextmanager
def small_buckets(cost: Callable[[int], float] | None = None) -> Iterator[dict[int, int]]:
    """By step, how many buckets it had, to be filled in; `cost` of so many is taken for what ranks have measured."""
    had: dict[int, int] = {}

    def told(window: Window, last: int) -> dict[int, float]:
        assert cost is not None
        return {step: cost(had[step]) for step in range(last - window.rows.shape[1] + 1, last + 1)}

    with mock.patch("ringdp.ddp.wrapper.default_cap_mb", return_value=CAP_MB), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(layout_trial, **SHORT))
        stack.enter_context(mock.patch.dict(os.environ, {"RINGDP_REPORT_EVERY": "4"}))
        if cost is not None:
            stack.enter_context(mock.patch.object(bucket_layout, "costs_of", told))
        yield had


def made(**options: Any) -> tuple[Any, Any, Net]:
    import ringdp

    torch.manual_seed(0)
    net = Net()
    model = ringdp.RingDP(net, **{"bucket_cap_mb": "auto", **options})
    return model, torch.optim.SGD(model.parameters(), 0.05), net


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: Any, optimizer: Any, had: dict[int, int], steps: int = STEPS, micro: int = 1) -> None:
    for _ in range(steps):
        step = model.stats().steps + 1
        optimizer.zero_grad()
        for part in range(micro):
            with model.no_sync() if part < micro - 1 else contextlib.nullcontext():
                (model(batch(step, dist.get_rank())).square().mean() / micro).backward()
        had[step] = len(model.reducer.layout())
        optimizer.step()


def parameters(model: Any) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def fewer(buckets: int) -> float:
    return 1.0 + 0.1 * buckets


def more(buckets: int) -> float:
    return 2.0 - 0.05 * buckets


def choose() -> list[Any]:
    found: list[Any] = []
    for cost in (fewer, more, lambda _: 1.0):
        with small_buckets(cost) as had, logged("ringdp.bucket_layout", logging.INFO) as lines:
            model, optimizer, _ = made()
            train(model, optimizer, had)
            found.append((had, model.stats().layout, model.report().layout, lines, str(model.report())))
    return found


def test_the_fastest_is_kept_on_all_ranks_and_said_once() -> None:
    ranks = run_ranks(choose, world_size=3, backend="ring")
    for rank, found in enumerate(ranks):
        for (had, stats, report, lines, text), (buckets, word) in zip(
            found, [(1, "one bucket"), (8, "a quarter"), (4, "the default size")], strict=True
        ):
            assert had[STEPS] == buckets, text
            assert stats == report
            assert stats.startswith(f'bucket_cap_mb="auto": {word}')
            assert stats in text
            assert len(lines) == (rank == 0), lines
            assert all(stats in line and line.startswith("step ") for line in lines)


def measure_differently() -> list[Any]:
    """Rank 0 sleeps where there are few buckets, rank 1 where there are many: what each would choose alone differs."""
    with small_buckets() as had:
        model, optimizer, net = made()
        for _ in range(STEPS):
            net.sleep_s = 2e-3 * ((len(model.reducer.layout()) > 2) == default_group().rank())
            train(model, optimizer, had, steps=1)
        return [had, model.stats().layout, parameters(model)]


def test_ranks_that_measure_differently_have_the_same_layout_in_every_step() -> None:
    first, second = run_ranks(measure_differently, world_size=2, backend="ring")
    assert first[0] == second[0]
    assert len(set(first[0].values())) == 4
    assert first[1] == second[1]
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


def alone(steps: int, ranks: int) -> list[Tensor]:
    """One process with all ranks' batches."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for rank in range(ranks):
            (net(batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
    return parameters(net)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reproducible": {"reproducible": True},
    "own memory": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "weights": {"weight": "samples"},
    "bf16": {"compression": "bf16"},
}


def compare(name: str, hook: bool, micro: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], set[int]]:
    with small_buckets(fewer) as had:
        model, optimizer, _ = made(**OPTIONS[name])
        other, others_optimizer, _ = made(**OPTIONS[name], bucket_cap_mb=0.005)
        if hook:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        train(model, optimizer, had, micro=micro)
        train(other, others_optimizer, {}, micro=micro)
        return parameters(model), parameters(other), alone(STEPS, dist.get_world_size()), set(had.values())


@pytest.mark.parametrize(
    ("name", "hook", "micro"), [*((name, False, 1) for name in OPTIONS), ("plain", True, 1), ("reproducible", False, 3)]
)
def test_gradients_stay_what_they_are(name: str, hook: bool, micro: int) -> None:
    for ours, fixed, one_process, sizes in run_ranks(compare, name, hook, micro, world_size=3, backend="ring"):
        assert len(sizes) == 4
        for a, b, c in zip(ours, fixed, one_process, strict=True):
            if name == "reproducible":
                assert torch.equal(a, b)
            torch.testing.assert_close(
                a, c, rtol=0.05 if name == "bf16" else 1e-4, atol=1e-2 if name == "bf16" else 1e-5
            )


def join_in_the_middle(before: int) -> tuple[int, str, list[Tensor]]:
    with small_buckets(fewer) as had:
        model, optimizer, _ = made()
        train(model, optimizer, had, steps=before)
        with Join([model]):
            for step in range(5 + 4 * default_group().rank()):
                optimizer.zero_grad()
                model(batch(step, default_group().rank())).square().mean().backward()
                optimizer.step()
        layout = len(model.reducer.layout())
        for step in range(30):
            optimizer.zero_grad()
            model(batch(step, default_group().rank())).square().mean().backward()
            optimizer.step()
        return layout, model.stats().layout, parameters(model)


@pytest.mark.parametrize(("before", "buckets"), [(1, 4), (6, 4), (14, 4), (25, 4), (STEPS, 1)])
def test_a_join_ends_the_trial_with_the_default_and_keeps_what_is_decided(before: int, buckets: int) -> None:
    first, second = run_ranks(join_in_the_middle, before, world_size=2, backend="ring")
    assert first[0] == second[0] == buckets
    assert first[1] == second[1]
    assert ("steps under torch's Join are not compared" in first[1]) == (buckets == 4)
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


def change_in_the_middle(before: int) -> list[Any]:
    with small_buckets(fewer) as had:
        model, optimizer, net = made()
        train(model, optimizer, had, steps=before)
        net.layers[0].requires_grad_(False)
        train(model, optimizer, had, steps=5)
        at_first = had[before + 1]
        train(model, optimizer, had)
        model.set_compression("bf16")
        train(model, optimizer, had, steps=2)
        with_codes = model.stats().layout
        train(model, optimizer, had)
        copied = copy.deepcopy(model)
        train(copied, torch.optim.SGD(copied.parameters(), 0.05), {}, steps=3)
        return [at_first, with_codes, model.stats().layout, copied.stats().layout, parameters(model)]


@pytest.mark.parametrize("before", [7, 25, STEPS])
def test_other_parameters_or_compression_begin_it_again(before: int) -> None:
    first, second = run_ranks(change_in_the_middle, before, world_size=2, backend="ring")
    assert first[:4] == second[:4]
    assert first[0] == 4  # the default
    assert "sizes are tried after the first steps" in first[1] or "sizes are being tried" in first[1]
    assert "one bucket" in first[2]
    assert "sizes are" in first[3]
    assert all(torch.equal(a, b) for a, b in zip(first[4], second[4], strict=True))


def refuse(what: str) -> str:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(InvalidArgumentError) if what != "ranks" else contextlib.nullcontext())
        caught = None
        try:
            if what == "report":
                with mock.patch.dict(os.environ, {"RINGDP_REPORT_EVERY": "0"}):
                    made()
            elif what == "elastic":
                with mock.patch("ringdp.ddp.elastic.steps_are_repaired", return_value=True):
                    made()
            elif what == "codes":
                made(compression="auto")
            elif what == "later":
                made()[0].set_compression("auto")
            elif what == "hook":
                made()[0].register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
            elif what == "list":
                made(bucket_cap_mb_list=[1, 2])
            elif what == "word":
                made(bucket_cap_mb="big")
            else:
                made()
        except InvalidArgumentError as error:
            caught = str(error)
            raise
    return str(caught)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("report", "another RINGDP_REPORT_EVERY than 0"),
        ("elastic", 'RINGDP_ELASTIC=1: bucket_cap_mb="auto" is not there in an elastic job yet'),
        ("codes", 'compression="auto" do not go together'),
        ("later", 'compression="auto" do not go together'),
        ("hook", "powerSGD_hook may keep state by the number or the size of a bucket"),
        ("list", 'bucket_cap_mb="auto" and bucket_cap_mb_list'),
        ("word", "a number above zero, a list of them, or \"auto\", not 'big'"),
        ("gloo", "needs the backend ring and parameters on the CPU; this module's are on cpu, averaged by gloo"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(what: str, words: str) -> None:
    for text in run_ranks(refuse, what, world_size=2, backend="gloo" if what == "gloo" else "ring"):
        assert words in text


def differ() -> None:
    made(bucket_cap_mb="auto" if default_group().rank() else 4)


def test_ranks_that_ask_for_different_things_are_told_so() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(differ, world_size=2, backend="ring")
    assert all(isinstance(one.error, MismatchError) for one in caught.value.outcomes)
    assert "bucket_cap_mb" in str(caught.value)


def one_rank() -> str:
    with small_buckets() as had:
        model, optimizer, _ = made()
        train(model, optimizer, had, steps=20)
        return str(model.stats().layout)


def test_a_rank_alone_has_nothing_to_choose() -> None:
    assert run_ranks(one_rank, world_size=1, backend="ring") == [""]
