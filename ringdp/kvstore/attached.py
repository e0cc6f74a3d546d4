"""A model whose gradients are pushed while backward runs: `KVStore.attach`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.kvstore.keys import check_number, flat

if TYPE_CHECKING:
    from ringdp.kvstore.table import Lot, Table

_log = logging.getLogger("ringdp.kvstore")
_FIRST_BUNDLE_BYTES = 1 << 20
_BUNDLE_BYTES = 8 << 20


@dataclass
class _Bundle:
    """Parameters whose gradients leave together.

    Attributes:
        missing: gradients that this step's backward has not brought yet.
        inputs: gradients on their way, kept alive.
        works: the operations; empty before they leave.
    """

    lot: Lot
    parameters: list[nn.Parameter]
    sums: list[Tensor]
    missing: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)


class Attached:
    """The parameters of a model as keys of a store, by name; made by `KVStore.attach`.

        attached = kv.attach(model)
        for x, y in batches:
            model.zero_grad()
            loss(model(x), y).backward()      # gradients leave as they come
            attached.step()                   # owners update their slices, all ranks get the values

    Parameters become rank 0's. Buffers (running means) stay each rank's own. A parameter without gradient counts with
    zeros. Several backwards for one step: all but the last under `no_sync`. With gradient compression nothing leaves
    before `step`.
    """

    def __init__(self, table: Table, named: dict[str, nn.Parameter]) -> None:
        """Of `named`, parameters by their keys, which `table` has."""
        self._table = table
        self._bundles = self._make_bundles(named)
        self._next = 0  # the bundle that leaves next
        self._sync = True
        self._begun: set[str] = set()
        self._warned = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index, name))
            for index, bundle in enumerate(self._bundles)
            for name, parameter in zip(bundle.lot.names, bundle.parameters, strict=True)
        ]

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Wait for the pushes, update, and put the new values into the parameters.

        Args:
            scale: the sums of the gradients are multiplied by it; the same on all ranks.

        Raises:
            InvalidArgumentError: the scale is not a finite number.
            MismatchError: the ranks differ in their models, optimizers or settings.
        """
        try:
            scale = check_number("step: scale", scale)
        except InvalidArgumentError as error:
            self._refuse(error)
        self._warn_of_missing()
        if not self._table.overlaps:
            self._step_at_once(scale)
            return
        self._leave(everything=True)
        gathered: list[tuple[_Bundle, list[Tensor], list[dist.Work]]] = []
        for bundle in self._bundles:
            for work in bundle.works:
                work.wait()
            if bundle.works:
                bundle.lot.transfer.unpack(bundle.sums)
            if scale != 1.0:
                torch._foreach_mul_(bundle.sums, scale)
            self._table.apply(dict(zip(bundle.lot.names, bundle.sums, strict=True)))
            slices = [self._table.slices[name] for name in bundle.lot.names]
            targets = [_flat_or_new(parameter) for parameter in bundle.parameters]
            with self._table.operations.named(f"pull {bundle.lot.label}, after times {scale}"):
                works = bundle.lot.transfer.all_gather(slices, targets, wait=False)
            gathered.append((bundle, targets, works))
        for bundle, targets, works in gathered:
            for work in works:
                work.wait()
            if works:
                bundle.lot.transfer.spread(targets)
            for parameter, target in zip(bundle.parameters, targets, strict=True):
                if not parameter.is_contiguous():
                    parameter.copy_(target.view(parameter.shape))
        self._begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside the block add to the gradients, which do not leave; the next backward outside sends them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def pull(self) -> None:
        """Put the store's values into the parameters, on all ranks: after `KVStore.load_state_dict`."""
        self._table.settle()
        for bundle in self._bundles:
            self._table.pull(
                {name: [it.detach()] for name, it in zip(bundle.lot.names, bundle.parameters, strict=True)}
            )

    def discard(self) -> None:
        """Forget the gradients of this step, on all ranks, after those on their way have arrived."""
        if self._table.overlaps:
            self._leave(everything=True)
            for bundle in self._bundles:
                for work in bundle.works:
                    work.wait()
        self._begin()

    def detach(self) -> None:
        """Take the hooks off the parameters. The keys stay in the store."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # Private methods.

    def _make_bundles(self, named: dict[str, nn.Parameter]) -> list[_Bundle]:
        """In the order in which gradients come as a rule: the reverse of the parameters'."""
        bundles: list[list[str]] = []
        held, kind = 0, None
        for name in reversed(named):
            parameter = named[name]
            limit = _FIRST_BUNDLE_BYTES if len(bundles) <= 1 else _BUNDLE_BYTES
            this = parameter.dtype, parameter.device
            if not bundles or this != kind or held >= limit:
                bundles.append([])
                held, kind = 0, this
            bundles[-1].append(name)
            held += parameter.numel() * parameter.element_size()
        return [self._bundle(names, named) for names in bundles]

    def _bundle(self, names: list[str], named: dict[str, nn.Parameter]) -> _Bundle:
        sums = [torch.empty_like(self._table.slices[name]) for name in names]
        return _Bundle(self._table.lot(names), [named[name] for name in names], sums, len(names))

    def _hook(self, index: int, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if not self._sync:
                return
            if name in self._begun:
                self._refuse(
                    InvalidStateError(
                        f"the gradient of {name!r} came twice in one step: call step() after each backward, or run all"
                        " backwards but the last under no_sync()"
                    )
                )
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                self._refuse(
                    InvalidArgumentError(f"the gradient of {name!r} is sparse, and the store takes dense ones")
                )
            self._begun.add(name)
            self._bundles[index].missing -= 1
            if self._bundles[index].missing == 0 and self._table.overlaps:
                with torch.no_grad():
                    self._leave(everything=False)

        return arrived

    def _refuse(self, error: Exception) -> NoReturn:
        self._table.operations.refuse(error)
        raise error

    def _leave(self, *, everything: bool) -> None:
        """Send the bundles that are complete, in their order on all ranks; or all of them, with zeros for the rest."""
        while self._next < len(self._bundles):
            bundle = self._bundles[self._next]
            if bundle.missing and not everything:
                return
            self._table.settle()
            bundle.inputs = [_gradient(parameter) for parameter in bundle.parameters]
            with self._table.operations.named(f"push {bundle.lot.label}{self._table.purpose(1.0)}"):
                bundle.works = bundle.lot.transfer.reduce_scatter(
                    bundle.inputs, bundle.sums, self._table.average, wait=False
                )
            self._next += 1

    def _step_at_once(self, scale: float) -> None:
        everything = [
            pair for bundle in self._bundles for pair in zip(bundle.lot.names, bundle.parameters, strict=True)
        ]
        shaped = {name: [_gradient(parameter).view(parameter.shape)] for name, parameter in everything}
        self._table.settle()
        self._table.push(shaped, scale)
        self._table.pull({name: [parameter.detach()] for name, parameter in everything})
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._begun.clear()
        for bundle in self._bundles:
            bundle.missing = len(bundle.lot.names)
            bundle.inputs, bundle.works = [], []

    def _warn_of_missing(self) -> None:
        missing = [
            name
            for bundle in self._bundles
            for name, parameter in zip(bundle.lot.names, bundle.parameters, strict=True)
            if parameter.grad is None
        ]
        if missing and not self._warned:
            self._warned = True
            _log.warning("parameters without gradient count with zeros: %s", ", ".join(missing))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that require a gradient, by name. Raises InvalidArgumentError where there is none."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    named = {name: it for name, it in model.named_parameters() if it.requires_grad}
    if not named:
        raise InvalidArgumentError("attach: the model has no parameter that requires a gradient")
    return named


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return flat(parameter.grad)


def _flat_or_new(parameter: nn.Parameter) -> Tensor:
    """Flat memory for the values: the parameter's own where it is contiguous."""
    if parameter.is_contiguous():
        return parameter.detach().view(-1)
    return torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
