"""Nothing depends on the program's default dtype or device: the same bits as with torch's own, feature by feature."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import need
from tests.train.harness import run_ranks

need("ringdp._C", "ringdp's extension, built with `make build`,")

import ringdp  # noqa: E402
from ringdp import kvstore  # noqa: E402

FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
METHODS = (
    *("int8", "int4", "nf4", "fp16", "topk", "sparse2"),
    *("powersgd", "randomk", "sign", "signsgd", "qsgd", "terngrad"),
)
STEPS = 13  # the report is told after ten


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), **FLOATS)


def network() -> torch.nn.Sequential:
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 48, **FLOATS), torch.nn.BatchNorm1d(48, **FLOATS), torch.nn.Linear(48, 8, **FLOATS)
    )
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=index) / 8)
    return net


def trained(steps: int = 4, **options: Any) -> list[torch.Tensor]:
    rank = dist.get_rank()
    net = network()
    model = ringdp.RingDP(
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) if options.pop("sync", False) else net, **options
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(numbers((8, 24)[rank], 32, seed=100 + 10 * step + rank)).square().mean().backward()
        optimizer.step()
    model.report()
    return [p.detach() for p in net.parameters()]


def chosen() -> list[torch.Tensor]:
    trained(STEPS, compression="auto")
    return []  # which methods follows from times


def hooked() -> list[torch.Tensor]:
    net = network()
    model = torch.nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(None, ringdp.hooks.fp16_hook)
    model(numbers(8, 32, seed=dist.get_rank())).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def stored() -> list[torch.Tensor]:
    net = network()
    trainer = kvstore.Trainer(net, torch.optim.SGD, {"lr": 0.1})
    net(numbers(8, 32, seed=dist.get_rank())).square().mean().backward()
    trainer.step(2)
    return [p.detach() for p in net.parameters()]


def rounds(**options: Any) -> list[torch.Tensor]:
    net = network()
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    average = ringdp.DiLoCo(net, inner, every=4, **options)
    for step in range(8):
        net(numbers(8, 32, seed=100 + 10 * step + dist.get_rank())).square().mean().backward()
        inner.step()
        inner.zero_grad()
    average.finish()
    average.state_dict(consolidated=True)
    return [p.detach() for p in net.parameters()]


def means() -> list[torch.Tensor]:
    rank = dist.get_rank()
    told = [ringdp.metrics.mean(0.1 + 0.2 * rank, weight=3.0), ringdp.metrics.mean(0.1 * rank)]
    return [
        torch.tensor(told, dtype=torch.float64, device="cpu"),
        ringdp.metrics.mean(numbers(3, seed=rank), weight=rank + 1),
    ]


def sampled() -> list[torch.Tensor]:
    data = torch.utils.data.TensorDataset(torch.ones(64, 1, **FLOATS))
    batches = [list(batch) for batch in ringdp.data.BalancedSampler(data, global_batch=8, balance="equal")]
    return [torch.tensor(batches, dtype=torch.int64, device="cpu")]


def checkpointed() -> list[torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        ringdp.checkpoint.save(folder, 1, {"x": numbers(3, seed=1)}, ringdp.checkpoint.rng_state())
        dist.barrier()
    return []


def embedded() -> list[torch.Tensor]:
    table = ringdp.nn.ShardedEmbedding(50, 4, optimizer="adagrad", lr=0.1, dtype=torch.float32)
    ids = torch.tensor([[1, 2], [3, 49]], dtype=torch.int64, device="cpu") - dist.get_rank()
    found = []
    for _ in range(2):
        out = table(ids)
        out.square().sum().backward()
        found.append(out.detach())
    return found


TRIALS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "exact": lambda: trained(STEPS),
    "samples": lambda: trained(weight="samples"),
    "guard": lambda: trained(guard=2),
    "sync": lambda: trained(sync=True),
    "reproducible": lambda: trained(reproducible=True),
    **{method: lambda method=method: trained(compression=method) for method in METHODS},  # type: ignore[misc]
    "DiLoCo": rounds,
    "DiLoCo int4": lambda: rounds(compression="int4"),
    "metrics.mean": means,
    "sampler": sampled,
    "checkpoint": checkpointed,
    "embedding": embedded,
    "auto": chosen,
    "hook": hooked,
    "kvstore": stored,
}


@contextlib.contextmanager
def defaults(name: str) -> Iterator[None]:
    if name == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def results() -> dict[str, list[torch.Tensor] | str]:
    found: dict[str, list[torch.Tensor] | str] = {}
    for name, trial in TRIALS.items():
        try:
            found[name] = [one.clone() for one in trial()]
        except Exception as error:  # the others are tried, too
            found[name] = f"{type(error).__name__}: {error}"
    return found


def the_same_bits_with_another_default() -> None:
    torch.manual_seed(0)
    wanted = results()
    wrong = {("none", trial): one for trial, one in wanted.items() if isinstance(one, str)}
    for name in ("float64", "bfloat16", "meta"):
        with defaults(name):
            torch.manual_seed(0)
            got = results()
        for trial, one in got.items():
            before = wanted[trial]
            if isinstance(one, str) or isinstance(before, str):
                wrong[name, trial] = str(one)
            elif not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, before, strict=True)):
                wrong[name, trial] = "other bits"
    assert wrong == {}


def test_the_same_bits_with_another_default() -> None:
    run_ranks(the_same_bits_with_another_default, backend="ring")
