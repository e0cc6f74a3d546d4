"""A model that is compiled or has parts wrapped for checkpointing has the names, rules and states of the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp import Compression
from ringdp.compression import EF21, Int8, TopK
from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import ddp_hook, parameter_names
from tests.train import compressed_training as training
from tests.train.harness import backends, on_ranks, run_ranks


def net() -> nn.Sequential:
    """Sizes of which two ranks own other elements where the name is another one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 100), nn.LayerNorm(100), nn.Linear(100, 61), nn.Tanh(), nn.Linear(61, 7))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def compiled_in_part() -> nn.Module:
    model = net()
    model[0] = compiled(model[0])
    return model


def checkpointed() -> nn.Module:
    model = net()
    model[2] = checkpoint_wrapper(model[2])
    return checkpoint_wrapper(model)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "compiled": lambda: compiled(net()),
    "compiled in part": compiled_in_part,
    "checkpointed": checkpointed,
    "both": lambda: compiled(checkpointed()),
}
RULES: list[tuple[Any, Any]] = [("0.weight", "int4"), ("_orig_mod.2.*", None), (nn.LayerNorm, "bf16")]


def names_by(way: str) -> tuple[dict[str, str], set[str], str]:
    """How parameters are compressed, what a hook hears, and what a message says."""
    model = RingDP(WAYS[way](), compression=Compression("int8", RULES))
    training.train(model, range(2))
    hooked, heard = RingDP(WAYS[way]()), set()

    def listen(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        heard.update(parameter_names(bucket))
        return ringdp.hooks.allreduce_hook(None, bucket)

    hooked.register_comm_hook(None, listen)
    training.loss_of(hooked, 0).backward()
    with pytest.raises(ringdp.InvalidArgumentError) as refused:
        model.set_compression(Compression("int8", [("0.wieght", None)]))
    return model.compression_stats().parameters, heard, str(refused.value)


@on_ranks()
def test_every_way_has_the_names_of_the_plain_model() -> None:
    plain = names_by("plain")
    assert set(plain[0]) == plain[1] == {name for name, _ in net().named_parameters()}
    assert [plain[0][name].partition("(")[0] for name in ("0.weight", "1.weight", "2.weight", "2.bias")] == [
        "Int4", "Bfloat16", "exact", "exact",
    ]  # fmt: skip
    for way in WAYS:
        assert names_by(way) == plain, way


@on_ranks()
def test_a_compiled_wrapper() -> None:
    """torch.compile over RingDP: its methods are RingDP's."""
    model: Any = compiled(RingDP(net(), compression=Compression("int8", RULES)))
    training.loss_of(model, 0).backward()
    assert set(model.compression_stats().parameters) == {name for name, _ in net().named_parameters()}
    state = model.compression_state_dict()
    RingDP(net(), compression=Compression("int8", RULES)).load_compression_state_dict(state)


def one_rank_compiles() -> list[str]:
    """Ranks agree by clean names: one may compile what another runs plainly."""
    model = RingDP(WAYS["compiled" if dist.get_rank() else "plain"](), compression="int4")
    return training.train(model, range(3))


def test_ranks_may_compile_or_not() -> None:
    first, second = run_ranks(one_rank_compiles, world_size=2, backend="ring")
    assert first == second


@on_ranks()
def test_messages_about_models_have_clean_names() -> None:
    model = net() if dist.get_rank() else compiled(nn.Sequential(nn.Linear(48, 99)))
    with pytest.raises(ringdp.MismatchError) as caught:
        RingDP(model)
    assert "_orig_mod" not in str(caught.value)


@pytest.mark.parametrize(
    ("compression", "consolidated"),
    [("int4", False), ("int4", True), (TopK(0.1), True), (Int8(error_feedback=EF21()), False)],
    ids=str,
)
@on_ranks()
def test_states_of_compiled_and_plain_models_load_into_each_other(compression: Any, consolidated: bool) -> None:
    """A state goes through models of each way; with it each run goes on with the same bits."""
    first = RingDP(net(), compression=copy.deepcopy(compression))
    training.train(first, range(3))
    state = first.compression_state_dict(consolidated=consolidated)
    seen = {}
    for way, make in WAYS.items():
        model = RingDP(make(), compression=copy.deepcopy(compression))
        training.loss_of(model, 0).backward()  # buckets are laid out anew after the first backward
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), first.parameters(), strict=True):
                mine.copy_(theirs)
        model.load_compression_state_dict(state)
        state = model.compression_state_dict(consolidated=consolidated)
        seen[way] = training.train(model, range(3, 5))
    entries = state["parameters"] if consolidated else state["ranks"][str(dist.get_rank())]
    assert set(entries) == {"0.weight", "2.weight"}
    assert len(set(map(tuple, seen.values()))) == 1, seen


def by_hook(way: str, compression: Any) -> tuple[list[str], dict[str, Any]]:
    """torch's DDP: compiled outside and inside, with the model that the hook is told."""
    inner = net() if way in ("plain", "around") else WAYS[way]()
    ddp = DistributedDataParallel(inner)
    model: Any = compiled(ddp) if way == "around" else ddp
    hook, function = ddp_hook(Compression(compression, [("2.weight", None)]), model=model)
    ddp.register_comm_hook(hook, function)
    seen = training.train(model, range(3))
    return seen, hook.state_dict(consolidated=True)["parameters"]


@on_ranks(backend=backends())
def test_the_hook_of_torchs_ddp() -> None:
    plain, state = by_hook("plain", "int4")
    assert set(state) == {"0.weight"}
    for way in (*WAYS, "around"):
        seen, its_state = by_hook(way, "int4")
        assert (seen, set(its_state)) == (plain, {"0.weight"}), way
