"""The comparison of the ranks' models and settings at construction, before anything is broadcast.

Ranks compare a hash; only where it differs they exchange the descriptions, as UTF-8 text, so nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from ringdp.compression.parameters import clean_name
from ringdp.compression.tensor_parts import Held, Treatment, held_by, shape_text
from ringdp.ddp.refusal import COMPARING_MODELS
from ringdp.errors import MismatchError
from ringdp.job.agreement import difference

_SETTING = "setting"


@dataclass(frozen=True)
class _Entry:
    """One parameter or buffer as its rank has it; all fields are text, so that any difference can be shown.

    A setting of RingDP is an entry, too, with its value in the place of the type.
    """

    kind: str  # "parameter", "buffer", "part of parameter", "part of buffer" or "setting"
    name: str
    dtype: str
    shape: str
    strides: str
    requires_grad: str

    @classmethod
    def of_setting(cls, name: str, value: str) -> _Entry:
        return cls(_SETTING, name, value, "", "", "")

    def line(self) -> str:
        return "\t".join(
            part.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
            for part in (self.kind, self.name, self.dtype, self.shape, self.strides, self.requires_grad)
        )


def check_same_model(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    ignored: Container[str] = (),
    compression: str | None = None,
    kind: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Compare names, shapes, strides, dtypes and requires_grad of parameters and buffers across the group.

    Also whether gradients are compressed; a difference between two compressors is an error of the later choice of
    compressors. Returns the ranks' `kind`, in rank order.

    Args:
        module: what is wrapped.
        group: every rank of it must call this.
        device: where the group's backend wants its tensors.
        ignored: names of parameters and buffers that are left out.
        compression: what gradients are compressed by, in one line; None: they are exact.
        kind: of this rank's device, in one line; it may differ.
        settings: by the name of the argument, in one line; those that are not RingDP's defaults.

    Raises:
        MismatchError: on every rank; names the first parameter that differs with both ranks' fields, or both
            compressions where one rank has none, or the setting that differs, or the error for which a rank cannot wrap
            its model.
    """
    if group.size() == 1:
        return (kind,)
    tensors = held_by(module, ignored=ignored, ranks=dist.get_process_group_ranks(group))
    entries = [*_entries(tensors), *(_Entry.of_setting(name, value) for name, value in settings.items())]
    lines = [compression or "", kind, *(entry.line() for entry in entries)]
    found = difference(lines, group, what="model", doing="wrap its model", device=device)
    if found is None:
        return (kind,) * group.size()
    me = found.rank
    choices, kinds = zip(*(theirs[:2] for theirs in found.by_rank), strict=True)
    models, given = zip(*map(_parse, found.by_rank), strict=True)
    if (other := found.first_other(models)) is not None:
        raise _difference(models[me], models[other], me=me, other=other)
    if (other := found.first_other([bool(choice) for choice in choices])) is not None:
        mine, theirs = choices[me] or None, choices[other] or None
        raise MismatchError(
            f"the ranks chose different compression: {mine} on rank {me}, {theirs} on rank {other}."
            " Give RingDP the same arguments on all ranks.",
            rank=me,
            peer=other,
            operation=COMPARING_MODELS,
        )
    if (other := found.first_other(given)) is not None:
        mine, theirs = given[me], given[other]
        name = next(name for name in (*mine, *theirs) if mine.get(name) != theirs.get(name))
        raise MismatchError(
            f"RingDP's {name} is {mine.get(name, 'the default')} on rank {me} and {theirs.get(name, 'the default')} on"
            f" rank {other}: give it the same on all ranks",
            rank=me,
            peer=other,
            operation=COMPARING_MODELS,
        )
    if found.first_other(found.by_rank) is None:  # the hashes differ: memory or network is not sound
        raise MismatchError("the ranks' hashes of the same model differ", rank=me)
    return kinds


def _entries(tensors: Iterable[Held]) -> Iterable[_Entry]:
    for one in tensors:
        dtype = _types(one.tensor, one.kind == "parameter")
        strided = one.kind == "parameter" and one.treatment is Treatment.AS_IT_IS
        requires_grad = str(one.tensor.requires_grad) if one.kind == "parameter" else ""
        yield _Entry(
            kind=one.kind,
            name=clean_name(one.name),
            dtype=f"{dtype} ({one.form})" if one.form else dtype,
            shape="" if one.treatment is Treatment.LEFT_ALONE else shape_text(one.tensor),
            strides=str(list(one.tensor.stride())) if strided else "",
            requires_grad=requires_grad,
        )
        for part, tensor in one.parts if one.treatment is Treatment.BY_PARTS else ():
            yield _Entry(
                kind=f"part of {one.kind}",
                name=clean_name(one.part_name(part)),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=shape_text(tensor),
                strides="",
                requires_grad="",
            )


def _types(tensor: torch.Tensor, parameter: bool) -> str:
    """The tensor's, and its gradients' where that is another one."""
    own = str(tensor.dtype).removeprefix("torch.")
    gradients = getattr(tensor, "grad_dtype", tensor.dtype) if parameter and tensor.is_leaf else tensor.dtype
    return own if gradients == tensor.dtype else f"{own}, grad_dtype {str(gradients).removeprefix('torch.')}"


def _parse(lines: Sequence[str]) -> tuple[list[_Entry], dict[str, str]]:
    """The model's entries, and the settings."""
    entries = [_Entry(*line.split("\t")) for line in lines[2:]]
    model = [entry for entry in entries if entry.kind != _SETTING]
    return model, {entry.name: entry.dtype for entry in entries if entry.kind == _SETTING}


def _difference(mine: list[_Entry], theirs: list[_Entry], *, me: int, other: int) -> MismatchError:
    """The message; the phrases of torch's DDP are kept, since people and tests look for them."""
    my_parameters = [entry for entry in mine if entry.kind == "parameter"]
    their_parameters = [entry for entry in theirs if entry.kind == "parameter"]
    position, left, right = _first_difference(mine, theirs)
    name = (left or right or mine[0]).name
    if len(my_parameters) != len(their_parameters):
        head = (
            f"DDP expects same model across all ranks, but Rank {me} has {len(my_parameters)} params, "
            f"while rank {other} has inconsistent {len(their_parameters)} params."
        )
        if left is None or right is None or left.name != right.name:
            head += f" First difference: rank {me} has {_shown(left)} where rank {other} has {_shown(right)}."
    elif left is None or right is None or (left.kind, left.name) != (right.kind, right.name):
        head = (
            f"the models differ: at position {position} rank {me} has {_shown(left)} "
            f"where rank {other} has {_shown(right)}."
        )
    else:
        head = f"{left.kind} {name!r} differs: " + "; ".join(_field_differences(left, right, me=me, other=other))
        if left.shape != right.shape or left.strides != right.strides:
            what = "sizes" if left.shape != right.shape else "strides"
            mine_shown = left.shape if what == "sizes" else left.strides
            head += (
                f". [{me}]: params[{position}] in this process with {what} {mine_shown} appears not to match {what} "
                f"of the same param in process {other}."
            )
    return MismatchError(head, rank=me, peer=other, name=name, operation=COMPARING_MODELS)


def _first_difference(mine: list[_Entry], theirs: list[_Entry]) -> tuple[int, _Entry | None, _Entry | None]:
    for position in range(max(len(mine), len(theirs))):
        left = mine[position] if position < len(mine) else None
        right = theirs[position] if position < len(theirs) else None
        if left != right:
            return position, left, right
    return 0, None, None


def _shown(entry: _Entry | None) -> str:
    return f"{entry.kind} {entry.name!r} ({entry.dtype}{entry.shape})" if entry else "nothing"


def _field_differences(left: _Entry, right: _Entry, *, me: int, other: int) -> list[str]:
    return [
        f"{field} {getattr(left, field)} on rank {me}, {getattr(right, field)} on rank {other}"
        for field in ("dtype", "shape", "strides", "requires_grad")
        if getattr(left, field) != getattr(right, field)
    ]
