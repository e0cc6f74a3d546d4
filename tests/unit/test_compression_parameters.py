"""The parameters of a module: which there are, what they are called, and which modules have them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ringdp.compression.parameters import clean_name, model_parameters, other_parameters


def names(module: nn.Module) -> list[tuple[str, ...]]:
    return [one.names for one in model_parameters(module)]


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


@pytest.fixture
def alone() -> Iterator[None]:
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def test_what_torchs_wrappers_put_in_is_left_out() -> None:
    plain = [("0.weight",), ("1.weight",)]
    assert names(pair()) == plain
    assert names(compiled(pair())) == plain
    assert names(checkpoint_wrapper(pair())) == plain
    inside = pair()
    inside[0] = compiled(checkpoint_wrapper(inside[0]))
    assert names(inside) == plain
    assert names(compiled(inside)) == plain


def test_so_is_ddps_module_but_no_other_attribute_of_that_name(alone: None) -> None:
    inner = DistributedDataParallel(pair())
    assert names(compiled(inner)) == [("0.weight",), ("1.weight",)]
    holder = nn.Module()
    holder.module = inner
    assert names(holder) == [("module.0.weight",), ("module.1.weight",)]


def test_clean_names() -> None:
    assert clean_name("_orig_mod.0._checkpoint_wrapped_module.weight") == "0.weight"
    assert clean_name("_fsdp_wrapped_module.weight") == "weight"
    assert clean_name("my_orig_mod.weight") == "my_orig_mod.weight"


def test_names_that_would_be_the_same_stay_as_they_are() -> None:
    odd = nn.Linear(4, 4)
    odd._orig_mod = nn.Linear(4, 4, bias=False)
    assert names(odd) == [("weight",), ("bias",), ("_orig_mod.weight",)]


def test_a_tied_parameter_has_all_its_names_and_owners() -> None:
    net = nn.Module()
    net.emb, net.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    net.head.weight = net.emb.weight
    net.again = net.head
    net.weight = net.other_weight = net.emb.weight
    [one] = model_parameters(net)
    assert one.names == ("weight", "emb.weight", "head.weight", "other_weight", "again.weight")
    assert one.owners == (net, net.emb, net.head)
    assert "again (Linear)" in one.describe_use()


def test_a_compiled_part_that_has_two_names_has_both() -> None:
    net = nn.Module()
    net.block = nn.Linear(4, 4, bias=False)
    net.fast = compiled(net.block)
    assert names(net) == [("block.weight", "fast.weight")]


def test_parametrized_weights_belong_to_their_layer() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8, bias=False))
    magnitude, direction = model_parameters(nn.ModuleDict({"layer": layer}))
    assert magnitude.names == ("layer.parametrizations.weight.original0",)
    assert magnitude.aliases == direction.aliases == ("layer.weight",)
    assert layer in magnitude.owners
    assert layer in direction.owners
    assert (magnitude.is_magnitude, direction.is_magnitude) == (True, False)


def test_so_do_those_of_the_old_weight_norm() -> None:
    layer = nn.utils.weight_norm(nn.Linear(4, 8, bias=False))
    magnitude, direction = model_parameters(nn.ModuleDict({"layer": layer}))
    assert (magnitude.names, direction.names) == (("layer.weight_g",), ("layer.weight_v",))
    assert magnitude.aliases == direction.aliases == ("layer.weight",)
    assert (magnitude.is_magnitude, direction.is_magnitude) == (True, False)
    plain = nn.Module()
    plain.weight_g = nn.Parameter(torch.ones(8, 1))
    [one] = model_parameters(plain)
    assert (one.aliases, one.is_magnitude) == ((), False), "nothing is computed from this one"


def test_modules_in_circles_and_in_exponentially_many_places() -> None:
    child = nn.Linear(4, 4, bias=False)
    child.parent = nn.ModuleDict({"child": child})
    assert names(child) == [("weight",)]
    nested: nn.Module = nn.Linear(4, 4, bias=False)
    for _ in range(30):
        nested = nn.Sequential(nested, nested)
    [one] = model_parameters(nested)
    assert one.name == "0." * 30 + "weight"
    assert len(one.names) == 64


def test_what_is_left_out_is_known_too() -> None:
    net = nn.ModuleDict({"table": nn.Module(), "layer": pair()})
    net["table"].index = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    known = model_parameters(net, ignored={"layer.1.weight"})
    assert [one.names for one in known] == [("layer.0.weight",)]
    assert [one.names for one in other_parameters(net, known)] == [("table.index",), ("layer.1.weight",)]


def test_a_tied_parameter_stays_while_one_of_its_names_does() -> None:
    net = pair()
    net[1].weight = net[0].weight
    assert [one.names for one in model_parameters(net, ignored={"0.weight"})] == [("1.weight",)]
    assert model_parameters(net, ignored={"0.weight", "1.weight"}) == []
    again = nn.Sequential(net[0], net[0])
    assert model_parameters(again, ignored={"0.weight"}) == [], "as DDP, which knows only the first name of a module"
