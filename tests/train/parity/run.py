"""Runs one case of the table with torch's DDP, with RingDP and in one process, and says where the results differ.

Everything here runs in the ranks. The groups stay from case to case: meeting anew would take longer than most cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.wrapper import RingDP
from tests.train import models

# Relative and absolute, where two runs may add in another order: a few hundred times the dtype's rounding, for several
# steps of training. Complex numbers are compared by their parts.
_CLOSE = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (2e-5, 2e-6),
    torch.float16: (2e-2, 2e-3),
    torch.bfloat16: (1e-1, 2e-2),
}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: what it is about; the test's name.
        model: builds the module, the same on every rank.
        script: trains it: `script(run, model)` with the wrapped model.
        options: keyword arguments for both wrappers.
        ours: those for RingDP alone.
        theirs: those for DDP alone.
        ddp: whether DDP is a reference; where it is not, `why` says what it does instead.
        alone: whether one process that works through all ranks' batches is a reference; "parameters": for these only.
        exact: whether two ranks give DDP's bits; where not, `why` says why.
        rtol: instead of the dtype's tolerance, for `why`.
        alike: what must have the same bits on all ranks: "all", "parameters" (gradients are local at the end) or "".
        strides: whether gradients lie in memory as DDP's do.
        raises: both wrappers raise, and this is in both messages.
        may_raise: the same where this torch's DDP raises it; where it does not, the results are compared.
        worlds: numbers of ranks it is for.
        why: see `ddp`, `exact`, `rtol` and `may_raise`.
    """

    name: str
    model: Callable[[], nn.Module]
    script: Callable[[Run, Any], None]
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    ddp: bool = True
    alone: bool | str = True
    exact: bool = True
    rtol: float | None = None
    alike: str = "all"
    strides: bool = True
    raises: str | None = None
    may_raise: str | None = None
    worlds: tuple[int, ...] = (2, 3)
    why: str = ""


class Alone(nn.Module):
    """One process in the place of the wrapper: it sees all ranks' batches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Run:
    """One training: who wraps the model, whose batches this process works through, and what came out."""

    def __init__(self, kind: str, case: Case, options: dict[str, Any]) -> None:
        self.kind = kind  # "DDP", "RingDP", "alone", or "broken": RingDP in a group of its own
        self.case = case
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # also where a group is smaller
        self.parts = list(range(self.world)) if kind == "alone" else [self.rank]
        self.results: dict[str, Any] = {}
        self._options = options
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """The module in this run's wrapper; its state is compared at the end."""
        if self.kind in ("RingDP", "broken"):
            wrapped: nn.Module = RingDP(module, **{**self.case.options, **options, **self.case.ours, **self._options})
        elif self.kind == "DDP":
            wrapped = DistributedDataParallel(module, **{**self.case.options, **options, **self.case.theirs})
        else:
            wrapped = Alone(module)
        self._models.append(wrapped)
        return wrapped

    def watch(self, model: nn.Module) -> Any:
        """Compare the state of this one too."""
        self._models.append(model)
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Compare its state too."""
        self._optimizers.append(optimizer)
        return optimizer

    def keep(self, name: str, value: Any) -> None:
        """Compare what this rank sees with what it sees under DDP."""
        if self.kind == "alone":
            return  # what a rank sees is its own
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        self.results[f"{name} #{sum(key.startswith(f'{name} #') for key in self.results)}"] = copied

    def losses(self, model: nn.Module, step: int) -> Iterator[Tensor]:
        """The loss of each part of the step's batch that this process has, to be added up by backward."""
        module = model.module if isinstance(model.module, nn.Module) else model
        feed = getattr(module, "feed", _feed)
        objective = getattr(module, "objective", _objective)
        for rank in self.parts:
            torch.default_generator.manual_seed(1000 * step + rank)  # the other devices' take longer than a step
            args, kwargs, target = feed(step, rank)
            yield objective(model(*args, **kwargs), target) / len(self.parts)

    def backward(self, model: nn.Module, step: int, **how: Any) -> float:
        """Forward and backward on this process's batches of a step; returns the loss."""
        total = 0.0
        for loss in self.losses(model, step):
            loss.backward(**how)
            total += loss.item()
        return total

    def train(self) -> dict[str, Any]:
        """All that can be compared, by name; an exception under "raised"."""
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.case.script(self, self.wrap(self.case.model()))
        except Exception as error:
            expected = self.case.raises or self.case.may_raise
            if expected is None:
                raise
            return {"raised": expected in str(error) or f"{type(error).__name__}: {error}"}
        for number, model in enumerate(self._models):
            self.results.update(_state_of_model(model, f" of model {number}" if number else "", self.case.strides))
        for number, optimizer in enumerate(self._optimizers):
            self.results.update(_state_of_optimizer(optimizer, number))
        return self.results


def _feed(step: int, rank: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    x, y = models.batch(step, rank)
    return (x,), {}, y


def _objective(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def _state_of_model(model: nn.Module, suffix: str, strides: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.") + suffix
        state[f"parameter {name}"] = parameter.detach().clone()
        grad = parameter.grad
        state[f"gradient {name}"] = None if grad is None else grad.detach().clone()
        if strides and grad is not None and not grad.is_sparse:
            state[f"strides of gradient {name}"] = grad.stride()
    for name, buffer in model.named_buffers():
        state[f"buffer {name.removeprefix('module.')}{suffix}"] = buffer.detach().clone()
    return state


def _state_of_optimizer(optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor | int | float | type(None)):
                state[f"optimizer {number}: {key} of {index}"] = value
    return state


# Groups.


_counter = itertools.count()
_groups: dict[str, Any] = {}


@contextlib.contextmanager
def world(backend: str, folder: str) -> Iterator[None]:
    """This backend's group as the default one; "own" is a group of this rank alone."""
    if not _groups:
        import ringdp  # noqa: F401  (registers ring)

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        method = f"file://{folder}/parity-{next(_counter)}"
        dist.init_process_group("ring", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        _groups["ring"] = dist.group.WORLD
        _groups["gloo"] = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        _groups["own"] = [dist.new_group([other]) for other in range(size)][rank]
    distributed_c10d._update_default_pg(_groups[backend])
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(_groups["ring"])


def leave() -> None:
    """Leave the groups: the other tests of these processes make their own."""
    if _groups:
        _groups.clear()
        dist.destroy_process_group()


# Comparing.


def differences(expected: dict[str, Any], actual: dict[str, Any], *, exact: bool, rtol: float | None) -> list[str]:
    """One line per name where two results differ."""
    found = [f"{name}: only one has it" for name in expected.keys() ^ actual.keys()]
    for name in expected.keys() & actual.keys():
        text = _difference(expected[name], actual[name], exact, rtol)
        if text:
            found.append(f"{name}: {text}")
    return sorted(found)


def _difference(expected: Any, actual: Any, exact: bool, rtol: float | None) -> str:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        if type(expected) is type(actual) and expected == actual:
            return ""
        return f"{_short(expected)} there, {_short(actual)} here"
    if (expected.layout, expected.dtype, expected.shape) != (actual.layout, actual.dtype, actual.shape):
        return f"{_short(expected)} there, {_short(actual)} here"
    one, other = _plain(expected), _plain(actual)
    if one.isnan().any():
        return "there are NaNs"
    if torch.equal(one, other):
        return ""
    largest = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    if exact or not one.is_floating_point():
        return f"not the same bits: up to {largest:.3g} apart"
    relative, absolute = _CLOSE[one.dtype] if rtol is None else (rtol, rtol)
    if torch.allclose(one, other, rtol=relative, atol=absolute):
        return ""
    return f"up to {largest:.3g} apart, allowed are {relative:g} relative and {absolute:g} absolute"


def _plain(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _short(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} {value.layout}" if isinstance(value, Tensor) else repr(value)[:200]


def digest(results: dict[str, Any], alike: str) -> str:
    """What must be the same on all ranks, as a number to compare."""
    kinds = {"all": ("parameter ", "gradient "), "parameters": ("parameter ",), "": ()}[alike]
    total = hashlib.sha256()
    for name, value in sorted(results.items()):
        if kinds and name.startswith(kinds) and " #" not in name:
            total.update(name.encode())
            if isinstance(value, Tensor):
                total.update(_plain(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                total.update(repr(value).encode())
    return total.hexdigest()


def compare(case: Case, folder: str, *, backend: str, kind: str, options: dict[str, Any]) -> tuple[list[str], str]:
    """Run a case with its references and with `kind` on `backend`: where they differ, and the digest of the ranks."""

    def train(kind: str, backend: str) -> dict[str, Any]:
        with world(backend, folder):
            return Run(kind, case, options).train()

    actual = train(kind, backend)
    found: list[str] = []
    if case.ddp:
        expected = train("DDP", "gloo")
        exact = case.exact and int(os.environ["WORLD_SIZE"]) <= 2
        found += [f"DDP, {text}" for text in differences(expected, actual, exact=exact, rtol=case.rtol)]
    if case.alone and case.raises is None and "raised" not in actual:
        expected = train("alone", "gloo")
        shared = {name: value for name, value in actual.items() if " #" not in name}
        if case.alone == "parameters":
            expected, shared = (
                {name: value for name, value in results.items() if name.startswith("parameter ")}
                for results in (expected, shared)
            )
        found += [f"one process, {text}" for text in differences(expected, shared, exact=False, rtol=case.rtol)]
    if case.raises is not None or "raised" in actual:
        raised = actual.get("raised", "nothing")
        found += [] if raised is True else [f"raised {raised}"]
        leave()  # what a failed backward has left behind would meet the next case
    return found, digest(actual, case.alike)
