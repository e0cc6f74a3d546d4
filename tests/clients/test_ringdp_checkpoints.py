# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, call-overload, misc, assignment"
"""State dicts of RingDP: what it saves and loads beside DDP and the bare module, by torch.load and by DCP; averages."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

from tests.clients.both import assert_same
from tests.helpers import need
from tests.train.harness import on_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringdp import RingDP  # noqa: E402

KINDS = {"RingDP": RingDP, "DDP": DistributedDataParallel, "bare": lambda module: module}
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
NAMES += ["3.weight", "3.bias"]


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def made(kind: str, seed: int) -> tuple[Any, Any]:
    model = KINDS[kind](build(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def tensors(model: Any) -> list[Any]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def parameters(model: Any) -> list[Any]:
    """Without the running statistics, which each rank has of its own batches until rank 0's are sent."""
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Nine cells: saved by one, loaded into another.

# What load_state_dict(state_dict()) does: DDP and the bare module want their own names, RingDP takes all.
PLAIN = {
    "RingDP": {"RingDP": True, "DDP": True, "bare": True},
    "DDP": {"RingDP": True, "DDP": True, "bare": False},
    "bare": {"RingDP": False, "DDP": False, "bare": True},
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@on_ranks()
def test_plain_state_dicts() -> None:
    """target -> source -> loaded, the same values; otherwise load_state_dict has raised."""
    loaded: dict[str, dict[str, bool]] = {}
    for target in KINDS:
        loaded[target] = {}
        for source in KINDS:
            (saved, its_optimizer), (model, optimizer) = made(source, 1), made(target, 2)
            train(saved, its_optimizer)
            state = through_a_file({"model": saved.state_dict(), "optimizer": its_optimizer.state_dict()})
            try:
                model.load_state_dict(state["model"])
            except RuntimeError as error:
                assert "Missing key(s) in state_dict" in str(error)  # noqa: PT017
                loaded[target][source] = False
                continue
            optimizer.load_state_dict(state["optimizer"])
            for both in ((saved, its_optimizer), (model, optimizer)):
                train(*both, start=3)
            if "bare" not in (source, target):  # which does not average
                assert same(tensors(saved), tensors(model)), f"{target} does not go on as {source}"
            loaded[target][source] = True
    assert loaded == PLAIN


@on_ranks()
def test_distributed_checkpoints(tmp_path: Path) -> None:
    """All nine through get_state_dict, dcp.save, dcp.load, set_state_dict; then training goes on as the saved one's."""
    import torch.distributed.checkpoint as dcp

    for source in KINDS:
        saved, its_optimizer = made(source, 1)
        train(saved, its_optimizer)
        weights, moments = get_state_dict(saved, its_optimizer)
        assert list(weights) == NAMES
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=str(tmp_path / source))
        at_saving = parameters(saved)
        train(saved, its_optimizer, start=3)
        for target in KINDS:
            model, optimizer = made(target, 2)
            into = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(into, checkpoint_id=str(tmp_path / source))
            # DCP writes one rank's part of what all ranks have; the bare modules have come apart.
            set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
            if source != "bare":
                assert same(parameters(model), at_saving), f"{source} into {target}"
                if target != "bare":
                    train(model, optimizer, start=3)
                    assert same(parameters(model), parameters(saved)), f"{target} does not go on as {source}"


# Names and options of torch.distributed.checkpoint.state_dict.


@on_ranks()
def test_names_have_no_prefix() -> None:
    for wrap in (RingDP, lambda module: torch.compile(RingDP(module), backend="eager")):
        model = wrap(build(1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        assert list(weights) == NAMES
        assert set(moments["state"]) == {name for name in NAMES if "running" not in name and "num_" not in name}
        flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        assert "state.0.weight.exp_avg" in flat
    torch._dynamo.reset()


@on_ranks()
def test_options_of_state_dicts() -> None:
    model, optimizer = made("RingDP", 1)
    train(model, optimizer)
    # full, to the CPU: rank 0 has it all, the others nothing
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = copy.deepcopy(get_state_dict(model, optimizer, options=full))  # as they are, they share memory
    assert list(weights) == (NAMES if dist.get_rank() == 0 else [])
    fresh, its_optimizer = made("RingDP", 2)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # One by one: torch's set_state_dict takes a rank without weights to be one that wants the optimizer's state only.
    set_model_state_dict(fresh, weights, options=from_rank_0)
    set_optimizer_state_dict(fresh, its_optimizer, moments, options=from_rank_0)
    train(model, optimizer, start=3)
    train(fresh, its_optimizer, start=3)
    assert same(tensors(fresh), tensors(model))

    model.module[0].requires_grad_(False)
    trainable = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(trainable) == NAMES[2:]
    part = get_model_state_dict(model, submodules={model.module[3]})
    assert list(part) == NAMES[-2:]
    set_model_state_dict(fresh, dict(part), options=StateDictOptions(strict=False))
    assert torch.equal(fresh.module[3].weight, model.module[3].weight)


# Averages of models, vectors of parameters.


def averages(kind: str) -> list[Any]:
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

    model, optimizer = made(kind, 1)
    averaged = [
        AveragedModel(model),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    ]
    for step in range(3):
        train(model, optimizer, 1, start=step)
        for one in averaged:
            one.update_parameters(model if one is not averaged[2] else model.module)
    assert type(averaged[0].module) is type(model)
    assert type(averaged[2].module) is nn.Sequential
    update_bn(
        [torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank())) for _ in range(2)], averaged[0]
    )
    copied = copy.deepcopy(averaged[1])
    copied.load_state_dict(through_a_file(averaged[1].state_dict()))
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 2, model.parameters())
    train(model, optimizer, 2, start=3)
    evaluated = [one.eval()(torch.ones(2, 8)).detach() for one in averaged]
    return [
        vector.detach(),
        *evaluated,
        *tensors(averaged[0]),
        *tensors(averaged[2]),
        *tensors(copied),
        *tensors(model),
    ]


@on_ranks()
def test_averaged_models_and_vectors() -> None:
    assert_same(averages("RingDP"), averages("DDP"), None, "as with DDP")
