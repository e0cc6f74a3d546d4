"""What holds the values of a parameter or buffer: one function decides, for all kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from ringdp.compression.tensor_parts import Treatment, held, held_by, why_not_averaged

UINT4: torch.dtype = getattr(torch, "uint4")  # noqa: B009  # not in torch's stubs


class Opaque(Tensor):
    """A subclass that does not say what it consists of."""

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError


class Tagged(Tensor):
    """A subclass with memory of its own."""


def opaque() -> Tensor:
    made: Tensor = torch.Tensor._make_wrapper_subclass(Opaque, (4, 3))
    return made


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)


COO = "indices", "values"
ROWS = "crow_indices", "col_indices", "values"
COLUMNS = "ccol_indices", "row_indices", "values"
KINDS: dict[str, tuple[Callable[[], Tensor], Treatment, tuple[str, ...]]] = {
    "plain": (lambda: torch.zeros(3), Treatment.AS_IT_IS, ("",)),
    "a parameter": (lambda: nn.Parameter(torch.zeros(3)), Treatment.AS_IT_IS, ("",)),
    "empty": (lambda: torch.zeros(0, 4), Treatment.AS_IT_IS, ("",)),
    "transposed": (lambda: torch.zeros(3, 4).t(), Treatment.AS_IT_IS, ("",)),
    "expanded": (lambda: torch.zeros(3, 1).expand(3, 5), Treatment.AS_IT_IS, ("",)),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), Treatment.AS_IT_IS, ("",)),
    "float8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), Treatment.AS_IT_IS, ("",)),
    "float8, transposed": (lambda: torch.zeros(3, 4).to(torch.float8_e4m3fn).t(), Treatment.AS_IT_IS, ("",)),
    "uint16": (lambda: torch.zeros(3, dtype=torch.uint16), Treatment.AS_IT_IS, ("",)),
    "uint4": (lambda: torch.empty(3, dtype=UINT4), Treatment.AS_IT_IS, ("",)),
    "uint4, transposed": (lambda: torch.empty(3, 4, dtype=UINT4).t(), Treatment.LEFT_ALONE, ()),
    "own memory": (lambda: torch.zeros(3).as_subclass(Tagged), Treatment.AS_IT_IS, ("",)),
    "two": (lambda: TwoTensor(torch.zeros(3), torch.zeros(3)), Treatment.BY_PARTS, ("a", "b")),
    "two in two": (
        lambda: TwoTensor(torch.zeros(3), TwoTensor(torch.zeros(3), torch.zeros(3))),
        Treatment.BY_PARTS,
        ("a", "b.a", "b.b"),
    ),
    "coo": (lambda: torch.eye(4).to_sparse(), Treatment.BY_PARTS, COO),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), Treatment.BY_PARTS, ROWS),
    "csc": (lambda: torch.eye(4).to_sparse_csc(), Treatment.BY_PARTS, COLUMNS),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), Treatment.BY_PARTS, ROWS),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), Treatment.BY_PARTS, COLUMNS),
    "no flatten": (opaque, Treatment.LEFT_ALONE, ()),
    "quantized": (
        lambda: torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.qint8),
        Treatment.LEFT_ALONE,
        (),
    ),
    "meta": (lambda: torch.zeros(3, device="meta"), Treatment.LEFT_ALONE, ()),
    "mkldnn": (lambda: torch.zeros(4, 4).to_mkldnn(), Treatment.LEFT_ALONE, ()),
    "nested": (lambda: nested(torch.strided), Treatment.LEFT_ALONE, ()),
    "lazy": (lambda: torch.nn.parameter.UninitializedBuffer(), Treatment.REFUSED, ()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_done_with_a_buffer(kind: str) -> None:
    make, treatment, parts = KINDS[kind]
    found = held("buffer", "it", make())
    assert (found.treatment, tuple(part for part, _ in found.parts)) == (treatment, parts)
    assert bool(found.why) == (treatment in (Treatment.LEFT_ALONE, Treatment.REFUSED))
    assert found.lines() if treatment is not Treatment.REFUSED else True
    for _, tensor in found.parts:
        assert (type(tensor), tensor.layout, tensor.requires_grad) == (Tensor, torch.strided, False)


@pytest.mark.filterwarnings("ignore")
def test_a_jagged_tensor_is_compared_without_the_symbol_that_each_process_numbers() -> None:
    nested(torch.jagged)
    first, again = (held("buffer", "it", nested(torch.jagged)) for _ in range(2))
    assert first.treatment is Treatment.BY_PARTS
    assert first.lines() == again.lines()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(6.0).reshape(2, 3).t(),
        lambda: torch.arange(2.0).reshape(2, 1).expand(2, 3),
        lambda: torch.arange(3.0).to(torch.float8_e5m2),
        lambda: torch.arange(8.0)[2:5].to(torch.bfloat16).view(torch.uint16),
        lambda: torch.diag(torch.arange(1.0, 4.0)).to_sparse(),
        lambda: torch.diag(torch.arange(1.0, 4.0)).to_sparse_csr(),
        lambda: TwoTensor(torch.arange(3.0), torch.arange(3.0)),
    ],
)
def test_parts_are_the_memory_of_the_tensor(make: Callable[[], Tensor]) -> None:
    target, source = make(), make()
    for _, tensor in held("buffer", "it", target).parts:
        tensor.zero_()
    for (_, into), (_, values) in zip(
        held("buffer", "it", target).parts, held("buffer", "it", source).parts, strict=True
    ):
        into.copy_(values)
    for (_, left), (_, right) in zip(
        held("buffer", "it", target).parts, held("buffer", "it", source).parts, strict=True
    ):
        assert torch.equal(left, right)
    if target.layout is torch.strided and type(target) is Tensor:
        assert target.tolist() == source.tolist()


@pytest.mark.parametrize(
    "parameter, words",
    [
        (lambda grad: nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)), requires_grad=grad), "TwoTensor"),
        (lambda grad: nn.Parameter(torch.eye(3).to_sparse(), requires_grad=grad), "sparse_coo"),
        (lambda grad: nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=grad), "float8_e4m3fn"),
    ],
)
def test_what_cannot_be_averaged_is_refused_where_it_is_trained(parameter: Any, words: str) -> None:
    trained, frozen = held("parameter", "w", parameter(True)), held("parameter", "w", parameter(False))
    assert trained.treatment is Treatment.REFUSED
    assert words in trained.why
    assert frozen.treatment in (Treatment.AS_IT_IS, Treatment.BY_PARTS)
    assert words in why_not_averaged(frozen.tensor)
    assert not why_not_averaged(nn.Parameter(torch.zeros(3).as_subclass(Tagged)))


def test_names_are_those_of_the_module_and_ignored_ones_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = [one.name for one in held_by(model, ignored={"0.bias", "1.running_var"})]
    assert names == ["0.weight", "1.weight", "1.bias", "1.running_mean", "1.num_batches_tracked"]
    assert held("buffer", "it", torch.eye(2).to_sparse()).part_name("values") == "it.values"
