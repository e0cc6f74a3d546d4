"""RingDP's table of DDP's arguments: complete, in torch's order, and with a sentence for every wrong value."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.nn.parallel.distributed import _MixedPrecision  # noqa: E402

from ringdp.ddp_arguments import TABLE, accepted, for_torch  # noqa: E402
from ringdp.errors import InvalidArgumentError  # noqa: E402
from ringdp.parallel import RingDP  # noqa: E402

MODULE = torch.nn.Linear(2, 2)


def test_the_table_is_torchs_signature() -> None:
    """An argument that torch adds, drops or moves must be decided about."""
    theirs = list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    assert list(TABLE) == theirs
    in_order = inspect.Parameter.POSITIONAL_OR_KEYWORD
    ours = [name for name, one in inspect.signature(RingDP.__init__).parameters.items() if one.kind is in_order][1:]
    assert ours == theirs[: len(ours)]
    for name, argument in TABLE.items():
        assert argument.does.endswith("."), name
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items()
        if name not in ("self", "module")
    }
    assert accepted([MODULE], defaults) == {"module": MODULE, **defaults}  # what torch takes by default, we take


def test_what_torchs_constructor_gets() -> None:
    given = accepted([MODULE, None, None, 1], {"static_graph": True, "mixed_precision": None, "bucket_cap_mb": 3})
    assert for_torch(given) == {"device_ids": None, "output_device": None, "dim": 1, "static_graph": True}


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
        ([MODULE], {"zzz": True}, "no argument 'zzz'"),
        ([MODULE, None], {"device_ids": [0]}, "'device_ids' twice"),
        ([MODULE] * (len(TABLE) + 1), {}, f"at most {len(TABLE)}"),
    ],
)
def test_wrong_names(positional: list[Any], named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        accepted(positional, named)
    assert message in str(caught.value)
