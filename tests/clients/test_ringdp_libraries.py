# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, call-overload, misc, assignment"
"""What torch ships for DDP, with RingDP: ZeRO, post-local SGD, samplers, Join, fused optimizers.

And every place in torch that asks whether a module is a DistributedDataParallel, with the test that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.both import assert_same
from tests.helpers import need
from tests.train.harness import run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
)
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringdp import RingDP  # noqa: E402

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
Wrapper = Callable[..., Any]


def small_model() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def wrapped(wrapper: Wrapper, **options: Any) -> Any:
    """Several buckets: 0.01 MB is one large layer."""
    return wrapper(small_model(), bucket_cap_mb=0.01, **options)


def batches(count: int) -> Any:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)


def train(model: Any, optimizer: Any, steps: int = 5) -> list[Any]:
    for x, y in batches(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return values(model)


def values(model: Any) -> list[Any]:
    return [p.detach().clone() for p in model.parameters()]


# ZeroRedundancyOptimizer.


def zero(wrapper: Wrapper) -> list[Any]:
    results = []
    for options in ({}, {"parameters_as_bucket_view": True}):
        model = wrapped(wrapper)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)
        results += train(model, optimizer)
        optimizer.consolidate_state_dict(0)
        state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
        results += [state[index]["exp_avg"] for index in sorted(state)]
    return results


def zero_in_hook(wrapper: Wrapper, wrap: Callable[..., Any], shard: bool) -> list[Any]:
    """Steps run in the communication hook; optimizer.step() does nothing. The first two train nothing."""
    model = wrapped(wrapper)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    model.register_comm_hook(None, wrap(default_hooks.allreduce_hook, model, optimizer, shard_buckets=shard))
    start, first = values(model), []
    for index, (x, y) in enumerate(batches(6)):
        model.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if index == 1:
            first = values(model)
    assert all(torch.equal(a, b) for a, b in zip(start, first, strict=True)), "buckets are still being found"
    return values(model)


def zero_over_hook(wrapper: Wrapper) -> list[Any]:
    return zero_in_hook(wrapper, ddp_zero_hook.hook_with_zero_step, False)


def zero_over_sharded_hook(wrapper: Wrapper) -> list[Any]:
    return zero_in_hook(wrapper, ddp_zero_hook.hook_with_zero_step, True)


def zero_over_interleaved_hook(wrapper: Wrapper) -> list[Any]:
    return zero_in_hook(wrapper, ddp_zero_hook.hook_with_zero_step_interleaved, True)


# Averaging from time to time.


def post_local_sgd(wrapper: Wrapper) -> list[Any]:
    from torch.distributed.algorithms.model_averaging import averagers

    model = wrapped(wrapper)
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=3)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    results = train(model, optimizer, 8)
    restored = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.averager.step == 8
    return results


def averaging_tools(wrapper: Wrapper) -> list[Any]:
    from torch.distributed.algorithms.model_averaging import hierarchical_model_averager, utils

    model = wrapped(wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        train(model, optimizer, 3)
    local = values(model)
    utils.average_parameters(iter(model.parameters()), None)
    averaged = values(model)
    assert not torch.equal(local[0], averaged[0])
    with model.no_sync():
        train(model, optimizer, 3)
    utils.average_parameters_or_parameter_groups(optimizer.param_groups, dist.group.WORLD)
    averager = hierarchical_model_averager.HierarchicalModelAverager({2: 2}, warmup_steps=0)
    averager.average_parameters(model.parameters())
    return averaged + values(model)


# Inputs.


def samplers(wrapper: Wrapper) -> list[Any]:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(37, 20, generator=generator), torch.randint(5, (37,), generator=generator))
    sampler: Any = DistributedSampler(data, seed=5)
    model = wrapped(wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):  # 19 samples per rank, the last batch has 3
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return values(model)


def joined(wrapper: Wrapper) -> list[Any]:
    """torch's Join over a wrapper and an optimizer, ranks with 3 and 5 batches."""
    from torch.distributed.algorithms.join import Join

    results = []
    for divide_by_initial in (True, False):
        model = wrapped(wrapper)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
        with Join([model, optimizer], divide_by_initial_world_size=divide_by_initial):
            train(model, optimizer, 3 + 2 * dist.get_rank())
        results += values(model)
    return results


# Optimizers in the hook.


def fused_optimizer(wrapper: Wrapper) -> list[Any]:
    """_register_fused_optim, through torch's _OverlappedOptimizer.register_ddp."""
    model = wrapped(wrapper)
    model._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    for x, y in batches(4):
        nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="must implement method step_param"):
        wrapped(wrapper)._register_fused_optim(torch.optim.Rprop, 0.1)
    return values(model)


CASES: dict[str, Callable[[Wrapper], list[Any]]] = {
    "ZeRO": zero,
    "ZeRO in the hook": zero_over_hook,
    "ZeRO in the hook, sharded": zero_over_sharded_hook,
    "ZeRO in the hook, interleaved": zero_over_interleaved_hook,
    "post-local SGD": post_local_sgd,
    "model averaging": averaging_tools,
    "DistributedSampler": samplers,
    "Join": joined,
    "fused optimizer": fused_optimizer,
}


def every_case() -> dict[str, list[list[Any]]]:
    return {name: [case(RingDP), case(DistributedDataParallel)] for name, case in CASES.items()}


def test_as_with_ddp() -> None:
    """To the bit: with two ranks a sum has one order."""
    start = values(small_model())
    ranks = run_ranks(every_case, backend="ring")
    for rank, results in enumerate(ranks):
        for name, (ours, theirs) in results.items():
            assert_same(ours, theirs, None, f"{name}, rank {rank}")
            assert not torch.equal(ours[0], start[0]), f"{name} trained nothing"


# Who asks isinstance(module, DistributedDataParallel)?

ASKING: dict[str, str] = {
    # torch's file: the test that shows what it does with RingDP
    "nn/parallel/distributed.py": "test_ringdp_libraries.py::joined",  # _DDPJoinHook
    "distributed/checkpoint/state_dict.py": "test_ringdp_checkpoints.py::test_names_have_no_prefix",
    "distributed/pipelining/stage.py": "test_ringdp_hybrid.py::test_wrapped_pipeline_stages_train_as_one_process",
    "_dynamo/convert_frame.py": "test_ringdp_compile.py::test_graphs_are_split_where_buckets_end",  # the active module
    "_dynamo/variables/builder.py": "test_ringdp_compile.py::test_compiled_as_eager",  # a step that closes over it
    "_dynamo/guards.py": "test_ringdp_compile.py::test_guards_on_the_wrapper_are_pickled",
}
_ASKS = re.compile(
    r"(?:isinstance|issubclass)\([^()]*,\s*\(?[^()]*\b(?:DistributedDataParallel|DDP)\b|_get_active_ddp_module\(\)"
)


def test_every_place_that_asks_for_ddp_has_its_test() -> None:
    folder = Path(torch.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        if name.startswith("testing/"):
            continue
        text = path.read_bytes()
        if b"DistributedDataParallel" in text and _ASKS.search(text.decode()):
            found.add(name)
    assert found == set(ASKING)
    for shown in ASKING.values():
        file, function = shown.split("::")
        assert f"def {function}(" in (ROOT / "tests" / "clients" / file).read_text(), shown
