# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, call-overload, misc, assignment"
"""torch.compile around RingDP, inside it, and around a step with it: the eager result, graphs split as with DDP."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import on_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringdp import RingDP  # noqa: E402

pytestmark = pytest.mark.ci

STEPS = 6
WIDTH = 300  # a layer has 361 kB: with buckets of 1 MiB a graph ends after every third


class Net(nn.Module):
    """Not a Sequential: the forward of torch's own modules is not compiled when it is the outermost frame."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def build(layers: int = 6, width: int = WIDTH) -> Any:
    torch.manual_seed(1)
    return Net(layers, width)


def small(layers: int = 2) -> Any:
    return build(layers, 12)


def train(run: Callable[[Any], Any], model: Any, width: int, *, quiet_step: int | None = 3) -> list[Any]:
    """Parameters and buffers after a few steps, one of them with a batch before that is not averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        if step == quiet_step:
            with model.no_sync():
                run(torch.randn(8, width, generator=generator)).pow(2).mean().backward()
        run(torch.randn(8, width, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_close(mine: list[Any], eager: list[Any], what: str) -> None:
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def compiled(run: Any, backend: Any) -> Any:
    return run if backend is None else torch.compile(run, backend=backend)


def around(model: Any, backend: Any) -> tuple[Any, Any]:
    wrapped = RingDP(model)
    return compiled(wrapped, backend), wrapped


def inside(model: Any, backend: Any) -> tuple[Any, Any]:
    wrapped = RingDP(compiled(model, backend))
    return wrapped, wrapped


def closed_over(model: Any, backend: Any) -> tuple[Any, Any]:
    wrapped = RingDP(model)
    return compiled(lambda x: wrapped(x * 2) / 2, backend), wrapped


WAYS = {"around": around, "inside": inside, "closed over": closed_over}


@pytest.mark.parametrize(
    ("compiler", "modes"),
    [
        ("aot_eager", (True,)),
        pytest.param("eager", ("ddp_optimizer", False), marks=pytest.mark.slow),
        pytest.param("inductor", (True,), marks=pytest.mark.slow),  # calls a C++ compiler
    ],
)
@on_ranks(timeout_s=100)
def test_compiled_as_eager(compiler: str, modes: tuple[Any, ...]) -> None:
    for way, make in WAYS.items():
        eager = train(*make(small(), None), 12)
        for mode in modes:
            torch._dynamo.reset()
            counting = CompileCounterWithBackend(compiler)
            with torch._dynamo.config.patch(optimize_ddp=mode):
                run, model = make(small(), counting)
                assert_close(train(run, model, 12), eager, f"{way}, {compiler}, optimize_ddp={mode}")
            assert counting.frame_count > 0
            assert isinstance(model, RingDP)
            assert model.stats().steps == STEPS
    torch._dynamo.reset()


def graph_breaks(wrapper: Any) -> int:
    """Of a training; it ends with the parameters and buffers of one that is not compiled, to the bit."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, eager = wrapper(small()), wrapper(small())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know")
        found = train(compiled(model, "eager"), model, 12)
    assert all(map(torch.equal, found, train(eager, eager, 12)))
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@on_ranks()
def test_there_are_no_more_graph_breaks_than_with_ddp() -> None:
    """What RingDP does around the module is not traced."""
    assert 0 < graph_breaks(RingDP) <= graph_breaks(DistributedDataParallel)


def graphs(wrapper: Any, mode: Any) -> tuple[int, int]:
    """How many graphs are compiled in two steps and a quiet one, and in the steps after these."""
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(optimize_ddp=mode):
        model = wrapper(build(), bucket_cap_mb=1)
        run = torch.compile(model, backend=counting)
        inputs = torch.ones(8, WIDTH)
        for _ in range(2):
            run(inputs).sum().backward()
        with model.no_sync():
            run(inputs).sum().backward()
        run(inputs).sum().backward()
        first = counting.frame_count
        for step in range(4):
            model.zero_grad(set_to_none=step % 2 == 0)
            run(inputs).sum().backward()
    torch._dynamo.reset()
    return first, counting.frame_count - first


@on_ranks()
def test_graphs_are_split_where_buckets_end() -> None:
    """By torch's DDPOptimizer, which knows the module in whose forward it is and asks for its bucket_bytes_cap."""
    first, later = graphs(RingDP, True)
    assert (first, later) == graphs(DistributedDataParallel, True)
    assert graphs(RingDP, False) == graphs(DistributedDataParallel, False) == (1, 0)
    assert first > 1, "six layers in pieces of 1 MiB"
    assert later == 0, "nothing is compiled again"


# A backward that is compiled as one graph, too.


@on_ranks()
def test_compiled_backward() -> None:
    eager_model = RingDP(small())
    eager = train(eager_model, eager_model, 12, quiet_step=None)
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = RingDP(small())
        run = torch.compile(model, backend="eager")
        with compiled:
            mine = train(run, model, 12, quiet_step=None)
    count = len(list(model.parameters()))  # buffers are left alone in this mode, as with DDP
    assert_close(mine[:count], eager[:count], "python_reducer")
    torch._dynamo.reset()
    model = RingDP(small())
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match=r"reducer does not work in a compiled backward.*python_reducer"),
    ):
        model(torch.ones(4, 12)).sum().backward()
    torch._dynamo.reset()


# Guards.


@on_ranks()
def test_guards_on_the_wrapper_are_pickled() -> None:
    from torch._dynamo.guards import GuardsStatePickler

    model = RingDP(small())
    values = {id(it): it for module in model.modules() for it in (module, *module.__dict__.values())}
    file = io.BytesIO()
    GuardsStatePickler(values, {}, {}, file).dump(model)
    again = pickle.loads(file.getvalue())
    assert type(again) is DistributedDataParallel, "without a reducer, as torch does it with DDP"
    assert again.module.layers[0].in_features == 12
    assert again.forward_sync_buffers
