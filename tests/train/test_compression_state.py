"""What compression remembers: exact to the bit on resume, the mean at other world sizes, inside torch's checkpoints."""

from __future__ import annotations

import copy
import io
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_flatten

import ringdp
from ringdp import Compression
from ringdp.compression import EF21, Int4, Int8, PowerSGD, RandomK, Sparse2, TopK
from ringdp.ddp.wrapper import RingDP
from tests.train import compressed_training as training
from tests.train.harness import backends, each, run_ranks


def with_the_docs_plug_in() -> Int4:
    """Error feedback as docs/start/custom_compressors.md writes its own: a class that says nothing of itself."""
    page = (Path(ringdp.__file__).parents[1] / "docs" / "start" / "custom_compressors.md").read_text()
    [snippet] = re.findall(r"^```python\n(class Decaying:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page", "check_compressor": lambda compressor: None}
    exec(compile(snippet, "custom_compressors.md", "exec"), names)
    return Int4(error_feedback=names["Decaying"]())


KINDS = [
    "int4",
    Int8(error_feedback=True),
    Int8(block=64, error_feedback=True),
    Int8(error_feedback=EF21()),
    PowerSGD(2),
    TopK(0.1),
    Sparse2(0.01),
    with_the_docs_plug_in,
]


def saved(thing: Any) -> Any:
    """Through a file that unpickles nothing."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def make(compression: Any, **arguments: Any) -> tuple[RingDP, torch.optim.Optimizer]:
    model = RingDP(training.wide(), compression=compression, **arguments)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def resumes(compression: Any, warmup_steps: int) -> None:
    anew = compression if callable(compression) else lambda: copy.deepcopy(compression)
    model, optimizer = make(Compression(anew(), warmup_steps=warmup_steps))
    training.train(model, range(4), optimizer)
    state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                   "compression": model.compression_state_dict()})  # fmt: skip
    went_on = training.train(model, range(4, 8), optimizer)
    again, its_optimizer = make(Compression(anew(), warmup_steps=warmup_steps))
    again.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    again.load_compression_state_dict(state["compression"])
    assert training.train(again, range(4, 8), its_optimizer) == went_on


@pytest.mark.parametrize("backend", backends())
def test_a_run_resumes_with_the_same_bits(backend: str) -> None:
    kinds = (partial(resumes, compression, 0) for compression in KINDS)
    run_ranks(each, *kinds, partial(resumes, "int4", 6), world_size=2, backend=backend)


MEANS = ["int4", Int8(error_feedback=True)]


def consolidates() -> list[Any]:
    means = []
    for compression in MEANS:
        model, optimizer = make(compression)
        training.train(model, range(3), optimizer)
        means.append(saved(model.compression_state_dict(consolidated=True)))
    return means


def spreads(states: list[Any]) -> list[Any]:
    means = []
    for compression, state in zip(MEANS, states, strict=True):
        model, optimizer = make(compression)
        model.load_compression_state_dict(state)
        means.append(saved(model.compression_state_dict(consolidated=True)))
        training.train(model, range(2), optimizer)
    return means


def test_the_mean_over_ranks_loads_at_another_world_size() -> None:
    means, others = run_ranks(consolidates, world_size=2, backend="ring")
    loaded = [it for n in (1, 3) for it in run_ranks(spreads, means, world_size=n, backend="ring")]
    for again in (others, *loaded):
        for mean, it in zip(*([state["parameters"] for state in states] for states in (means, again)), strict=True):
            assert mean.keys() == it.keys() == set(training.WEIGHTS)
            assert all(torch.equal(it[name]["residual"], mean[name]["residual"]) for name in mean)


def nothing_is_lost(compression: Any) -> None:
    """What arrived and what the consolidated state still owes are the exact means, in any memory format."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (16, 5, 5)), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(216, 7))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact, lossy = RingDP(copy.deepcopy(net)), RingDP(copy.deepcopy(net), compression=compression)
    wanted, got = (torch.zeros(24, 16, 3, 3) for _ in range(2))
    for step in range(3):
        x = torch.randn(4, 400, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model, total in ((exact, wanted), (lossy, got)):
            model.zero_grad()
            model(x).square().sum().backward()
            gradient = model.module.get_parameter("1.weight").grad
            assert gradient is not None
            total += gradient
    owed = lossy.compression_state_dict(consolidated=True)["parameters"]["1.weight"]["residual"].view(24, 16, 3, 3)
    size = float(wanted.abs().max())
    assert float((got - wanted).abs().max()) > 1e-3 * size
    torch.testing.assert_close(got + owed, wanted, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("backend", backends())
def test_what_arrived_and_what_is_owed_are_the_exact_means(backend: str) -> None:
    sparse = [TopK(0.1), Sparse2(0.01), PowerSGD(2)] if backend == "ring" else []
    run_ranks(each, *(partial(nothing_is_lost, it) for it in ("int4", *sparse)), world_size=3, backend=backend)


def on_two_hosts(folder: str) -> tuple[list[str], dict[str, Any]]:
    """Two ranks on each: what a rank does not carry is not its to remember."""
    rank = int(os.environ["RANK"])
    with mock.patch.dict(os.environ, RINGDP_HOST_ID=f"host{rank // 2}"):
        dist.init_process_group("ring", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    numel = [parameter.numel() for parameter in training.wide().parameters()]
    litter = [torch.full((count,), torch.nan) for count in numel for _ in range(8)]  # in memory that is not cleared
    del litter
    model, optimizer = make("int4")
    seen = training.train(model, range(3), optimizer)
    mean = saved(model.compression_state_dict(consolidated=True))
    own = saved(model.compression_state_dict())
    again, its_optimizer = make("int4")
    again.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(saved(optimizer.state_dict()))
    again.load_compression_state_dict(own)
    assert training.train(again, range(3, 5), its_optimizer) == training.train(model, range(3, 5), optimizer)
    dist.destroy_process_group()
    return seen, mean["parameters"]


def test_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    results = run_ranks(on_two_hosts, str(tmp_path), world_size=4, backend=None)
    for seen, mean in results:
        assert seen == results[0][0]
        for name in training.WEIGHTS:
            assert bool(mean[name]["residual"].isfinite().all())
            assert bool(mean[name]["residual"].any())
            assert torch.equal(mean[name]["residual"], results[0][1][name]["residual"])


def torchs_distributed_checkpoint_keeps_every_ranks_part(folder: str) -> None:
    model, optimizer = make("int4")
    training.train(model, range(3), optimizer)
    save({"compression": model.compression_state_dict()}, checkpoint_id=folder)
    again, _ = make("int4")
    template = {"compression": again.compression_state_dict()}
    load(template, checkpoint_id=folder)
    again.load_compression_state_dict(template["compression"])
    ours, theirs = (one.compression_state_dict() for one in (model, again))
    rank = str(dist.get_rank())
    assert theirs["steps"] == ours["steps"] == 3
    for name in training.WEIGHTS:
        assert torch.equal(ours["ranks"][rank][name]["residual"], theirs["ranks"][rank][name]["residual"])
        assert bool(ours["ranks"][rank][name]["residual"].any())


def a_frozen_parameter_keeps_what_it_owes_in_either_form(compression: Any) -> None:
    """A parameter without gradients is in the way of neither form, and its share comes through both."""
    model, optimizer = make(compression)
    training.train(model, range(3), optimizer)
    own, mean = saved(model.compression_state_dict()), saved(model.compression_state_dict(consolidated=True))
    [mine], wanted = own["ranks"].values(), mean["parameters"]["0.weight"]
    for state in (own, mean):
        again, its_optimizer = make(compression)
        again.module[0].weight.requires_grad_(False)
        again.load_compression_state_dict(state)
        training.train(again, range(2), its_optimizer)
        [exact] = again.compression_state_dict()["ranks"].values()
        if state is own:
            assert torch.equal(exact["0.weight"]["residual"], mine["0.weight"]["residual"])
        averaged = again.compression_state_dict(consolidated=True)["parameters"]
        assert torch.equal(averaged["0.weight"]["residual"], wanted["residual"])
        assert not torch.equal(averaged["3.weight"]["residual"], mean["parameters"]["3.weight"]["residual"])
        again.load_compression_state_dict(again.compression_state_dict())
        averaged = again.compression_state_dict(consolidated=True)["parameters"]
        assert torch.equal(averaged["0.weight"]["residual"], wanted["residual"])


OTHER_ENTRIES = {"key": "bogus/x", "part": "compressor/rank/2/x"}


def changed(state: dict[str, Any], change: str) -> Any:
    rank = str(dist.get_rank())
    entry = state["ranks"][rank]["3.weight"]
    if change == "world":
        state["world_size"] = 7
    elif change == "rank":
        state["ranks"] = {"9": state["ranks"][rank]}
    elif change == "name":
        state["ranks"][rank]["nobody"] = entry
    elif change == "shape":
        entry["residual"] = torch.zeros(3)
    elif change == "dtype":
        entry["residual"] = entry["residual"].double()
    elif change == "text":
        entry["residual"] = "x"
    elif change in OTHER_ENTRIES:
        entry[OTHER_ENTRIES[change]] = torch.zeros(9216)
    elif change == "compressor":
        entry["compressor"] = "Int8()"
    elif change == "no compressor":
        del entry["compressor"]
    elif change == "entry":
        state["ranks"][rank]["3.weight"] = 1
    elif change == "no steps":
        del state["steps"]
    elif change == "no ranks":
        del state["ranks"]
    elif change == "steps":
        state["steps"] = "four"
    elif change == "ranks":
        state["ranks"] = [1]
    return {"format": {"model": 1}, "none": None, "list": [1]}.get(change, state)


REFUSED = [
    ("world", "saved by 7 ranks"),
    ("rank", "of rank 9"),
    ("name", "'nobody'"),
    ("shape", "residual of '3.weight' is float32 [3], not float32 [9216]"),
    ("dtype", "residual of '3.weight' is float64 [9216], not float32 [9216]"),
    ("text", "residual of '3.weight' is str, not float32 [9216]"),
    ("compressor", "has '3.weight' compressed by Int8(), here it is "),
    ("no compressor", "entry of '3.weight' has no 'compressor'"),
    ("entry", "'3.weight' of the compression state must be a dict, not int"),
    ("no steps", "has no 'steps'"),
    ("no ranks", "has no 'ranks'"),
    ("steps", "'steps' of the compression state must be a whole number, not str"),
    ("ranks", "'ranks' of the compression state must be a dict, not list"),
    ("format", "not a ringdp compression state"),
    ("none", "must be a dict, not NoneType"),
    ("list", "must be a dict, not list"),
]
REFUSED_IN_PYTHON = [(change, f"unknown entry '{it}' for '3.weight'") for change, it in OTHER_ENTRIES.items()]


def a_state_that_does_not_fit_is_refused(compression: Any, refused: list[tuple[str, str]]) -> None:
    """Before the first backward and later; nothing has changed then, and training goes on."""
    model, optimizer = make(compression)
    training.train(model, range(1), optimizer)
    for change, words in refused:
        state = changed(saved(model.compression_state_dict()), change)
        for one in (model, make(compression)[0]):
            leaves, names = tree_flatten(saved(one.compression_state_dict()))
            with pytest.raises(ringdp.InvalidArgumentError, match=re.escape(words)):
                one.load_compression_state_dict(state)
            leaves_after, names_after = tree_flatten(one.compression_state_dict())
            assert names_after == names
            for before, after in zip(leaves, leaves_after, strict=True):
                assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    training.train(model, range(1, 2), optimizer)


def ranks_that_load_states_of_different_steps_are_told() -> None:
    model, optimizer = make(RandomK(0.1))
    training.train(model, range(1), optimizer)
    state = model.compression_state_dict()
    training.train(model, range(1, 2), optimizer)
    if dist.get_rank() == 0:
        model.load_compression_state_dict(state)
    with pytest.raises(ringdp.MismatchError, match="rank 0 has compressed 1 steps before this one, rank 1 2\\."):
        training.train(model, range(2, 3), optimizer)


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(
        each,
        partial(torchs_distributed_checkpoint_keeps_every_ranks_part, str(tmp_path)),
        *(partial(a_frozen_parameter_keeps_what_it_owes_in_either_form, it) for it in ("int4", TopK(0.1))),
        partial(a_state_that_does_not_fit_is_refused, "int4", REFUSED),
        partial(a_state_that_does_not_fit_is_refused, TopK(0.1), REFUSED + REFUSED_IN_PYTHON),
        ranks_that_load_states_of_different_steps_are_told,
        world_size=2,
        backend="ring",
    )
