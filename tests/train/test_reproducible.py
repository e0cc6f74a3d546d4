"""RingDP(reproducible=True): gradients and losses have the same bits for any buckets, transports and hosts."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _MixedPrecision

from ringdp import Compression
from ringdp.compression.methods.power_sgd import PowerSGD
from ringdp.compression.methods.top_k import TopK
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, MismatchError
from tests.helpers import need
from tests.train.harness import RankFailed, default_group, on_ranks, run_ranks

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

STEPS = 3


@dataclass(frozen=True)
class Layout:
    """What may not show: the host of each rank, what carries the bytes, and how gradients are laid out."""

    hosts: str = "aaaa"
    transport: str = "auto"
    bucket_cap_mb: Any = 25
    options: Mapping[str, Any] = field(default_factory=dict)


# Each axis at several values, and all of them at once.
GRID = [
    Layout(),
    Layout(transport="tcp", bucket_cap_mb=0.05),
    Layout(bucket_cap_mb=[0.001, 0.2, 0.03], options={"gradient_as_bucket_view": False}),
    Layout(hosts="aabb", bucket_cap_mb=0.3),
    Layout(hosts="abab", options={"find_unused_parameters": True}),
    Layout(hosts="abcd", bucket_cap_mb=0.0001),
    Layout(hosts="aaab", transport="tcp", bucket_cap_mb=0.4, options={"gradient_pool": False}),
]


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 130), nn.LayerNorm(130), nn.Linear(130, 9))
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(rows, 64, generator=seed).to(dtype), torch.randn(rows, 9, generator=seed).to(dtype)


def plain(model: RingDP, step: int, dtype: torch.dtype) -> list[Tensor]:
    x, y = batch(step, 8, dtype)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return [loss.detach()]


def weighted(model: RingDP, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Unequal micro-batches of unequal ranks, one of which has none."""
    losses = []
    for micro in range(2):
        with contextlib.nullcontext() if micro else model.no_sync():
            x, y = batch(10 * step + micro, 0 if dist.get_rank() == 2 else 3 + 2 * dist.get_rank() + micro, dtype)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.detach())
    return losses


def scaled(model: RingDP, step: int, dtype: torch.dtype) -> list[Tensor]:
    """With a loss scale that overflows once."""
    x, y = batch(step, 8, dtype)
    loss = nn.functional.mse_loss(model(x), y)
    (loss * (float("inf") if step == 1 and dist.get_rank() == 1 else 1024.0)).backward()
    return [loss.detach()]


def joined(model: RingDP, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Rank r has r + 1 batches of its own."""
    losses = []
    with Join([model]):
        for number in range(dist.get_rank() + 1):
            model.zero_grad()
            losses += plain(model, 10 * step + number, dtype)
    return losses


def compiled(model: RingDP, step: int, dtype: torch.dtype) -> list[Tensor]:
    """One graph, whatever the buckets are (docs/how-to/reproducible.md)."""
    with torch._dynamo.config.patch(optimize_ddp=False):
        return plain(torch.compile(model, backend="aot_eager"), step, dtype)  # type: ignore[arg-type]


def autocast(model: RingDP, step: int, dtype: torch.dtype) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, step, dtype)


STEPS_OF = (plain, weighted, scaled, joined, compiled, autocast)
STEP_OF: dict[str, Callable[[RingDP, int, torch.dtype], list[Tensor]]] = {step.__name__: step for step in STEPS_OF}


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def curve(dtype: torch.dtype, kind: str, options: Mapping[str, Any]) -> list[str]:
    """Of each step: this rank's losses and the gradients, hashed."""
    model = RingDP(net(dtype), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    digests = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = STEP_OF[kind](model, step, dtype)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        digests.append(digest([*losses, *gradients]))
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            optimizer.step()
    return digests


def curves(folder: str, layouts: Sequence[Layout], dtype: torch.dtype, kind: str, options: Any) -> list[list[str]]:
    """One for each layout, each in a job of its own."""
    rank, found = int(os.environ["RANK"]), []
    for number, layout in enumerate(layouts):
        environ = {"RINGDP_HOST_ID": layout.hosts[rank], "RINGDP_TRANSPORT": layout.transport}
        with mock.patch.dict(os.environ, environ):
            dist.init_process_group(
                "ring", init_method=f"file://{folder}/job{number}", rank=rank, world_size=len(layout.hosts)
            )
        all_options = {"bucket_cap_mb": layout.bucket_cap_mb, **layout.options, **options}
        found.append(curve(dtype, kind, all_options))
        dist.barrier()
        dist.destroy_process_group()
    return found


def differing(tmp_path: Path, layouts: Sequence[Layout], dtype: torch.dtype, kind: str, **options: Any) -> list[Layout]:
    """The layouts whose curve is not the first one's."""
    size = len(layouts[0].hosts)
    options = {"reproducible": True, **options}
    by_rank = run_ranks(curves, str(tmp_path), list(layouts), dtype, kind, options, world_size=size, backend=None)
    for each in by_rank:
        assert len({tuple(one) for one in each}) == len({tuple(one) for one in by_rank[0]})
    return [layout for layout, found in zip(layouts, by_rank[0], strict=True) if found != by_rank[0][0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    assert differing(tmp_path, GRID if dtype == torch.float32 else GRID[1:6:2], dtype, "plain") == []


def test_the_default_shows_them(tmp_path: Path) -> None:
    """The curves are long enough to tell."""
    assert differing(tmp_path, GRID[:4], torch.float32, "plain", reproducible=False)
    assert differing(tmp_path / "..", GRID[:4], torch.float32, "plain", reproducible=False, compression="int8")


@pytest.mark.parametrize("compression", ["int8", "int4", "bf16", "fp16"])
def test_codecs_of_the_core(tmp_path: Path, compression: str) -> None:
    layouts = GRID if compression == "int8" else GRID[1:6:2]
    assert differing(tmp_path, layouts, torch.float32, "plain", compression=compression) == []


ONE_OF_EACH_KIND = [TopK(0.1), PowerSGD(2), "signsgd"]
OTHERS = [pytest.param(name, marks=pytest.mark.ci) for name in ("randomk", "sign", "qsgd", "terngrad")]


@pytest.mark.parametrize("compression", [*ONE_OF_EACH_KIND, *OTHERS], ids=str)
def test_compressors_in_python(tmp_path: Path, compression: Any) -> None:
    assert differing(tmp_path, GRID[1:6:2], torch.float32, "plain", compression=compression) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("weighted", {"weight": "samples"}, marks=pytest.mark.ci),
        ("weighted", {"weight": "samples", "compression": "int8"}),
        pytest.param("scaled", {}, marks=pytest.mark.ci),
        ("scaled", {"compression": Compression("int4", warmup_steps=1)}),
        pytest.param("joined", {}, marks=pytest.mark.ci),
        ("joined", {"weight": "samples", "compression": "int8"}),
        ("plain", {"static_graph": True}),
        ("plain", {"reduce_dtype": torch.float64, "guard": 1}),
        ("plain", {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
        ("plain", {"compression": Compression(rules=[("0.*", "int8"), ("2.*", "bf16")])}),
        pytest.param("compiled", {}, marks=pytest.mark.ci),
        ("compiled", {"compression": "int8"}),
        ("autocast", {}),
    ],
    ids=str,
)
def test_beside_other_options(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    assert differing(tmp_path, [GRID[0], GRID[3], GRID[5]], torch.float32, kind, **options) == []


@given(st.data())
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_any_layouts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    caps = st.floats(0.0001, 1.0)
    layout = st.builds(
        Layout,
        hosts=st.text("abc", min_size=3, max_size=3),
        transport=st.sampled_from(["auto", "tcp"]),
        bucket_cap_mb=st.one_of(caps, st.lists(caps, min_size=1, max_size=3)),
    )
    layouts = data.draw(st.lists(layout, min_size=2, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    kind = data.draw(st.sampled_from(["joined", "plain", "scaled", "weighted"]))
    options = {"weight": "samples"} if kind == "weighted" else {}
    if dtype == torch.float32 and data.draw(st.booleans()):
        options["compression"] = "int8"
    assert differing(tmp_path_factory.mktemp("jobs"), layouts, dtype, kind, **options) == []


def sharded(folder: str, layouts: Sequence[Layout]) -> list[list[str]]:
    """Three replicas of two ranks each, which share the first layer (DTensor): the digests of one for each layout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    rank, found = int(os.environ["RANK"]), []
    for number, layout in enumerate(layouts):
        with mock.patch.dict(os.environ, RINGDP_HOST_ID=layout.hosts[rank], RINGDP_TRANSPORT=layout.transport):
            dist.init_process_group("ring", init_method=f"file://{folder}/job{number}", rank=rank, world_size=6)
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("replicate", "tensor"))
        module = net(torch.float32)
        style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(module, mesh["tensor"], {"0": style})
        model = RingDP(
            module,
            device_mesh=mesh["replicate"],
            bucket_cap_mb=layout.bucket_cap_mb,
            reproducible=True,
            weight="samples",
        )
        replica, digests = mesh.get_local_rank("replicate"), []
        for step in range(STEPS):
            model.zero_grad()
            x = torch.randn(3 + 2 * replica, 64, generator=torch.Generator().manual_seed(10 * step + replica))
            model(x).square().mean().backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            digests.append(digest([g.to_local() if isinstance(g, DTensor) else g for g in gradients]))
        found.append(digests)
        dist.barrier()
        dist.destroy_process_group()
    return found


@pytest.mark.ci
def test_parameters_that_are_sharded_within_a_replica(tmp_path: Path) -> None:
    layouts = [
        Layout(hosts="aabbcc"),
        Layout(hosts="aaaaaa", bucket_cap_mb=0.05),
        Layout(hosts="ababab", transport="tcp", bucket_cap_mb=0.001),
    ]
    for found in run_ranks(sharded, str(tmp_path), layouts, world_size=6, backend=None, timeout_s=120):
        assert len(found) == 3
        assert all(one == found[0] for one in found)


@on_ranks(4, backend=None)
def test_hooks(tmp_path: Path) -> None:
    rank, digests = int(os.environ["RANK"]), []
    for number, layout in enumerate((GRID[1], GRID[3])):
        with mock.patch.dict(os.environ, RINGDP_HOST_ID=layout.hosts[rank], RINGDP_TRANSPORT=layout.transport):
            dist.init_process_group("ring", init_method=f"file://{tmp_path}/job{number}", rank=rank, world_size=4)
        model = RingDP(net(torch.float32), bucket_cap_mb=layout.bucket_cap_mb, reproducible=True)
        with pytest.raises(InvalidArgumentError):
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        plain(model, 0, torch.float32)
        digests.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
        dist.barrier()
        dist.destroy_process_group()
    assert len(set(digests)) == 1


class OfABucket:
    aggregate = "rounds"

    def average(self, xs: Any, infos: Any) -> Any:
        yield list(xs)
        return xs


@on_ranks()
def test_what_cannot_be_is_refused() -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"compression": "auto"},
        {"compression": Compression(rules=[("*", "auto")])},
        {"compression": OfABucket()},
        {"reproducible": 1},
    )
    for options in cases:
        with pytest.raises(InvalidArgumentError):
            RingDP(net(torch.float32), **{"reproducible": True, **options})
    model = RingDP(net(torch.float32), reproducible=True)
    with pytest.raises(InvalidArgumentError):
        model.set_compression("auto")
    plain(model, 0, torch.float32)


@on_ranks(backend="gloo")
def test_another_backend_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        RingDP(net(torch.float32), reproducible=True)


def disagree() -> None:
    RingDP(net(torch.float32), reproducible=dist.get_rank() == 1)


def test_ranks_that_disagree() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(disagree, backend="ring")
    for outcome in failed.value.outcomes:
        assert isinstance(outcome.error, MismatchError)
        assert "RingDP's reproducible is" in str(outcome.error)
        assert "True on rank 1" in str(outcome.error)


@on_ranks(3)
def test_twice_in_a_script() -> None:
    """The group keeps the order for whoever uses it; a group of its own leaves it alone."""
    from ringdp import _C

    own = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(own, dist.ProcessGroup)
    RingDP(net(torch.float32), process_group=own, reproducible=True)
    assert _C.adds_in_rank_order(own)
    assert not _C.adds_in_rank_order(default_group())
    first, second = RingDP(net(torch.float32)), RingDP(net(torch.float32), reproducible=True)
    assert _C.adds_in_rank_order(default_group())
    for model in (first, second):
        plain(model, 0, torch.float32)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
