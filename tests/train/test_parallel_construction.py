"""Making a RingDP: what ranks compare, what is refused, copies, state dicts, names, the world of one."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp.ddp.arguments import TABLE
from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.harness import backends, on_ranks, require_same_bits


def differing(kind: str) -> nn.Module:
    """A model that is another one on rank 1."""
    other = dist.get_rank() == 1
    torch.manual_seed(dist.get_rank())
    if kind == "shape":
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if other else 3))
    if kind == "count":
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3 if other else 2)])
    if kind == "name":
        model = nn.Module()
        model.register_parameter("beta" if other else "alpha", nn.Parameter(torch.zeros(3)))
        return model
    if kind == "dtype":
        return nn.Linear(4, 4, dtype=torch.float64 if other else torch.float32)
    if kind == "strides":
        convolution = nn.Conv2d(3, 4, 2)
        return convolution.to(memory_format=torch.channels_last) if other else convolution  # type: ignore[call-overload]
    if kind == "frozen":
        model = nn.Linear(4, 4)
        model.bias.requires_grad_(not other)
        return model
    assert kind == "buffer"
    model = nn.Linear(4, 4)
    model.register_buffer("running", torch.zeros(3 if other else 2))
    return model


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("shape", ["'1.weight'", "[3, 4]", "[5, 4]", "appears not to match sizes of the same param"]),
        ("count", ["DDP expects same model across all ranks", " 4 params", " 6 params", "'2.weight'"]),
        ("name", ["'alpha'", "'beta'"]),
        ("dtype", ["'weight'", "float32", "float64"]),
        ("strides", ["'weight'", "appears not to match strides of the same param"]),
        ("frozen", ["'bias'", "requires_grad", "True", "False"]),
        ("buffer", ["'running'", "[2]", "[3]"]),
    ],
)
@on_ranks(backend=backends())
def test_models_that_differ(kind: str, expected: list[str]) -> None:
    with pytest.raises(ringdp.MismatchError) as caught:
        RingDP(differing(kind))
    assert isinstance(caught.value, RuntimeError)  # as DDP's
    assert caught.value.peer == 1 - dist.get_rank()
    dist.barrier()  # the group still works
    for part in (*expected, "rank 0", "rank 1"):
        assert part.lower() in str(caught.value).lower()


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@on_ranks(backend=backends())
def test_initial_broadcast() -> None:
    torch.manual_seed(dist.get_rank())
    model = models.MODELS["convolutional"]()
    model[2].running_mean += dist.get_rank()  # type: ignore[index]
    RingDP(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        everybody = [torch.zeros_like(tensor) for _ in range(2)]
        dist.all_gather(everybody, tensor.detach())
        torch.testing.assert_close(everybody[0], everybody[1], rtol=0, atol=0)
    # init_sync=False says that they are alike already: nothing is compared, nothing sent.
    torch.manual_seed(dist.get_rank())
    unlike = nn.Linear(3, 3)
    before = unlike.weight.detach().clone()
    RingDP(unlike, init_sync=False)
    torch.testing.assert_close(unlike.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@on_ranks(backend=backends())
def test_buffers_follow_rank_0() -> None:
    for sync in (True, False):
        model = RingDP(models.build("convolutional"), broadcast_buffers=sync)
        for step in range(3):
            x, y = models.batch(step, dist.get_rank())
            nn.functional.cross_entropy(model(x), y).backward()
        model(models.batch(9, 0)[0])
        mean = model.module[2].running_mean
        everybody = [torch.zeros_like(mean) for _ in range(2)]
        dist.all_gather(everybody, mean)
        assert torch.equal(everybody[0], everybody[1]) == sync


@on_ranks(1, backend=backends())
def test_positional_call() -> None:
    """All of DDP's arguments by their positions, and the attributes that they become."""
    group = dist.new_group([0])
    buffers = inspect.signature(DistributedDataParallel.__init__).parameters["broadcast_buffers"].default
    call = (
        None,
        None,
        1,
        buffers,
        False,
        group,
        0.5,
        True,
        False,
        True,
        False,
        None,
        None,
        None,
        None,
        True,
        None,
        True,
    )
    values: Any = (*call, False)[: len(TABLE) - 1]  # another torch may have fewer
    ours = RingDP(nn.Linear(3, 3), *values)
    theirs = DistributedDataParallel(nn.Linear(3, 3), *values)
    own = {"reducer", "logger", "module", "modules_buffers"}
    for name, value in vars(theirs).items():
        if not name.startswith("_") and name not in own:
            assert getattr(ours, name) == value, name
    assert ours.process_group is group
    assert ours.reducer.plan.bucket_bytes() == [48]
    if "bucket_cap_mb_list" not in TABLE:
        return
    listed = RingDP(nn.Linear(3, 3), bucket_cap_mb=[1, 2])
    assert listed.bucket_bytes_cap_list == [1 << 20, 2 << 20]
    assert DistributedDataParallel(nn.Linear(3, 3), bucket_cap_mb_list=[1, 2]).bucket_bytes_cap == 2 << 20
    assert listed.bucket_bytes_cap == 2 << 20


@on_ranks(1, backend=backends())
def test_what_is_refused() -> None:
    frozen = nn.Linear(3, 3)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match="not needed when a module doesn't have any parameter that requires"):
        RingDP(frozen)
    with pytest.raises(ringdp.InvalidArgumentError, match="mixed_precision must be"):
        RingDP(nn.Linear(3, 3), mixed_precision=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no argument 'bucket_cap': did you mean 'bucket_cap_mb'"):
        RingDP(nn.Linear(3, 3), bucket_cap=3)  # type: ignore[call-arg]
    with pytest.raises(ringdp.InvalidArgumentError, match="above zero"):
        RingDP(nn.Linear(3, 3), bucket_cap_mb=0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        RingDP(nn.Linear(3, 3), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        RingDP(nn.Linear(3, 3), device_mesh=mesh["a"], process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="need to be set at the same time"):
        RingDP(nn.Linear(3, 3), delay_all_reduce_named_params=[])
    with pytest.raises(ValueError, match="single element"):
        RingDP(nn.Linear(3, 3), device_ids=[0, 1])
    with pytest.raises(ValueError, match="device_ids"):
        RingDP(nn.Linear(3, 3), device_ids=[0])
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        RingDP(nn.LazyLinear(3))
    later = {"batched_grad_copy": True, "skip_all_reduce_unused_params": True}  # of torch 2.12 and 2.13
    known: Any = {name: value for name, value in later.items() if name in TABLE}
    RingDP(nn.Linear(3, 3), mixed_precision=None, **known)
    if "forward_sync_buffers" in TABLE:
        with pytest.warns(FutureWarning, match="forward_sync_buffers"):
            RingDP(nn.Linear(3, 3), broadcast_buffers=True)
    with pytest.warns(FutureWarning, match="check_reduction"):
        RingDP(nn.Linear(3, 3), check_reduction=True)


@on_ranks(1, backend="gloo")
def test_distributed_autograd_is_refused() -> None:
    """Its gradients are not in .grad: refused at the first forward instead of not averaged."""
    import torch.distributed.autograd as distributed_autograd
    from torch.distributed import rpc

    with tempfile.NamedTemporaryFile() as file:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}-rpc")
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        model = RingDP(nn.Linear(3, 3))
        model(torch.ones(1, 3)).sum().backward()  # RPC alone changes nothing
        model = RingDP(nn.Linear(3, 3))
        with (
            distributed_autograd.context(),
            pytest.raises(ringdp.InvalidStateError, match="use DistributedDataParallel"),
        ):
            model(torch.ones(1, 3))
        rpc.shutdown()


def step(model: nn.Module, number: int = 0) -> list[Tensor]:
    model.zero_grad()
    x, y = models.batch(number, dist.get_rank())
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@on_ranks(backend=backends())
def test_copies() -> None:
    model = RingDP(models.build("mlp"), find_unused_parameters=False, bucket_cap_mb=0.001)
    assert isinstance(model, DistributedDataParallel)
    expected = step(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copied = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    for other in copied:
        assert isinstance(other, RingDP)
        for one, again in zip(expected, step(other), strict=True):
            torch.testing.assert_close(one, again, rtol=0, atol=0)
        assert other._find_unused is False
        assert (
            other.reducer.plan.bucket_bytes()
            == RingDP(models.build("mlp"), bucket_cap_mb=0.001).reducer.plan.bucket_bytes()
        )
    group = dist.new_group([0, 1])
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default process"):
        pickle.dumps(RingDP(models.build("mlp"), process_group=group))


@on_ranks()
def test_the_order_of_settings_is_that_of_other_builds() -> None:
    """Ranks compare them as one text: a list of features in another order would refuse a build from before."""
    model = RingDP(models.build("mlp"), weight="call", guard=4, reproducible=True)
    assert list(model.ringdp_features.settings()) == ["weight", "guard", "step report", "reproducible"]


@on_ranks(backend=backends())
def test_state_dicts() -> None:
    model = RingDP(models.build("convolutional"))
    ddp = DistributedDataParallel(models.build("convolutional", seed=1))
    bare = models.build("convolutional", seed=2)
    assert list(model.state_dict()) == list(ddp.state_dict())
    for source in (ddp, bare):
        model.load_state_dict(source.state_dict())
        for one, other in zip(model.state_dict().values(), source.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other)
    ddp.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"module.1.weight": model.module[1].weight})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**bare.state_dict(), "more": torch.zeros(1)})


@on_ranks(backend=backends())
def test_layout() -> None:
    """Reverse order, buckets that grow from 1 MiB to the cap; after a step rank 0's order of arrival."""

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(300, 300)
            self.early = nn.Linear(300, 300)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x))

    model = RingDP(Swapped())
    size = 4 * 300 * 300
    assert model.reducer.plan.layout() == [[3, 2, 1, 0]]
    assert model.reducer.plan.bucket_bytes() == [2 * (size + 1200)]
    small = RingDP(Swapped(), bucket_cap_mb=0.2)
    assert small.reducer.plan.bucket_bytes() == [size + 1200, size + 1200]
    listed = RingDP(Swapped(), bucket_cap_mb=[0.001, 10])
    assert listed.reducer.plan.bucket_bytes() == [1200, 2 * size + 1200]
    alone = RingDP(Swapped(), bucket_cap_mb=[10])
    assert len(alone.reducer.plan.bucket_bytes()) == 1
    mebi = nn.ParameterList(nn.Parameter(torch.zeros(1 << 18)) for _ in range(12))  # 1 MiB each
    growing = RingDP(mebi, bucket_cap_mb=3)
    assert growing.reducer.plan.bucket_bytes() == [size_mib << 20 for size_mib in (1, 2, 3, 3, 3)]
    by_itself = RingDP(mebi)
    sizes_mib = (1, 2, 4, 4, 1) if dist.get_backend() == "ring" else (1, 2, 4, 5)
    assert by_itself.reducer.plan.bucket_bytes() == [size_mib << 20 for size_mib in sizes_mib]
    compressed = RingDP(mebi, compression="int8")
    assert compressed.reducer.plan.bucket_bytes() == [size_mib << 20 for size_mib in (1, 2, 4, 5)]
    assert not small._has_rebuilt_buckets
    for expected in ([[3, 2], [1, 0]], [[3, 2], [1, 0]], [[1, 0], [3, 2]]):
        assert [sorted(b) for b in small.reducer.plan.layout()] == [
            sorted(b) for b in expected
        ] or small._has_rebuilt_buckets
        small.zero_grad()
        small(torch.ones(2, 300)).sum().backward()
    assert small._has_rebuilt_buckets
    assert [sorted(bucket) for bucket in small.reducer.plan.layout()] == [[0, 1], [2, 3]]
    data = small._get_ddp_logging_data()
    assert data["bucket_sizes"] == f"{size + 1200}, {size + 1200}"
    assert data["has_rebuilt_buckets"] == 1
    assert data["world_size"] == dist.get_world_size()


@on_ranks(1, backend=backends())
def test_names_and_kinds_of_buckets() -> None:
    """A bucket per dtype, sparse gradients alone, and names that stay short and differ."""
    torch.manual_seed(0)
    mixed = nn.Sequential(
        nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64), nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    )
    reducer = RingDP(mixed).reducer
    assert reducer.plan.layout() == [[4], [3, 2], [6, 5, 1, 0]]
    assert reducer.plan.bucket_names()[0] == "bucket 0: 2.weight"
    assert reducer.plan.bucket_bytes()[1] == 8 * 12

    wide = nn.Module()
    for number in range(300):
        wide.register_parameter(f"parameter_with_a_long_name_{number}", nn.Parameter(torch.zeros(2)))
    (one,) = RingDP(wide).reducer.plan.bucket_names()
    assert len(one) < 300
    assert one.startswith("bucket 0: parameter_with_a_long_name_299, ")
    assert " more [" in one
    wide.register_parameter("another", nn.Parameter(torch.zeros(2)))
    (other,) = RingDP(wide).reducer.plan.bucket_names()
    assert one[-10:] != other[-10:]


@on_ranks(1, backend=backends())
def test_a_world_of_one() -> None:
    """One rank: gradients are left alone, and no bucket takes memory."""
    model = RingDP(models.build("mlp"))
    bare = models.build("mlp")
    for number in range(3):
        for one, other in zip(step(model, number), step(bare, number), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    weight = model.module[0].weight
    assert weight.grad.untyped_storage().nbytes() == weight.numel() * 4
    with model.no_sync():
        step(model)
    model.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    assert model.stats().exposed_wait_s == 0


@on_ranks(backend=backends())
def test_statistics() -> None:
    model = RingDP(models.build("mlp"), bucket_cap_mb=0.001)
    assert model.stats().steps == 0
    for number in range(3):
        step(model, number)
    stats = model.stats()
    assert stats.steps == 3
    assert stats.bytes == 4 * sum(p.numel() for p in model.parameters())
    assert stats.buckets == len(model.reducer.plan.layout())
    assert 0 < stats.backward_s <= stats.total_backward_s
    assert 0 < stats.exposed_wait_s <= stats.total_exposed_wait_s


@pytest.mark.parametrize("hook, divide_by_initial", [(False, True), (False, False), (True, True)])
@on_ranks(backend=backends())
def test_uneven_inputs(hook: bool, divide_by_initial: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    results = []
    for kind in (RingDP, DistributedDataParallel):
        model = kind(models.build("mlp"))
        if hook:
            model.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join(divide_by_initial_world_size=divide_by_initial):
            for number in range(2 + 3 * dist.get_rank()):
                step(model, number)
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    require_same_bits(results[0])


@pytest.mark.skipif("lazy_bucket_allocation" not in TABLE, reason="this torch has no lazy_bucket_allocation")
@on_ranks(1, backend=backends())
def test_what_has_no_effect_says_so() -> None:
    with pytest.warns(UserWarning, match="lazy_bucket_allocation=True has no effect"):
        RingDP(torch.nn.Linear(2, 2), lazy_bucket_allocation=True)
