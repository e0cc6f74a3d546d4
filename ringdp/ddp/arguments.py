"""The arguments of torch's DistributedDataParallel: what RingDP does with each, in torch's order.

One table. RingDP's constructor checks values by it, docs/how-to/migrating_from_ddp.md is written from it, and a test
compares it with torch's signature, so that an argument that torch adds is noticed. It has those of the newest release
that ringdp knows; `TABLE` is what the torch at hand takes.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel.distributed import _MixedPrecision

_MIB = 1024 * 1024
_BUCKET_CAP_MB, _LEAST_CAP_MB = 25, 4
Treatment = Literal["own", "torch", "nothing", "deprecated"]
Construct = TypeVar("Construct", bound=Callable[..., None])


class DDPArguments(TypedDict, total=False):
    """Those of DistributedDataParallel's arguments that RingDP takes by name, for type checkers; `TABLE` has all."""

    check_reduction: bool
    gradient_as_bucket_view: bool | None
    static_graph: bool
    delay_all_reduce_named_params: list[tuple[str, torch.nn.Parameter]] | None
    param_to_hook_all_reduce: torch.nn.Parameter | None
    mixed_precision: _MixedPrecision | None
    device_mesh: DeviceMesh | None
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[float] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None
    lazy_bucket_allocation: bool


@dataclass(frozen=True)
class Argument:
    """One argument.

    Attributes:
        treatment: ``own``: RingDP's code; ``torch``: handed to DistributedDataParallel's constructor; ``nothing``:
            accepted, has no effect here; ``deprecated``: as ``torch``, which warns.
        does: what it does here, in a sentence or two.
        wanted: what a value must be, for the message of an InvalidArgumentError.
        fits: whether a value is that.
    """

    treatment: Treatment
    does: str
    wanted: str
    fits: Callable[[Any], bool]


def _flag(value: object) -> bool:
    return isinstance(value, (bool, int)) or type(value).__name__ == "bool_"  # numpy's, too


def _flag_or_none(value: object) -> bool:
    return value is None or _flag(value)


def _device(value: object) -> bool:
    return isinstance(value, (int, str, torch.device)) and not isinstance(value, bool)


def _devices(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(_device(one) for one in value))


def _size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _sizes(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(_size(one) for one in value)


def _named_parameters(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, (list, tuple)) and all(
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
        for pair in value
    )


def _precision(value: object) -> bool:
    if value is None:
        return True
    dtypes = [getattr(value, name, 0) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")]
    return all(one is None or (isinstance(one, torch.dtype) and one.is_floating_point) for one in dtypes)


def _mesh(value: object) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return value is None or isinstance(value, DeviceMesh)


_TRUE_OR_FALSE = "True or False"

ARGUMENTS: Mapping[str, Argument] = {
    "module": Argument(
        "own",
        "The module that every rank holds. Its parameters and buffers become rank 0's.",
        "a torch.nn.Module",
        lambda value: isinstance(value, torch.nn.Module),
    ),
    "device_ids": Argument(
        "torch",
        "As DDP: None, or a list with the module's one GPU, as a number, a name or a device; inputs are moved there.",
        "a list with one device, such as [0], or None",
        _devices,
    ),
    "output_device": Argument(
        "torch",
        "As DDP, which keeps it and does not use it either.",
        "a device or its number",
        lambda value: value is None or _device(value),
    ),
    "dim": Argument("torch", "As DDP: the dimension along which `scatter` and `gather` cut.", "an int",
                    lambda value: isinstance(value, int)),
    "broadcast_buffers": Argument(
        "deprecated",
        "As DDP, with its warning: forward_sync_buffers; False also leaves the buffers alone at construction.",
        "True, False or None",
        _flag_or_none,
    ),
    "init_sync": Argument(
        "torch",
        "As DDP: False neither compares the ranks' models nor sends rank 0's. Ranks compare all names, shapes, "
        "strides, dtypes and requires_grad; the error names the first difference.",
        _TRUE_OR_FALSE,
        _flag,
    ),
    "process_group": Argument(
        "torch",
        "As DDP: the ranks that average; any backend.",
        "a process group that this rank belongs to, or None for the default one",
        lambda value: value is None or isinstance(value, dist.ProcessGroup),
    ),
    "bucket_cap_mb": Argument(
        "own",
        "As DDP, and also a list, as bucket_cap_mb_list. The first bucket is closed at 1 MiB, each later one at twice "
        "as much, up to this. None: 25 where gradients are compressed or another backend than ring moves them, else "
        "4, and from 16 ranks on a quarter of their number, up to 25. A gradient of 4 MiB and more is a bucket of its "
        "own.",
        "a number above zero, or a list of them",
        lambda value: value is None or _size(value) or (_sizes(value) and len(value) > 0),
    ),
    "find_unused_parameters": Argument(
        "own",
        "False and True as DDP. None, the default: what stays without gradient counts as zero, a warning names it.",
        "True, False or None",
        _flag_or_none,
    ),
    "check_reduction": Argument("deprecated", "As DDP: nothing, with its warning.", _TRUE_OR_FALSE, _flag),
    "gradient_as_bucket_view": Argument(
        "own",
        "True, and None, the default: `.grad` is a part of its bucket; detach_() on it works, and a `.grad` that was "
        "kept stays. False: as DDP, memory of its own that no later step writes to, at the price of two copies.",
        "True, False or None",
        _flag_or_none,
    ),
    "static_graph": Argument(
        "torch",
        "As DDP: how often each parameter gets a gradient is learned in the first backward; a change is an error that "
        "names the parameter.",
        _TRUE_OR_FALSE,
        _flag,
    ),
    "delay_all_reduce_named_params": Argument(
        "torch",
        "As DDP; the end of backward waits for the delayed all-reduce, which DDP does on GPUs only.",
        "a list of (name, parameter)",
        _named_parameters,
    ),
    "param_to_hook_all_reduce": Argument(
        "torch",
        "As DDP: the delayed all-reduce starts when this parameter has its gradient.",
        "a parameter",
        lambda value: value is None or isinstance(value, torch.Tensor),
    ),
    "mixed_precision": Argument(
        "own",
        "As DDP, on CPUs too: forward and backward in param_dtype, reduction in reduce_dtype. Parameters and their "
        "gradients stay in full precision outside and accumulate in it; integer buffers are not cast.",
        "torch.nn.parallel.distributed._MixedPrecision of floating-point dtypes",
        _precision,
    ),
    "device_mesh": Argument(
        "torch",
        "As DDP: a one-dimensional mesh instead of process_group; one that was cut out of a larger mesh may have "
        "tensor parallelism inside. DTensor parameters stay DTensors, which DDP makes plain attributes of.",
        "a one-dimensional torch.distributed.DeviceMesh",
        _mesh,
    ),
    "skip_all_reduce_unused_params": Argument(
        "torch",
        "As DDP: parameters without gradient on all ranks are not sent, from the second step on. Ranks may disagree: "
        "a parameter that one rank uses after all is sent at the end of that backward.",
        _TRUE_OR_FALSE,
        _flag,
    ),
    "bucket_cap_mb_list": Argument(
        "own",
        "As DDP: caps the first, second, … bucket one by one, its last number all others.",
        "a list of numbers above zero",
        lambda value: value is None or _sizes(value),
    ),
    "batched_grad_copy": Argument(
        "nothing",
        "A gradient is copied once at most, when it arrives, by one memcpy: there is nothing to batch.",
        _TRUE_OR_FALSE,
        _flag,
    ),
    "forward_sync_buffers": Argument(
        "torch", "As DDP: whether each forward begins with rank 0's buffers.", "True, False or None", _flag_or_none
    ),
    "lazy_bucket_allocation": Argument(
        "nothing",
        "Of torch 2.15. The gradients are parts of their buckets, which stay as long as the gradients do; a warning "
        "says so where True is given.",
        _TRUE_OR_FALSE,
        _flag,
    ),
}  # fmt: skip
# This torch's own: an argument that a later release added is unknown to it.
TABLE: Mapping[str, Argument] = {
    name: ARGUMENTS[name]
    for name in list(inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters)[1:]
    if name in ARGUMENTS
}


OWN_ARGUMENTS = (*("compression", "scaler", "reduce_dtype", "weight", "gradient_pool", "guard", "reproducible"),)
"""Those that DDP does not have."""
IN_COMPRESSION = ("rules", "warmup_steps", "allow", "unmatched_rules")


def accepted(positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names, each value checked.

    Args:
        positional: the values of `TABLE`'s first arguments, in its order.
        named: the rest; none of them also in `positional`.

    Raises:
        TypeError: an argument that is not in the table, or one that is given twice.
        InvalidArgumentError: a value of a wrong kind; the message has the kinds that are right.
    """
    names = list(TABLE)
    if len(positional) > len(names):
        raise TypeError(f"RingDP takes at most {len(names)} arguments, got {len(positional)}")
    found = dict(zip(names, positional, strict=False))
    for name, value in named.items():
        if name not in TABLE:
            if name in IN_COMPRESSION:
                raise TypeError(f"RingDP has no argument {name!r}: compression=ringdp.Compression(…, {name}=…) has it")
            close = difflib.get_close_matches(name, [*OWN_ARGUMENTS, *names], n=1)
            raise TypeError(f"RingDP has no argument {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
        if name in found:
            raise TypeError(f"RingDP got the argument {name!r} twice, by its position and by its name")
        found[name] = value
    for name, value in found.items():
        if not TABLE[name].fits(value):
            raise InvalidArgumentError(f"RingDP's {name} must be {TABLE[name].wanted}, not {_shown(value)}")
    return found


def shows_all_arguments(construct: Construct) -> Construct:
    """For a constructor that takes some of `TABLE`'s arguments as *positional and **named: `help` shows their names."""
    own = inspect.signature(construct)
    theirs = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    shown = [one for one in own.parameters.values() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for name, annotation in DDPArguments.__annotations__.items():
        if name in theirs:  # another torch may have fewer
            default = None if name == "gradient_as_bucket_view" else theirs[name].default
            text = getattr(annotation, "__forward_arg__", annotation)
            shown.append(theirs[name].replace(default=default, annotation=text))
    shown += [one for one in own.parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    construct.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return construct


def for_torch(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that DistributedDataParallel's constructor gets; some it only keeps.

    None stands for torch's default where that is another: broadcast_buffers was True before torch had
    forward_sync_buffers, and None would switch it off there.
    """
    theirs = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    return {
        name: theirs[name].default if value is None else value
        for name, value in arguments.items()
        if TABLE[name].treatment != "own"
    }


def line_mesh(arguments: dict[str, Any]) -> Any:
    """The one-dimensional mesh among torch's arguments, in whose place stands its group from now on.

    With a slice of a mesh torch's constructor would make plain attributes of the module's DTensors.
    """
    mesh = arguments.get("device_mesh")
    if mesh is None or mesh.ndim != 1 or arguments.get("process_group") is not None:
        return None  # torch says what is wrong
    del arguments["device_mesh"]
    arguments["process_group"] = mesh.get_group(mesh_dim=0)
    return mesh


def bucket_caps(arguments: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """The list of sizes in MiB, where one was given, and the caps in bytes of the first, second, … buckets. No caps
    where the user gave no size: `growing_caps` of `default_cap_mb` are for these.
    """
    given = arguments.get("bucket_cap_mb_list") or arguments.get("bucket_cap_mb")
    if isinstance(given, (list, tuple)):
        return list(given), [_bytes(cap) for cap in given]
    return None, growing_caps(given) if given else []


def growing_caps(cap_mb: float) -> list[int]:
    """1, 2, 4, … MiB up to the cap, in bytes: a slow wire is busy with one bucket until the next one is full."""
    cap_bytes = _bytes(cap_mb)
    caps = [min(_MIB, cap_bytes)]
    while caps[-1] < cap_bytes:
        caps.append(min(2 * caps[-1], cap_bytes))
    return caps


def default_cap_mb(ranks: int, *, exact_over_ring: bool) -> float:
    """The largest bucket, in MiB, where the user gives no size; the same on all ranks, since nothing measured enters
    it.

    The last bucket is sent after backward has ended, so large buckets are late; small ones pay the latency of 2(n-1)
    messages each. On links of 10 Gbit (40 µs for a message, 0.8 ns for a byte) the latency is a tenth of a bucket's
    time at 0.5 MiB for each rank, and less with several buckets in flight. Hence a quarter of a MiB for each rank, at
    least 4 MiB, from which size on a gradient is a bucket of its own. Other backends and compressors have other costs
    for each bucket, and keep DDP's 25 MiB. docs/lab/benchmarks.md has the measurements.
    """
    if not exact_over_ring:
        return _BUCKET_CAP_MB
    return min(_BUCKET_CAP_MB, max(_LEAST_CAP_MB, ranks / 4))


def _bytes(cap_mb: float) -> int:
    return min(max(1, int(cap_mb * _MIB)), sys.maxsize)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def reduction_dtype(value: Any) -> torch.dtype | None:
    """RingDP's reduce_dtype, checked.

    Raises:
        InvalidArgumentError: not a real floating-point dtype that can be added up.
    """
    if value is None or value in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return value
    raise InvalidArgumentError(
        f"RingDP's reduce_dtype must be torch.float32, float64, float16, bfloat16 or None, not {_shown(value)}"
    )
