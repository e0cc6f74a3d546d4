"""The plain tensors that hold the values of a parameter or buffer, which ranks compare, send and hash.

Most tensors are one block of numbers. Others are several: a tensor subclass over inner tensors (``__tensor_flatten__``;
torchao's weights, jagged tensors), a sparse tensor's indices and values, a DTensor's part. `held` decides for each
tensor; all code that walks over a module's parameters and buffers calls it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter)})
# Types that every backend sends as they are; others are sent as bytes.
_SENT = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)
# Types in which gradients are added up.
_AVERAGED = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
)
# The functions that give the plain tensors of a sparse tensor: of its own memory, not copies.
_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "crow_indices": Tensor.crow_indices,
    "col_indices": Tensor.col_indices,
    "values": Tensor.values,
}
_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "ccol_indices": Tensor.ccol_indices,
    "row_indices": Tensor.row_indices,
    "values": Tensor.values,
}
_SPARSE: dict[torch.layout, dict[str, Callable[[Tensor], Tensor]]] = {
    torch.sparse_coo: {"indices": Tensor._indices, "values": Tensor._values},
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


class Treatment(enum.Enum):
    AS_IT_IS = enum.auto()
    BY_PARTS = enum.auto()  # its inner tensors
    LEFT_ALONE = enum.auto()  # every rank keeps its own
    REFUSED = enum.auto()


@dataclass(frozen=True)
class Held:
    """A parameter or buffer, and the tensors that hold its values.

    Attributes:
        kind: "parameter" or "buffer", or another word for messages.
        name: as the module has it.
        tensor: itself.
        treatment: how it is compared and sent.
        parts: plain strided tensors on its memory, without gradient, by the name of the part: "" where it is all one,
            else such as ``scale`` or ``values``. Empty where it is left alone.
        why: the reason for which it is left alone or refused.
        form: a text that must be equal on all ranks, beside the parts' types and shapes; "" for a plain tensor.
    """

    kind: str
    name: str
    tensor: Tensor
    treatment: Treatment
    parts: tuple[tuple[str, Tensor], ...] = ()
    why: str = ""
    form: str = ""

    def lines(self) -> list[str]:
        """The description that ranks compare: ``parameter weight: float32 [3, 4]``; a line for each part."""
        form = f"{_dtype(self.tensor)}{f' ({self.form})' if self.form else ''}"
        if self.treatment is Treatment.LEFT_ALONE:
            return [f"{self.kind} {self.name}: {form}"]
        lines = [f"{self.kind} {self.name}: {form} {shape_text(self.tensor)}"]
        if self.treatment is Treatment.BY_PARTS:
            lines += [
                f"{self.kind} {self.part_name(part)}: {_dtype(tensor)} {shape_text(tensor)}"
                for part, tensor in self.parts
            ]
        return lines

    def part_name(self, part: str) -> str:
        """``weight.scale`` for the part ``scale`` of ``weight``."""
        return f"{self.name}.{part}" if part else self.name


def shape_text(tensor: Tensor) -> str:
    """``[3, 4]``; the length of a jagged tensor's rows, a symbol with another number in each process, is ``*``."""
    return f"[{', '.join(str(length) if isinstance(length, int) else '*' for length in tensor.shape)}]"


def held(kind: str, name: str, tensor: Tensor, *, ranks: Collection[int] = ()) -> Held:
    """The treatment of this tensor.

    Args:
        ranks: of the job, which are to have the same values.
    """
    if torch.nn.parameter.is_lazy(tensor):
        why = "has no shape yet (it is lazy): call the module once before"
        return Held(kind, name, tensor, Treatment.REFUSED, why=why)
    if kind == "parameter" and tensor.requires_grad and (why := why_not_averaged(tensor)):
        return Held(kind, name, tensor, Treatment.REFUSED, why=why)
    if is_plain(tensor):
        return Held(kind, name, tensor, Treatment.AS_IT_IS, (("", tensor.detach()),))
    try:
        parts = tuple(_parts(tensor, "", ranks))
    except _LeftAlone as reason:
        return Held(kind, name, tensor, Treatment.LEFT_ALONE, why=str(reason), form=_form(tensor))
    if len(parts) == 1 and not parts[0][0]:
        return Held(kind, name, tensor, Treatment.AS_IT_IS, parts)
    return Held(kind, name, tensor, Treatment.BY_PARTS, parts, form=_form(tensor))


def is_plain(tensor: Tensor) -> bool:
    """Whether it is one block of numbers that every backend sends: `held` has nothing to decide. Costs 1 us."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in _SENT
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.is_contiguous()  # so that no element is there twice
    )


def held_by(
    module: torch.nn.Module, *, ignored: Container[str] = (), buffers: bool = True, ranks: Collection[int] = ()
) -> Iterator[Held]:
    """All parameters and then all buffers of `module`, each once, in its order; `ignored` names are left out."""
    for name, parameter in module.named_parameters():
        if name not in ignored:
            yield held("parameter", name, parameter, ranks=ranks)
    for name, buffer in module.named_buffers() if buffers else ():
        if name not in ignored:
            yield held("buffer", name, buffer, ranks=ranks)


class _LeftAlone(Exception):
    pass


def why_not_averaged(parameter: Tensor) -> str:
    """To follow its name: why its gradients cannot be averaged; "" where they can."""
    if parameter.layout is not torch.strided or parameter.is_nested:
        what = f"has the layout {_layout(parameter)}"
    elif _is_wrapper(parameter) and not is_dtensor(parameter):
        what = f"is a {type(parameter).__name__}, a tensor subclass"
    elif parameter.dtype not in _AVERAGED:
        what = f"is of the type {_dtype(parameter)}"
    else:
        return ""
    return f"{what}, whose gradients cannot be averaged: freeze it (requires_grad_(False))"


def _parts(tensor: Tensor, path: str, ranks: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    """Raises _LeftAlone."""
    if is_dtensor(tensor):
        spread = sorted(set(ranks) & set(tensor.device_mesh.mesh.flatten().tolist()))  # type: ignore[attr-defined]
        if len(spread) > 1:
            raise _LeftAlone(f"it is a DTensor spread over ranks {', '.join(map(str, spread))}")
        yield from _parts(tensor._local_tensor, path, ranks)  # type: ignore[attr-defined]
    elif _is_wrapper(tensor):
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            raise _LeftAlone(f"it is a {type(tensor).__name__}, which has no __tensor_flatten__")
        for attribute in flatten()[0]:
            inner = getattr(tensor, attribute)
            if isinstance(inner, Tensor):
                yield from _parts(inner, f"{path}.{attribute}" if path else attribute, ranks)
    elif tensor.layout in _SPARSE:
        for part, of in _SPARSE[tensor.layout].items():
            yield from _parts(of(tensor.detach()), f"{path}.{part}" if path else part, ranks)
    else:
        yield path, _plain(tensor)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor on the same memory that a backend can send. Raises _LeftAlone."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _LeftAlone(f"its layout is {_layout(tensor)}")
    if tensor.is_meta:
        raise _LeftAlone("it is on the device meta and has no values")
    if tensor.is_quantized:
        raise _LeftAlone(f"its type is {_dtype(tensor)}, which has a scale of its own")
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(Tensor)
        for dim, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: the same numbers again and again
                plain = plain.narrow(dim, 0, 1)
        if torch._debug_has_internal_overlap(plain) == _OVERLAPS:
            raise _LeftAlone("its elements share memory")
        if plain.dtype in _SENT:
            return plain
        if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            start = plain.storage_offset() * plain.element_size()
            memory = torch.empty(0, dtype=torch.uint8, device=plain.device)
            return memory.set_(plain.untyped_storage(), start, (plain.nbytes,), (1,))
        if plain.is_floating_point() or plain.is_complex() or plain.dtype in _COPIED_AS_THEY_ARE:
            return plain
    raise _LeftAlone(f"it is not contiguous, and {_dtype(plain)} is sent as bytes")


_OVERLAPS = 1
_COPIED_AS_THEY_ARE = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def _form(tensor: Tensor) -> str:
    """The text that must be equal on all ranks, so that the same parts mean the same tensor."""
    words = [] if type(tensor) in _PLAIN_TYPES else [type(tensor).__name__]
    if tensor.layout is not torch.strided:
        words.append(_layout(tensor))
    if tensor.layout is torch.sparse_coo and not _is_wrapper(tensor):
        words.append("coalesced" if tensor.is_coalesced() else "not coalesced")
    return ", ".join(words)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a subclass intercepts every operation, so that its memory need not have its values."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_dtensor(tensor: Tensor) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False  # there are none yet, and importing it takes a second
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
