"""Parameters that are DTensors, spread over other ranks than those that RingDP averages over (tensor parallelism).

The module keeps its DTensors: the optimizer, gradient clipping and checkpoints see them as ever. (torch's DDP makes
plain attributes of them, and the wrapped module has no parameters left.) The reducer gets a plain leaf for each, on the
memory of this rank's part. Autograd accumulates into the DTensor; then the leaf's ``.grad`` becomes the local part of
that gradient, the reducer is notified, and the mean that it writes into the leaf's ``.grad`` becomes the local part
again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringdp import refusals
from ringdp.compression.parameters import clean_name
from ringdp.ddp.batch_weight import BatchWeight
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.parameter_changes import ReducedParameters
from ringdp.errors import InvalidArgumentError


@dataclass
class _Part:
    """One DTensor parameter, and the leaf that stands for it in the reducer."""

    name: str
    whole: Any  # the DTensor
    leaf: torch.nn.Parameter
    places: list[tuple[torch.nn.Module, str]]
    index: int | None = None  # the reducer's


class ShardedParameters(Feature):
    """The DTensor parameters of a module. One thread at a time, as forward and backward of a step are."""

    made_with_reducer = ("_parts", "_reducer")
    _parts: Sequence[_Part] = ()
    _reducer: Any = None
    _finish_is_queued = False

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._parts)

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        return {"dtensor": ""} if self._parts else {}

    @contextlib.contextmanager
    def as_leaves(self) -> Iterator[None]:
        """Inside the block the module has the leaves in place of its DTensors, for torch's code for plain
        parameters."""
        self._put([part.leaf for part in self._parts])
        try:
            yield
        finally:
            self.put_back()

    def take_out(self, ddp: FeaturedDDP) -> None:
        """Find them; the module has the leaves in their places until they are put back.

        Raises:
            InvalidArgumentError: one is spread over ranks of the wrapper's group, whose parts are not to be averaged.
        """
        self._parts = _parts_of(ddp.module, ddp.process_group)
        self._put([part.leaf for part in self._parts])

    def put_back(self) -> None:
        self._put([part.whole for part in self._parts])

    def _put(self, parameters: Sequence[Any]) -> None:
        for part, parameter in zip(self._parts, parameters, strict=True):
            for owner, name in part.places:
                owner._parameters[name] = parameter

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        """Notify the reducer of gradients from now on."""
        self._reducer = ddp.reducer
        watched = ddp.ringdp_features[ReducedParameters].watched
        trainable = [one.parameter for one in watched if one.parameter.requires_grad]
        positions = {id(parameter): index for index, parameter in enumerate(trainable)}
        weighted = ddp.ringdp_features[BatchWeight].mode is not None  # micro-batches may have different weights
        me = weakref.ref(self)  # the wrapper owns this; the module's parameters may live on without it
        for part in self._parts:
            part.index = positions.get(id(part.leaf))
            if part.index is not None:
                hook = functools.partial(_arrived, me, part)
                part.whole.register_post_accumulate_grad_hook(hook)
                if weighted:
                    part.whole.register_hook(functools.partial(_weighted, me))

    def before_forward(self, ddp: FeaturedDDP) -> None:
        """Repeat on the leaves the changes made to the DTensors since the last call.

        Raises:
            InvalidArgumentError: a change that RingDP follows for plain parameters only.
        """
        for part in self._parts:
            if part.whole.requires_grad and part.index is None:
                raise InvalidArgumentError(
                    f"parameter {part.name} is a DTensor that was unfrozen after wrapping, which RingDP notices for "
                    "plain parameters only: unfreeze it, then wrap the module"
                )
            if hasattr(part.whole, "_in_backward_optimizers"):
                refusals.refuse("dtensor", "optimizer in backward")
            local = part.whole._local_tensor
            if part.leaf.data_ptr() != local.data_ptr():
                part.leaf.data = local.detach()
            _same_grad_dtype(part.leaf, part.whole)
            if part.leaf.requires_grad != part.whole.requires_grad:
                part.leaf.requires_grad_(part.whole.requires_grad)

    def before_backward(self, ddp: FeaturedDDP) -> None:
        self._finish_is_queued = False
        for part in self._parts:
            part.leaf.grad = None if part.whole.grad is None else part.whole.grad._local_tensor

    def arrived(self, part: _Part) -> None:
        gradient = part.whole.grad
        if gradient._local_tensor.shape != part.leaf.shape:  # spread another way than its parameter
            gradient = part.whole.grad = gradient.redistribute(placements=part.whole.placements)
        part.leaf.grad = gradient._local_tensor
        self._reducer._autograd_hook(part.index)
        if not self._finish_is_queued:  # runs after the reducer's own, which is in the queue by now
            self._finish_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """The reducer has put the means into the leaves' gradients, also where this rank had none."""
        from torch.distributed.tensor import DTensor

        self._finish_is_queued = False
        for part in self._parts:
            mean, gradient = part.leaf.grad, part.whole.grad
            if mean is None or (gradient is not None and gradient._local_tensor is mean):
                continue
            spec = part.whole._spec if gradient is None else gradient._spec
            part.whole.grad = DTensor(mean, spec, requires_grad=False)


def _parts_of(module: torch.nn.Module, group: dist.ProcessGroup) -> list[_Part]:
    """The DTensors of `module`. Raises InvalidArgumentError as `ShardedParameters.take_out`."""
    if "torch.distributed.tensor" not in sys.modules:
        return []  # there are none yet, and importing it takes a second
    from torch.distributed.tensor import DTensor

    parts: dict[int, _Part] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in parts:
                full_name = clean_name(f"{prefix}.{name}" if prefix else name)
                _check_mesh(full_name, parameter, group)
                leaf = torch.nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
                _same_grad_dtype(leaf, parameter)
                parts[id(parameter)] = _Part(full_name, parameter, leaf, [])
            parts[id(parameter)].places.append((owner, name))
    return list(parts.values())


def _arrived(me: weakref.ref[ShardedParameters], part: _Part, _parameter: torch.Tensor) -> None:
    sharded = me()
    if sharded is not None:
        sharded.arrived(part)


def _same_grad_dtype(leaf: torch.nn.Parameter, parameter: Any) -> None:
    if hasattr(leaf, "grad_dtype") and leaf.grad_dtype != parameter.grad_dtype:  # torch 2.10 and later
        leaf.grad = None
        leaf.grad_dtype = parameter.grad_dtype


def _weighted(me: weakref.ref[ShardedParameters], gradient: torch.Tensor) -> torch.Tensor | None:
    """A gradient scaled to be added to those of other micro-batches; the reducer does that for plain parameters."""
    sharded = me()
    factor = 1.0 if sharded is None else sharded._reducer.incoming_factor()
    if factor == 1.0:
        return None
    return torch.zeros_like(gradient) if factor == 0.0 else gradient * factor


def _check_mesh(name: str, parameter: Any, group: dist.ProcessGroup) -> None:
    here = dist.get_rank()
    spread_over = {int(rank) for rank in parameter.device_mesh.mesh.flatten()}
    both = sorted((spread_over & set(dist.get_process_group_ranks(group))) - {here})
    if both:
        raise InvalidArgumentError(
            f"parameter {name} is a DTensor over ranks {sorted(spread_over)}, and RingDP on rank {here} would average "
            f"it with {both} of them, which hold other parts: give RingDP the mesh's other dimension "
            "(device_mesh=mesh['replicate']); a module of fully_shard needs no RingDP"
        )
