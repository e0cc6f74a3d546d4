"""Gluon's Trainer for torch parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.kvstore.create import create
from ringdp.kvstore.keys import check_number
from ringdp.kvstore.store import KVStore
from ringdp.kvstore.updates import resolve

Parameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]


class Trainer:
    """Pushes gradients and pulls parameters at `step`, as ``mxnet.gluon.Trainer``.

        trainer = ringdp.kvstore.Trainer(net, "sgd", {"learning_rate": 0.1})
        loss(net(x), y).sum().backward()
        trainer.step(batch_size * trainer.kvstore.num_workers)

    Parameters become rank 0's. Gradients stay in ``.grad``: clear them as in any torch program.

    Args:
        params: a module, its parameters, or names with parameters; those that require a gradient are trained.
        optimizer: MXNet's name ("sgd", "adam", …) or a class of torch.optim.
        optimizer_params: its arguments, under MXNet's names or torch's.
        kvstore: a store, or the name of one for `create`.
        compression_params: for `KVStore.set_gradient_compression`.
        update_on_kvstore: True (None): the owners update slices, each rank has 1/n of the optimizer's state. False:
            the store adds up gradients, and each rank updates everything; then gradients may be clipped between
            `allreduce_grads` and `update`.

    Raises:
        InvalidArgumentError: no parameters, or arguments that cannot be used.
    """

    def __init__(
        self,
        params: Parameters,
        optimizer: str | Callable[..., torch.optim.Optimizer],
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStore = "dist_sync",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._parameters = {name: it for name, it in _named(params).items() if it.requires_grad}
        if not self._parameters:
            raise InvalidArgumentError("Trainer: there is no parameter that requires a gradient")
        self.kvstore: KVStore = create(kvstore) if isinstance(kvstore, str) else kvstore
        self._on_store = update_on_kvstore is not False
        self._local: torch.optim.Optimizer | None = None
        if compression_params is not None:
            self.kvstore.set_gradient_compression(compression_params)
        if self._on_store:
            self.kvstore.set_optimizer(optimizer, **dict(optimizer_params or {}))
        else:
            kind, numbers = resolve(optimizer, optimizer_params or {})
            self._local = kind(list(self._parameters.values()), **numbers)
        tensors = [it.detach() for it in self._parameters.values()]
        self.kvstore.broadcast(list(self._parameters), tensors, tensors)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's, for its schedulers."""
        return self.kvstore.optimizer if self._local is None else self._local

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set it, the same on all ranks. Raises InvalidArgumentError where it is not a finite number from 0 on."""
        if self._local is None:
            self.kvstore.set_learning_rate(learning_rate)
            return
        rate = check_number("set_learning_rate: a learning rate", learning_rate, at_least=0.0)
        for group in self._local.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Add up the gradients of all ranks, divide by ``batch_size``, and update.

        Args:
            batch_size: 1 over the factor of the sum: the samples of all ranks where losses are sums; the number of
                ranks where each rank's loss is a mean.
            ignore_stale_grad: leave out parameters without a gradient, on all ranks the same.

        Raises:
            InvalidStateError: a parameter has no gradient.
            MismatchError: the ranks do not push the same.
        """
        scale = self._scale(batch_size)
        if self._on_store:
            fresh = self._fresh(ignore_stale_grad)
            grads = [it.grad for it in fresh.values() if it.grad is not None]  # all of them
            values = [it.detach() for it in fresh.values()]
            self.kvstore._exchange(list(fresh), grads, values, scale)
        else:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)

    @torch.no_grad()
    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Put the sum over the ranks into each ``.grad``; with ``update_on_kvstore=False`` only."""
        self._require_local("allreduce_grads")
        fresh = self._fresh(ignore_stale_grad)
        self.kvstore.pushpull(list(fresh), [it.grad for it in fresh.values()])

    @torch.no_grad()
    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Divide the gradients by ``batch_size``, in place, and update; with ``update_on_kvstore=False`` only."""
        optimizer = self._require_local("update")
        scale = self._scale(batch_size)
        if scale != 1.0:
            torch._foreach_mul_(
                [it.grad for it in self._fresh(ignore_stale_grad).values() if it.grad is not None], scale
            )
        optimizer.step()

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer's state to a file of rank 0's host; on all ranks."""
        if self._local is None:
            self.kvstore.save_optimizer_states(path)
        elif self.kvstore.rank == 0:
            torch.save(self._local.state_dict(), path)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Load a file of `save_states`, at any number of ranks; on all ranks."""
        if self._local is None:
            self.kvstore.load_optimizer_states(path)
        else:
            self._local.load_state_dict(torch.load(path, weights_only=True))

    def _fresh(self, ignore_stale_grad: bool) -> dict[str, Tensor]:
        stale = [name for name, it in self._parameters.items() if it.grad is None]
        if stale and not ignore_stale_grad:
            error = InvalidStateError(
                f"parameters without gradient: {', '.join(stale)}. Call backward first, or step(…,"
                " ignore_stale_grad=True) on all ranks to leave them as they are"
            )
            self.kvstore._refuse(error)
            raise error
        return {name: it for name, it in self._parameters.items() if it.grad is not None}

    def _scale(self, batch_size: float) -> float:
        try:
            return 1.0 / check_number("batch_size", batch_size, above=0.0)
        except InvalidArgumentError as error:
            self.kvstore._refuse(error)
            raise

    def _require_local(self, what: str) -> torch.optim.Optimizer:
        if self._local is None:
            raise InvalidStateError(
                f"{what}: the owners update the parameters; make the Trainer with update_on_kvstore=False, or call step"
            )
        return self._local


def _named(params: Parameters) -> dict[str, Tensor]:
    """Names with parameters; those without a name are numbered, as Gluon does."""
    if isinstance(params, nn.Module):
        return dict(params.named_parameters())
    if isinstance(params, Mapping):
        return dict(params)
    named: dict[str, Tensor] = {}
    for index, one in enumerate(params):
        name, tensor = one if isinstance(one, tuple) else (str(index), one)
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"Trainer: params must hold tensors, not {type(tensor).__name__}")
        named[name] = tensor
    return named
