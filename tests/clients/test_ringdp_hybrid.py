# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, call-overload, misc"
"""RingDP along one dimension of a mesh, tensor parallelism or pipelines along the other: 2×2 ranks, one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import on_ranks

torch: Any = need("torch")
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from ringdp import InvalidArgumentError, RingDP  # noqa: E402


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# Pipeline stages, each wrapped.

WHOLE_BACKWARDS = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS")


def layers() -> list[Any]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(4)]


def pipeline(schedule_name: str, steps: int = 4) -> float:
    """The largest difference between this rank's stages and the same layers trained by one process."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    replica, place = (mesh[name].get_local_rank() for name in ("replicate", "stage"))
    kind = getattr(schedules, schedule_name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    chunks = [[0, 1], [2, 3]] if single else [[0], [1], [2], [3]]  # layers of each stage
    mine = [place] if single else [place, place + 2]
    every, alone = layers(), nn.Sequential(*layers())
    modules = [RingDP(nn.Sequential(*(every[i] for i in chunks[n])), device_mesh=mesh["replicate"]) for n in mine]
    stages = [
        PipelineStage(module, n, len(chunks), torch.device("cpu"), group=mesh["stage"].get_group())
        for module, n in zip(modules, mine, strict=True)
    ]
    schedule = kind(stages[0] if single else stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer, alone_optimizer = sgd(parameters), sgd(alone.parameters())
    generator = torch.Generator().manual_seed(4)
    last = len(chunks) - 1 in mine
    for step in range(steps):
        x, y = (torch.randn(16, 20, generator=generator) for _ in range(2))
        target = {"target": y.chunk(2)[replica]} if last else {}
        schedule.step(*([x.chunk(2)[replica]] if 0 in mine else []), **target)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        nn.functional.mse_loss(alone(x), y).backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
    assert [module.stats().steps for module in modules] == [steps] * len(modules), "one reduction for all microbatches"
    expected = [p for n in mine for i in chunks[n] for p in alone[i].parameters()]
    return max((a - b).abs().max().item() for a, b in zip(parameters, expected, strict=True))


@on_ranks(4)
def test_wrapped_pipeline_stages_train_as_one_process() -> None:
    """Some of these fail with torch's DDP, Interleaved1F1B by an internal assertion."""
    for name in WHOLE_BACKWARDS:
        assert pipeline(name) < 1e-6, name


@on_ranks()
def test_a_backward_in_two_halves_is_refused() -> None:
    """Nothing would be averaged, and nobody told."""
    from torch.distributed.pipelining._backward import stage_backward_input

    model = RingDP(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with model.no_sync():
        output = model(x)
        stage_backward_input([output], [torch.ones(3, 4)], [x], model.parameters())
    with pytest.raises(RuntimeError, match=r"split in two halves.*Use a schedule with whole backwards: ScheduleGPipe"):
        model.reducer.prepare_for_backward([output])  # what torch's stage calls before the half of the weights


# Tensor parallelism inside.


class Switching(nn.Module):
    """Two blocks, split over ranks; `second` may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 20))
        self.norm = nn.LayerNorm(20)
        self.second = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 20))

    def forward(self, x: Any, second: bool = True) -> Any:
        x = self.norm(self.first(x))
        return x + self.second(x) if second else x


def switching() -> Any:
    torch.manual_seed(3)
    return Switching()


def split(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"{part}.0": ColwiseParallel() for part in ("first", "second")}
    plan |= {f"{part}.2": RowwiseParallel() for part in ("first", "second")}
    return parallelize_module(model, mesh, plan)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def farthest(model: Any, alone: Any) -> float:
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((whole(a) - b).abs().max().item() for a, b in pairs)


def tensor_parallel(second_used: str, **options: Any) -> float:
    """The largest difference to one process. `second_used`: always, by the first replica only, or never."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh["replicate"].get_local_rank()
    used = {"always": [True, True], "by one": [True, False], "never": [False, False]}[second_used]
    model = RingDP(split(switching(), mesh["shard"]), device_mesh=mesh["replicate"], bucket_cap_mb=0.001, **options)
    alone = switching()
    assert type(model.module.first[0].weight).__name__ == "DTensor"
    assert model.device_mesh == mesh["replicate"]
    assert len(model.reducer.plan.layout()) > 2
    # foreach: torch's optimizers refuse lists of both kinds of tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    alone_optimizer = sgd(alone.parameters())
    generator = torch.Generator().manual_seed(4)
    for step in range(5):
        inputs = torch.randn(2, 2, 8, 20, generator=generator)  # [accumulated, replica, images, …]
        if step == 3 and "static_graph" not in options:
            with model.no_sync():
                model(inputs[1][replica], used[replica]).pow(2).mean().backward()
            sum(alone(x, u).pow(2).mean() / 2 for x, u in zip(inputs[1], used, strict=True)).backward()
        model(inputs[0][replica], used[replica]).pow(2).mean().backward()
        sum(alone(x, u).pow(2).mean() / 2 for x, u in zip(inputs[0], used, strict=True)).backward()
        for mine, one in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (one.grad is None)
            assert mine.grad is None or (whole(mine.grad) - one.grad).abs().max() < 1e-6
        norms = [
            nn.utils.clip_grad_norm_([*it.module.first.parameters()] if it is model else [*it.first.parameters()], 0.05)
            for it in (model, alone)
        ]
        assert abs(whole(norms[0]) - norms[1]) < 1e-6
        optimizer.step()
        alone_optimizer.step()
        for it in (model, alone):
            it.zero_grad(set_to_none=step % 2 == 0)
    return farthest(model, alone)


@pytest.mark.parametrize(
    "used, options",
    [
        ("always", {}),
        ("always", {"gradient_as_bucket_view": True}),
        ("always", {"static_graph": True}),
        ("by one", {}),
        ("by one", {"find_unused_parameters": True}),
        ("never", {"find_unused_parameters": True}),
    ],
)
@on_ranks(4)
def test_tensor_parallelism_inside_trains_as_one_process(used: str, options: dict[str, Any]) -> None:
    """With torch's DDP the wrapped module has no parameters left after the first forward."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="parameters without gradient")
        assert tensor_parallel(used, **options) < 1e-6


@on_ranks(4)
def test_checkpoints_of_sharded_parameters(tmp_path: Any) -> None:
    """Written by DCP from a mesh of 2×2, read into one of 1×4 and by a single process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(shape: tuple[int, int], seed: int) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(seed)
        model = RingDP(split(Switching(), mesh["shard"]), device_mesh=mesh["replicate"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        model(torch.ones(2, 20)).pow(2).mean().backward()
        optimizer.step()
        return model, optimizer

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    model, optimizer = trained((2, 2), 1)
    dcp.save(state(model, optimizer), checkpoint_id=str(tmp_path))
    fresh, its_optimizer = trained((1, 4), 2)
    loaded = state(fresh, its_optimizer)
    dcp.load(loaded, checkpoint_id=str(tmp_path))
    set_state_dict(fresh, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for (name, mine), saved in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(mine), whole(saved)), name
        moments = (its_optimizer.state[mine]["exp_avg"], optimizer.state[saved]["exp_avg"])
        assert torch.equal(*map(whole, moments)), name
    plain = Switching().state_dict()
    dcp.load({"model": plain}, checkpoint_id=str(tmp_path), no_dist=True)
    for name, tensor in plain.items():
        assert torch.equal(tensor, whole(model.module.state_dict()[name])), name


# What cannot be averaged.


@on_ranks(4)
def test_refusals() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = split(switching(), mesh["shard"])
    with pytest.raises(InvalidArgumentError):
        RingDP(model)  # over all ranks, also those that have the other parts
    assert type(model.first[0].weight).__name__ == "DTensor", "the module is as it was"
    with pytest.raises(InvalidArgumentError):
        RingDP(fully_shard(switching(), mesh=init_device_mesh("cpu", (4,))))
    model.second.requires_grad_(False)
    ours = RingDP(model, device_mesh=mesh["replicate"])
    model.second.requires_grad_(True)
    with pytest.raises(InvalidArgumentError):
        ours(torch.ones(2, 20))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        RingDP(switching(), device_mesh=mesh)
