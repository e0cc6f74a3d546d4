"""RingDP's table of DDP's arguments: complete, in torch's order, and with a sentence for every wrong value."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.nn.parallel.distributed import _MixedPrecision  # noqa: E402

from ringdp.ddp.arguments import (  # noqa: E402
    OWN_ARGUMENTS,
    TABLE,
    accepted,
    bucket_caps,
    default_cap_mb,
    for_torch,
    growing_caps,
)
from ringdp.ddp.wrapper import RingDP  # noqa: E402
from ringdp.errors import InvalidArgumentError, InvalidStateError  # noqa: E402

MODULE = torch.nn.Linear(2, 2)


def test_the_table_is_torchs_signature() -> None:
    """An argument that torch adds, drops or moves must be decided about."""
    theirs = list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    assert list(TABLE) == theirs
    in_order = inspect.Parameter.POSITIONAL_OR_KEYWORD
    ours = [name for name, one in inspect.signature(RingDP.__init__).parameters.items() if one.kind is in_order][1:]
    assert ours == theirs
    for name, argument in TABLE.items():
        assert argument.does.endswith("."), name
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items()
        if name not in ("self", "module")
    }
    assert accepted([MODULE], defaults) == {"module": MODULE, **defaults}  # what torch takes by default, we take


def test_help_shows_every_argument_and_its_default() -> None:
    shown = inspect.signature(RingDP).parameters
    assert not [one for one in shown.values() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    assert list(shown)[len(TABLE) :] == list(inspect.unwrap(RingDP.__init__).__kwdefaults__)
    theirs = inspect.signature(DistributedDataParallel).parameters
    others = {name for name in TABLE if shown[name].default != theirs[name].default}
    if "forward_sync_buffers" not in TABLE:  # None is torch's True there
        others.remove("broadcast_buffers")
    assert others == {"find_unused_parameters", "gradient_as_bucket_view"}
    assert shown["static_graph"].annotation == "bool"


def test_manual_finalization_is_refused_in_words() -> None:
    """Of torch 2.15; before, setting it would only be an attribute that nobody reads."""
    model = object.__new__(RingDP)
    assert not model.require_manual_backward_finalization
    assert not model.should_finalize_after_backward
    model.__class__.require_manual_backward_finalization.fset(model, False)  # type: ignore[attr-defined]
    for refused in (lambda: setattr(model, "require_manual_backward_finalization", True), model.finalize_backward):
        with pytest.raises(InvalidStateError, match="use DistributedDataParallel on the backend ring"):
            refused()


def test_what_torchs_constructor_gets() -> None:
    given = accepted([MODULE, None, None, 1], {"static_graph": True, "mixed_precision": None, "bucket_cap_mb": 3})
    assert for_torch(given) == {"device_ids": None, "output_device": None, "dim": 1, "static_graph": True}


def test_none_is_torchs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 DDP had broadcast_buffers=True: None would leave each rank its own buffers without a word."""
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters["broadcast_buffers"].default
    assert for_torch({"broadcast_buffers": None}) == {"broadcast_buffers": theirs}

    def older(self: Any, module: Any, device_ids: Any = None, broadcast_buffers: bool = True) -> None:
        """As DDP's constructor was."""

    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    found = for_torch({"device_ids": None, "broadcast_buffers": None})
    assert found == {"device_ids": None, "broadcast_buffers": True}
    assert for_torch({"broadcast_buffers": False}) == {"broadcast_buffers": False}


@pytest.mark.parametrize(
    "name, value",
    [
        ("module", 3),
        ("device_ids", 0),
        ("device_ids", [None]),
        ("output_device", 1.5),
        ("dim", "0"),
        ("broadcast_buffers", "no"),
        ("init_sync", None),
        ("process_group", "ring"),
        ("process_group", object()),  # what torch.distributed.new_group gives to ranks that are not in it
        ("bucket_cap_mb", 0),
        ("bucket_cap_mb", -1),
        ("bucket_cap_mb", "25"),
        ("bucket_cap_mb", float("nan")),
        ("bucket_cap_mb", []),
        ("bucket_cap_mb", [1, 0]),
        ("bucket_cap_mb", True),
        ("bucket_cap_mb_list", 3),
        ("bucket_cap_mb_list", [-1]),
        ("find_unused_parameters", "yes"),
        ("static_graph", []),
        ("delay_all_reduce_named_params", [torch.nn.Parameter(torch.zeros(1))]),
        ("param_to_hook_all_reduce", "weight"),
        ("mixed_precision", "fp16"),
        ("mixed_precision", _MixedPrecision(param_dtype=torch.int8)),
        ("device_mesh", [0, 1]),
    ],
)
def test_wrong_values(name: str, value: Any) -> None:
    given = {"module": MODULE, name: value}
    with pytest.raises(InvalidArgumentError) as caught:
        accepted([], given)
    assert str(caught.value).startswith(f"RingDP's {name} must be {TABLE[name].wanted}, not ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "positional, named, message",
    [
        ([MODULE], {"bucket_cap": 3}, "no argument 'bucket_cap': did you mean 'bucket_cap_mb'?"),
        ([MODULE], {"find_unused": True}, "did you mean 'find_unused_parameters'?"),
        ([MODULE], {"compresion": "int8"}, "did you mean 'compression'?"),
        ([MODULE], {"warmup_steps": 3}, "compression=ringdp.Compression(…, warmup_steps=…) has it"),
        ([MODULE], {"zzz": True}, "no argument 'zzz'"),
        ([MODULE, None], {"device_ids": [0]}, "'device_ids' twice"),
        ([MODULE] * (len(TABLE) + 1), {}, f"at most {len(TABLE)}"),
    ],
)
def test_wrong_names(positional: list[Any], named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        accepted(positional, named)
    assert message in str(caught.value)


def test_ringdps_own_arguments_are_known_by_name() -> None:
    given = inspect.signature(RingDP.__init__).parameters.values()
    own = [it.name for it in given if it.kind is it.KEYWORD_ONLY]
    assert tuple(own) == OWN_ARGUMENTS


def test_before_init_the_advice_is_ours() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(InvalidStateError, match=r"call ringdp\.init\(\) first"):
        RingDP(torch.nn.Linear(2, 2))


def test_buckets_grow_up_to_a_cap_that_all_ranks_compute_alike() -> None:
    mib = 1 << 20
    assert bucket_caps({"bucket_cap_mb": None}) == (None, [])  # then it depends on the group
    assert bucket_caps({"bucket_cap_mb": 3}) == (None, [mib, 2 * mib, 3 * mib])
    assert bucket_caps({"bucket_cap_mb": 0.5}) == (None, [mib // 2])
    assert bucket_caps({"bucket_cap_mb_list": [1, 2]}) == ([1, 2], [mib, 2 * mib])
    assert growing_caps(4) == [mib, 2 * mib, 4 * mib]
    by_ranks = {ranks: default_cap_mb(ranks, exact_over_ring=True) for ranks in (1, 2, 16, 40, 100, 1024)}
    assert by_ranks == {1: 4, 2: 4, 16: 4, 40: 10, 100: 25, 1024: 25}
    assert default_cap_mb(2, exact_over_ring=False) == 25
