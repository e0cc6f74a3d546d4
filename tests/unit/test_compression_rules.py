"""Which compressor a parameter gets; names and objects; who owns which elements."""

from __future__ import annotations

import copy
import itertools
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp.compression import Bfloat16, Compression, Info, Int4, Int8, assign, get, names, register
from ringdp.compression.parameters import model_parameters, other_parameters
from ringdp.compression.partition import UNIT, bounds, owner_offset_of
from ringdp.compression.rule_use import RuleUse, closest
from ringdp.compression.rules import Rules
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
    chosen = assign(Compression(compression, rules), dict(net.named_parameters()), dict(net.named_modules()))
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


def compressed(net: nn.Module, compression: Any, rules: Any = ()) -> set[str]:
    chosen = Rules(Compression(compression, rules))
    return {one.name for one in model_parameters(net) if chosen.of(one) is not None}


def tied() -> nn.ModuleDict:
    emb, head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
    head.weight = emb.weight
    return nn.ModuleDict({"emb": emb, "head": head})


def test_a_tied_parameter_is_meant_by_all_its_names_and_owners() -> None:
    for condition in ("emb.weight", "head.*", nn.Embedding, nn.Linear):
        assert compressed(tied(), None, [(condition, "int8")]) == {"emb.weight"}
        assert compressed(tied(), "int8", [(condition, None)]) == set()


def test_a_weight_that_a_norm_has_too_stays_exact() -> None:
    net = tied()
    net["norm"] = LlamaRMSNorm()
    net["norm"].weight = net["emb"].weight
    assert compressed(net, "int8") == set()
    assert compressed(net, "int8", [("head.weight", "int8")]) == {"emb.weight"}


@pytest.mark.parametrize("normalize", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_parametrized_weights_are_meant_by_the_layer_and_its_weight(normalize: Any) -> None:
    net = nn.ModuleDict({"layer": normalize(nn.Linear(64, 2048, bias=False)), "other": nn.Conv1d(64, 64, 1)})
    magnitude, direction, *_ = (one.name for one in model_parameters(net))
    for condition in (nn.Linear, "layer.weight", "*layer.weight", "layer.*"):
        assert compressed(net, None, [(condition, "int8")]) == {magnitude, direction}
    assert compressed(net, None, [(magnitude, "int8")]) == {magnitude}
    assert compressed(net, "int8") == {direction, "other.weight"}, "a magnitude is a vector, of 2,048 elements here"


def test_a_parametrized_norm_stays_exact() -> None:
    norm = LlamaRMSNorm()
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert compressed(norm, "int8") == set()


def test_names_in_rules_may_have_what_wrappers_put_in() -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    for pattern in ("_orig_mod.0.weight", "0._checkpoint_wrapped_module.weight", "_orig_mod.*.weight"):
        assert compressed(net, None, [(pattern, "int8")]) == {"0.weight"}


def test_a_name_is_meant_by_itself_whatever_it_is_made_of() -> None:
    net = nn.ParameterDict({"w[0]": torch.zeros(8), "w*": torch.zeros(8), "w0": torch.zeros(8)})
    assert compressed(net, None, [("w[0]", "int8")]) == {"w[0]", "w0"}
    assert compressed(net, None, [("w*", "int8")]) == {"w[0]", "w*", "w0"}
    assert compressed(net, None, [("w[[]0]", "int8")]) == {"w[0]"}
    assert compressed(nn.ParameterDict({"a[": torch.zeros(8)}), None, [("a[", "int8")]) == {"a["}


def use_of(net: nn.Module, compression: Any, rules: Any, **arguments: Any) -> RuleUse:
    known = model_parameters(net, ignored=arguments.pop("ignored", ()))
    return RuleUse(Rules(Compression(compression, rules, **arguments)), known, other_parameters(net, known))


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("first.wieght", "no parameter fits rule 2 of 2, 'first.wieght': the closest names are 'first.weight'"),
        ("embeding.*", "'embeding.*': the closest names are 'embedding.*'"),
        ("*.wieght", "'*.wieght': the closest names are '*.weight'"),
        ("*fisrt*", "'*fisrt*': the closest names are '*first*'"),
        ("head", "'head': the closest names are 'head.*'"),
        ("Q" * 40, f"'{'Q' * 40}': the names are 'phase', 'embedding.weight', 'first.weight' and 6 more"),
        (nn.Conv2d, "Conv2d: the modules that have parameters themselves are of the types Linear (3), Module (1), "),
        (range(5, 8), "range(5, 8): they have 8 to 6,400 elements"),
        (lambda numel: False, "the function <lambda>: they have 8 to 6,400 elements"),
    ],
)
def test_a_rule_that_no_parameter_fits_is_refused_with_what_there_is(condition: Any, said: str) -> None:
    rules = [("*.bias", None), (condition, "int8")]
    use = use_of(model(), "int8", rules)
    with pytest.raises(InvalidArgumentError) as refused:
        use.refuse_unmatched()
    assert said in str(refused.value)
    assert "pass Compression(…, unmatched_rules='warn')" in str(refused.value)
    use = use_of(model(), "int8", rules, unmatched_rules="warn")
    use.refuse_unmatched()
    assert any(said in warning for warning in use.warnings)


def test_without_rules_there_is_nothing_to_say() -> None:
    use = use_of(model(), "int8", [])
    use.refuse_unmatched()
    assert use.warnings == []
    for rules in ([("*", "int8")], [("*.bias", None), ("head.*", "int4"), (range(4096, 4097), None)]):
        assert use_of(model(), None, rules).warnings == []


def test_frozen_parameters_fit_rules() -> None:
    net = model().requires_grad_(False)
    assert use_of(net, "int8", [("head.*", None)]).warnings == []


def test_a_rule_behind_others_that_take_all_is_told() -> None:
    [warning] = use_of(model(), "int8", [("*.bias", "bf16"), ("*.weight", "int4"), (nn.Linear, None)]).warnings
    assert warning == (
        "rule 3 of 3, Linear, never counts: rule 1 of 3, '*.bias' and rule 2 of 3, '*.weight', come first for"
        " 'first.weight', 'first.bias', 'tiny.weight' and 3 more"
    )


def test_a_rule_for_what_is_never_compressed_is_told() -> None:
    net = nn.ModuleDict({"sparse": nn.Embedding(64, 64, sparse=True), "odd": model(), "out": nn.Linear(64, 64)})
    net["odd"].index = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    rules = [("sparse.*", "int8"), ("*.phase", "int8"), ("*.index", "int8"), ("out.*", "int8")]
    warnings = use_of(net, None, rules, ignored={"out.weight", "out.bias"}).warnings
    reasons = ["has sparse gradients", "is of complex64", "is of int64", "is left out of data parallelism"]
    for warning, reason in zip(warnings, reasons, strict=True):
        assert "has no effect: " in warning
        assert reason in warning
        assert "so it is never compressed" in warning
    assert use_of(net, None, [(condition, None) for condition, _ in rules]).warnings == [], "exact is what they are"


def test_rules_from_a_generator() -> None:
    def each() -> Iterator[Any]:
        yield ("*.bias", "bf16")
        yield ("head.*", "int4")

    rules = Rules(Compression("int8", each()))
    for _ in range(2):
        chosen = {one.name: type(rules.of(one)).__name__ for one in model_parameters(model())}
        assert (chosen["head.bias"], chosen["head.weight"]) == ("Bfloat16", "Int4")
    assert copy.deepcopy(rules).asked == rules.asked


def test_what_a_rules_function_raises_is_told_with_the_rule_and_the_parameter() -> None:
    with pytest.raises(InvalidArgumentError, match=r"rule 1 of 1, the function <lambda>, raised ZeroDivisionError for"):
        use_of(model(), "int8", [(lambda numel: numel < 1 // 0, None)])


@pytest.mark.parametrize("rules", [None, 5, "*.bias", {"*.bias": None}])
def test_rules_are_a_list(rules: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"pair"):
        Rules(Compression("int8", rules))


def test_what_to_do_with_unmatched_rules_is_one_of_two_things() -> None:
    with pytest.raises(InvalidArgumentError, match="unmatched_rules must be one of error, warn, not 'ignore'"):
        Rules(Compression(unmatched_rules="ignore"))


def test_a_model_without_parameters() -> None:
    with pytest.raises(InvalidArgumentError, match="the model has no parameters"):
        use_of(nn.Tanh(), "int8", [("*", None)]).refuse_unmatched()


def test_the_closest_of_many_names_are_found_soon() -> None:
    names = [f"decoder.layers.{i}.{part}.weight" for i in range(200) for part in ("attention", "mlp.up", "mlp.down")]
    assert closest("decoder.layers.7.mlp.upp.weight", names)[0] == "decoder.layers.7.mlp.up.weight"
    assert closest("decodr.*", names)[0] == "decoder.*"


def test_names_lead_to_compressors() -> None:
    assert {"int8", "int4", "fp16", "float16", "bf16", "bfloat16"} <= set(names())
    assert get("int8") == Int8()
    assert get("int4", block=32) == Int4(block=32)
    assert get(Bfloat16()) == Bfloat16()
    assert get(None) is None
    assert ringdp.compression.get("bf16") == Bfloat16()


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    words = r"unknown compressor 'int88'; the compressors are .*int4, .*int8.*mean 'int8'\?"
    with pytest.raises(InvalidArgumentError, match=words):
        get("int88")


def test_what_is_no_compressor_is_told_what_it_lacks() -> None:
    class Half:
        def compress(self, x: Any, info: Info) -> Any: ...

    with pytest.raises(InvalidArgumentError, match="no method decompress"):
        get(Half())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"Int8 is a class: pass an object, Int8\(\)"):
        get(Int8)  # type: ignore[arg-type]
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register("mine")(Mine)  # a notebook's cell, run once more
    with pytest.warns(UserWarning, match="'int8' was ringdp.compression.codecs.int8.Int8 and is .*Mine from now"):
        register("int8")(Mine)


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
        for owner_offset in (0, 1, owner_offset_of("layer.weight")):
            edges = bounds(count, parts, owner_offset)
            assert (edges[0], edges[-1], len(edges)) == (0, count, parts + 1)
            sizes = [end - begin for begin, end in itertools.pairwise(edges)]
            assert all(begin % UNIT == 0 for begin in edges[:-1] if begin < count)
            assert max(sizes) - min(sizes) < 2 * UNIT


def test_the_formula_of_ownership() -> None:
    """As docs/reference/wire_format.md writes it."""
    for count, parts, owner_offset in ((5000, 4, 7), (700, 3, owner_offset_of("x")), (256 * 9 + 1, 4, 2**32 - 1)):
        units = (count + 255) // 256
        each = [
            units // parts + (1 if (p + parts - owner_offset % parts) % parts < units % parts else 0)
            for p in range(parts)
        ]
        assert sum(each) == units
        expected = [min(256 * sum(each[:p]), count) for p in range(parts + 1)]
        assert bounds(count, parts, owner_offset) == expected
    assert owner_offset_of("größe") == zlib.crc32("größe".encode())
