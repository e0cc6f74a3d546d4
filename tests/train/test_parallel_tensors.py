"""Parameters and buffers that are not plain memory: subclasses, sparse tensors, odd types; buffers that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import ringdp
from ringdp import rounds
from ringdp.compression.tensor_parts import held, held_by
from ringdp.ddp.wrapper import RingDP
from tests.helpers import logged
from tests.train.harness import on_ranks, run_ranks


class Packed(Tensor):
    """An 8-bit weight with a scale, which has no operation but detach()."""

    @staticmethod
    def __new__(cls: type[Packed], codes: Tensor, scale: Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Packed has no {func}")

    def __repr__(self) -> str:  # type: ignore[override]
        return "Packed()"


UINT4: torch.dtype = getattr(torch, "uint4")  # noqa: B009  # not in torch's stubs
OF_KIND: dict[str, Callable[[float, Tensor], Tensor | None]] = {  # of a number, and of [4, 3] of it
    "packed": lambda number, values: Packed(values.to(torch.int8), torch.tensor(number)),
    "two": lambda number, values: TwoTensor(values, values + 1),
    "coo": lambda number, values: torch.diag(torch.full((4,), number)).to_sparse(),
    "not coalesced": lambda number, values: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.full((2,), number), (2, 2)
    ),
    "csr": lambda number, values: torch.diag(torch.full((4,), number)).to_sparse_csr(),
    "bsr": lambda number, values: torch.diag(torch.full((4,), number)).to_sparse_bsr((2, 2)),
    "uint8": lambda number, values: values.to(torch.uint8),
    "uint16": lambda number, values: values.to(torch.uint16),
    "int16": lambda number, values: values.to(torch.int16),
    "uint4": lambda number, values: values.to(torch.uint8).view(UINT4),
    "float8": lambda number, values: values.to(torch.float8_e4m3fn),
    "complex": lambda number, values: torch.complex(values, -values),
    "conjugate": lambda number, values: torch.complex(values, -values).conj(),
    "bool": lambda number, values: values > 1,
    "expanded": lambda number, values: torch.full((4, 1), number).expand(4, 3),
    "transposed": lambda number, values: values.t(),
    "empty": lambda number, values: torch.zeros(0, 3),
    "shared": lambda number, values: values,
    "quantized": lambda number, values: torch.quantize_per_tensor(values, 0.5, 0, torch.qint8),
    "mkldnn": lambda number, values: values.to_mkldnn(),
    "none": lambda number, values: None,
    "meta": lambda number, values: torch.empty(3, device="meta"),
}
NOT_SENT = {"quantized", "mkldnn", "none", "meta"}


def made(kind: str, number: float) -> Tensor | None:
    return OF_KIND[kind](number, torch.full((4, 3), number))


class Net(nn.Module):
    def __init__(self, kind: str, number: float, *, frozen: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        tensor = made(kind, number)
        if frozen and tensor is not None and kind not in ("quantized", "mkldnn", "meta"):
            self.weight = nn.Parameter(tensor, requires_grad=False)
        self.state: Any
        self.register_buffer("state", made(kind, number))
        if kind == "shared":
            self.register_buffer("again", self.state.view(-1))
        self.register_buffer("passing", made(kind, number), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def words(module: nn.Module) -> list[str]:
    """The bits of all parameters and buffers."""
    return [f"{one.name} {part} {bits.tolist()}" for one in held_by(module) for part, bits in one.parts]


def set_to(module: nn.Module, kind: str, number: float) -> None:
    for name, other in (("state", made(kind, number)), ("passing", made(kind, number))):
        mine = held("buffer", name, getattr(module, name)).parts
        assert other is not None
        for (_, into), (_, values) in zip(mine, held("buffer", name, other).parts, strict=True):
            into.copy_(values)


def trained(kind: str) -> tuple[list[list[str]], list[str]]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    net = Net(kind, 1.0 + rank, frozen=True)
    with logged("ringdp") as heard:
        model = RingDP(net, guard=4)
        optimizer = torch.optim.SGD(net.layer.parameters(), 0.1)
        states = [words(net)]
        for number in range(6):
            if kind not in NOT_SENT:
                set_to(net, kind, 3.0 + rank)
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number in (0, 5):
                states.append(words(net))
        model.check_replicas()
    return states, heard


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, backend",
    [
        *((kind, "ring") for kind in OF_KIND),
        *((kind, "gloo") for kind in ("packed", "csr", "uint16", "uint4", "float8")),
    ],
)
def test_all_ranks_have_rank_0s(kind: str, backend: str) -> None:
    (states, heard), (other, heard_there) = run_ranks(trained, kind, backend=backend)
    assert states == other
    said = [line for line in heard if "keeps its own" in line]
    if kind in ("quantized", "mkldnn", "meta"):
        [line] = said
        assert "buffer state" in line
        assert "buffer passing" in line
    else:
        assert said == []
        assert kind in NOT_SENT or states[0] != states[1] or kind in ("empty", "bool")
    assert [line for line in heard_there if "keeps its own" in line] == []


@pytest.mark.parametrize(
    "how, parts, name",
    [
        ("grown", ["queue was float32[6] and is float32[9]"], "queue"),
        ("both", ["queue was float32[6] and is float32[8]", "queue was float32[6] and is float32[9]"], "queue"),
        ("type", ["queue was float32[6] and is float64[6]"], "queue"),
        ("gone", ["queue was float32[6] and is gone"], "queue"),
        ("new", ["more is new, float32[5]"], "more"),
        ("indices", ["sparse.indices was int64[2, 3] and is int64[2, 9]"], "sparse.indices"),
        ("moved", ["queue was float32[6] and is float32[7]", "last was float32[2] and is float32[1]"], "queue"),
    ],
)
@on_ranks()
def test_a_buffer_that_changes_on_one_rank_is_named_on_all(how: str, parts: list[str], name: str) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 2))
    net.register_buffer("first", torch.zeros(3))
    net.register_buffer("queue", torch.zeros(4))
    net.register_buffer("last", torch.zeros(2))
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    model = RingDP(net)
    other = dist.get_rank() == 1
    sizes = []

    def run() -> None:
        for number in range(4):
            if number == 1:
                net.queue = torch.zeros(6)  # on all ranks
            if number == 2 and (other or how == "both"):
                if how == "type":
                    net.queue = torch.zeros(6, dtype=torch.float64)
                elif how == "gone":
                    net.queue = None
                elif how == "new":
                    net.register_buffer("more", torch.zeros(5))
                elif how == "indices":
                    net.sparse = torch.ones(3, 3).to_sparse()
                elif how == "moved":  # the same number of elements in all
                    net.queue, net.last = torch.zeros(7), torch.zeros(1)
                else:
                    net.queue = torch.zeros(9 if other else 8)
            model(torch.randn(2, 3)).sum().backward()
            sizes.append(number)

    with pytest.raises(ringdp.MismatchError) as caught:
        run()
    assert sizes[:2] == [0, 1]
    for part in parts:
        assert part in str(caught.value)
    assert not other or caught.value.name == name


@pytest.mark.parametrize("arguments", [{}, {"init_sync": False}], ids=str)
@pytest.mark.parametrize("kind", ["two", "sparse", "float8", "lazy"])
@on_ranks()
def test_what_cannot_be_trained_is_refused_with_its_name(kind: str, arguments: dict[str, Any]) -> None:
    net = nn.Module()
    net.layer = nn.Linear(3, 2)
    if kind == "two":
        net.odd = nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)))
    elif kind == "sparse":
        net.odd = nn.Parameter(torch.eye(3).to_sparse())
    elif kind == "float8":
        net.odd = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))
    else:
        net.odd = nn.LazyBatchNorm1d(affine=False)
    with pytest.raises(ringdp.InvalidArgumentError) as caught:
        RingDP(net, **arguments)
    dist.barrier()
    assert str(caught.value.name).startswith("odd")
    assert str(caught.value.name) in str(caught.value)


@on_ranks()
def test_the_others_learn_that_one_rank_refuses() -> None:
    net = Net("two", 1.0, frozen=True)
    net.weight.requires_grad_(dist.get_rank() == 1)
    wanted = ringdp.InvalidArgumentError if dist.get_rank() == 1 else ringdp.MismatchError
    with pytest.raises(wanted) as caught:
        RingDP(net)
    dist.barrier()
    assert "weight" in str(caught.value)
    assert "TwoTensor" in str(caught.value)


@on_ranks()
def test_one_that_is_unfrozen_later_is_refused() -> None:
    net = Net("two", 1.0, frozen=True)
    model = RingDP(net)
    model(torch.randn(2, 3)).sum().backward()
    net.weight.requires_grad_(True)
    with torch.no_grad():
        model(torch.randn(2, 3))
    with pytest.raises(ringdp.InvalidArgumentError) as caught:
        model(torch.randn(2, 3))
    assert caught.value.name == "weight"


def replaced(kind: str, other_shape: bool) -> list[str] | str:
    torch.manual_seed(0)
    net: Any = nn.Module()
    net.layer = nn.Linear(3, 2)
    net.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    net.forward = lambda x: net.layer(x)
    model = RingDP(net)
    rank = dist.get_rank()
    model(torch.randn(2, 3)).sum().backward()
    tensor: Any = made(kind, 1.0 + rank)
    if other_shape and rank == 1:
        tensor = torch.zeros(5, dtype=torch.uint8)
    net.weight = nn.Parameter(tensor, requires_grad=False)
    if other_shape:
        with pytest.raises(ringdp.MismatchError) as caught:
            model(torch.randn(2, 3))
        return str(caught.value)
    model(torch.randn(2, 3)).sum().backward()
    first = words(net)
    net.weight = nn.Parameter(made(kind, 5.0 + rank), requires_grad=False)  # type: ignore[arg-type]
    model(torch.randn(2, 3)).sum().backward()
    assert words(net) != first
    return words(net)


@pytest.mark.parametrize("kind", ["packed", "uint8", "uint16", "csr"])
def test_one_that_is_replaced_after_wrapping_becomes_rank_0s(kind: str) -> None:
    mine, theirs = run_ranks(replaced, kind, False, backend="ring")
    assert mine == theirs


def test_integers_that_are_replaced_by_others_on_one_rank_are_named() -> None:
    for text in run_ranks(replaced, "uint8", True, backend="ring"):
        for part in ("weight", "[4, 3]", "[5]"):
            assert part in text


@on_ranks()
def test_replicas_are_compared_by_parts() -> None:
    net: Any = Net("packed", 1.0, frozen=True)
    model = RingDP(net)
    model.check_replicas()
    if dist.get_rank() == 1:
        net.weight.scale.add_(1)
    with pytest.raises(ringdp.MismatchError) as caught:
        model.check_replicas()
    assert "scale of parameter 'weight'" in str(caught.value)


def averaged(kind: str) -> list[list[str]]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    net = Net(kind, 1.0 + rank, frozen=True)
    optimizer = torch.optim.SGD(net.layer.parameters(), 0.1)
    diloco = rounds.DiLoCo(net, optimizer, every=2)
    states = [words(net)]
    for _ in range(2):
        net(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    if kind not in NOT_SENT:
        set_to(net, kind, 3.0 + rank)
    diloco.finish()
    diloco.detach()
    return [*states, [line for line in words(net) if not line.startswith("passing")]]  # a state dict has it not


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["packed", "coo", "uint4", "float8", "expanded", "quantized", "complex", "mkldnn"])
def test_rounds_take_them_too(kind: str) -> None:
    mine, theirs = run_ranks(averaged, kind, backend="ring")
    assert mine == theirs
