"""Which compressor a parameter gets; names and objects; who owns which elements."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp.compression import Bfloat16, Info, Int4, Int8, assign, get, names, register
from ringdp.compression.partition import UNIT, bounds, turn_of
from ringdp.errors import InvalidArgumentError


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))


def model() -> nn.Module:
    net = nn.Module()
    net.embedding = nn.Embedding(100, 64)
    net.first = nn.Linear(64, 64)
    net.norm = LlamaRMSNorm()
    net.tiny = nn.Linear(8, 8)
    net.head = nn.Linear(64, 100)
    net.phase = nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))
    return net


def assigned(compression: Any, rules: Any = ()) -> dict[str, str]:
    net = model()
    chosen = assign(compression, rules, dict(net.named_parameters()), dict(net.named_modules()))
    return {name: type(one).__name__ for name, one in chosen.items() if one is not None}


def test_by_default_biases_norms_small_and_complex_ones_stay_exact() -> None:
    large = ("embedding.weight", "first.weight", "head.weight")
    assert assigned("int8") == dict.fromkeys(large, "Int8")
    assert assigned(None) == {}


def test_the_first_rule_that_fits_is_taken_and_may_say_exact() -> None:
    rules = [("*.bias", "bf16"), ("head.*", "bf16"), ("*", "int4")]
    chosen = assigned("int8", rules)
    assert chosen["head.weight"] == chosen["head.bias"] == chosen["first.bias"] == "Bfloat16"
    assert chosen["norm.weight"] == chosen["tiny.weight"] == "Int4"
    assert "phase" not in chosen, "complex ones are exact whatever is said"
    assert "head.weight" not in assigned("int8", [("head.*", None)])


def test_by_size_and_by_type_of_module() -> None:
    assert assigned("int8", [(range(6000, 10000), "int4")])["head.weight"] == "Int4"
    assert assigned("int8", [(lambda numel: numel == 64 * 64, None)]).keys() == {"embedding.weight", "head.weight"}
    assert assigned("int8", [(nn.Embedding, "fp16")])["embedding.weight"] == "Float16"
    assert assigned("int8", [(LlamaRMSNorm, "fp16")])["norm.weight"] == "Float16"


@pytest.mark.parametrize("rules", [["*.bias"], [("*.bias",)], [(3, "int8")], [("*", "int9")], [("*", object())]])
def test_rules_that_cannot_be(rules: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        assigned("int8", rules)


def test_names_lead_to_compressors() -> None:
    assert {"int8", "int4", "fp16", "float16", "bf16", "bfloat16"} <= set(names())
    assert get("int8") == Int8()
    assert get("int4", block=32) == Int4(block=32)
    assert get(Bfloat16()) == Bfloat16()
    assert get(None) is None
    assert ringdp.compression.get("bf16") == Bfloat16()


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no compressor 'int88', there are .*int4, .*int8.*mean 'int8'\?"):
        get("int88")


def test_what_is_no_compressor_is_told_what_it_lacks() -> None:
    class Half:
        def compress(self, x: Any, info: Info) -> Any: ...

    with pytest.raises(InvalidArgumentError, match="no method decompress"):
        get(Half())
    with pytest.raises(InvalidArgumentError, match=r"Int8 is a class: pass an object, Int8\(\)"):
        get(Int8)
    with pytest.raises(InvalidArgumentError, match="aggregate must be one of owner, merge, gather, sum, rounds"):
        get(type("Odd", (Int8,), {"aggregate": "ring"})())
    with pytest.raises(InvalidArgumentError, match="error_feedback must be"):
        get(Int8(error_feedback="yes"))  # type: ignore[arg-type]


def test_registering_a_compressor_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringdp.compression import registry

    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    @register("mine")
    class Mine:
        def compress(self, x: Any, info: Info) -> Any: ...
        def decompress(self, payload: Any, info: Info) -> Any: ...

    assert isinstance(get("mine"), Mine)


def test_generators_are_shared_or_private() -> None:
    def info(**changes: Any) -> Info:
        values: dict[str, Any] = {"name": "w", "shape": (4,), "numel": 4, "world_size": 2}
        return Info(**(values | changes))

    def draw(generator: torch.Generator) -> float:
        return float(torch.rand((), generator=generator))

    assert draw(info(rank=0).generator) == draw(info(rank=1).generator)
    assert draw(info(rank=0).private_generator) != draw(info(rank=1).private_generator)
    assert draw(info(rank=1).private_generator) == draw(info(rank=1).private_generator)
    for change in ({"name": "v"}, {"step": 1}, {"part": 1}, {"phase": "owner"}):
        assert draw(info().generator) != draw(info(**change).generator)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8])
def test_every_element_has_one_owner_and_shares_are_even(parts: int) -> None:
    for count in (0, 1, 255, 256, 257, 1023, 1024, 5000, 100_000):
        for turn in (0, 1, turn_of("layer.weight")):
            edges = bounds(count, parts, turn)
            assert (edges[0], edges[-1], len(edges)) == (0, count, parts + 1)
            sizes = [end - begin for begin, end in itertools.pairwise(edges)]
            assert all(begin % UNIT == 0 for begin in edges[:-1] if begin < count)
            assert max(sizes) - min(sizes) < 2 * UNIT


def test_the_formula_of_ownership() -> None:
    """As docs/wire_format.md writes it."""
    for count, parts, turn in ((5000, 4, 7), (700, 3, turn_of("x")), (256 * 9 + 1, 4, 2**32 - 1)):
        units = (count + 255) // 256
        each = [units // parts + (1 if (p + parts - turn % parts) % parts < units % parts else 0) for p in range(parts)]
        assert sum(each) == units
        expected = [min(256 * sum(each[:p]), count) for p in range(parts + 1)]
        assert bounds(count, parts, turn) == expected
    assert turn_of("größe") == zlib.crc32("größe".encode())
