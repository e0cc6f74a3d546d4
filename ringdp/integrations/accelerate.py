"""Hugging Face Accelerate: `RingAccelerator` in place of ``Accelerator``, or `use_ringdp` on one that exists."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

import ringdp
from ringdp import config
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidStateError
from ringdp.integrations.libraries import imported

if TYPE_CHECKING:
    import accelerate
else:
    accelerate = imported("accelerate", package="accelerate>=1.15")

AnyAccelerator = TypeVar("AnyAccelerator", bound="accelerate.Accelerator")

_DATA_PARALLEL = (accelerate.DistributedType.MULTI_CPU, accelerate.DistributedType.MULTI_GPU)


class RingAccelerator(accelerate.Accelerator):
    """An Accelerator that joins the job by `ringdp.init` and whose `prepare` gives a RingDP.

    With one rank, models stay unwrapped, as Accelerate leaves them.

    Args:
        cpu: as Accelerator's; None is True where `ringdp.init` picked the CPU.
        ringdp_arguments: for RingDP's constructor; they go before those of a ``DistributedDataParallelKwargs`` handler.
        accelerator_arguments: Accelerator's own, by their names.

    Raises:
        InvalidStateError: Accelerate is configured for another kind of training than data parallelism (FSDP, DeepSpeed,
            …).
        ValueError: an ``InitProcessGroupKwargs`` handler names a backend that Accelerate does not have on CPUs.
    """

    def __init__(
        self,
        *,
        cpu: bool | None = None,
        ringdp_arguments: dict[str, Any] | None = None,
        **accelerator_arguments: Any,
    ) -> None:
        if not dist.is_initialized():
            ringdp.init(device="cpu" if cpu else None)
        if cpu is None:
            cpu = ringdp.device().type == "cpu"
        with _ranks_in_environment():
            super().__init__(cpu=cpu, **accelerator_arguments)
        use_ringdp(self, **(ringdp_arguments or {}))


def use_ringdp(accelerator: AnyAccelerator, **ringdp_arguments: Any) -> AnyAccelerator:
    """Let ``accelerator.prepare`` wrap models in RingDP from here on; returns the accelerator.

    For an Accelerator that other code makes, such as the Trainer's. The process group stays the one that it found:
    call `ringdp.init` before the first Accelerator, PartialState or TrainingArguments; on CPUs Accelerate takes gloo
    otherwise.

    Args:
        accelerator: its attribute ``prepare_model`` is replaced, and in an elastic job ``backward``.
        ringdp_arguments: for RingDP's constructor; they go before those of a ``DistributedDataParallelKwargs`` handler.

    Raises:
        InvalidStateError: as `RingAccelerator`.
    """
    kind = accelerator.distributed_type
    if kind != accelerate.DistributedType.NO and kind not in _DATA_PARALLEL:
        raise InvalidStateError(
            f"Accelerate is configured for {kind.value}, and RingDP is for plain data parallelism (MULTI_CPU or"
            " MULTI_GPU): leave out the plugin or the ACCELERATE_USE_… variable that chose it, or leave out RingDP"
        )
    if kind == accelerate.DistributedType.MULTI_CPU and "ring" not in str(dist.get_backend()):
        warnings.warn(
            f"Accelerate made the process group itself, with {dist.get_backend()}; RingDP works on it, slower than on"
            " ring: call ringdp.init() before the first Accelerator, PartialState or TrainingArguments",
            stacklevel=2,
        )
    accelerator.prepare_model = functools.partial(
        _prepare_model, accelerator, accelerator.prepare_model, ringdp_arguments
    )
    if config.elastic():
        accelerator.backward = functools.partial(_backward, accelerator.backward)
    return accelerator


def _backward(backward: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Accelerator.backward of an elastic job, behind which there may be fewer ranks: Accelerate keeps their number."""
    backward(*arguments, **named)
    for state in (accelerate.state.PartialState, accelerate.state.AcceleratorState):
        if state._shared_state.get("num_processes", 0) > dist.get_world_size():
            state._shared_state |= {"num_processes": dist.get_world_size(), "process_index": dist.get_rank()}


def _prepare_model(
    accelerator: accelerate.Accelerator,
    prepare: Callable[..., torch.nn.Module],
    ringdp_arguments: dict[str, Any],
    model: torch.nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> torch.nn.Module:
    """Accelerator.prepare_model, which places, casts and compiles; the wrapping is ours."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    prepared_before = getattr(model, "_is_accelerate_prepared", False)
    if not accelerator.use_distributed or not trains or evaluation_mode or prepared_before:
        return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode or not trains)
    prepared = prepare(model, device_placement=device_placement, evaluation_mode=True)
    compiled_here = getattr(prepared, "_orig_mod", None) if prepared is not model else None
    wrapped = _wrapped(accelerator, ringdp_arguments, prepared if compiled_here is None else compiled_here)
    if compiled_here is not None:
        wrapped = _compiled(accelerator, wrapped)
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
    return wrapped


def _wrapped(accelerator: accelerate.Accelerator, arguments: dict[str, Any], model: torch.nn.Module) -> torch.nn.Module:
    handler = accelerator.ddp_handler
    device = accelerator.device
    everything: dict[str, Any] = {"device_ids": None if device.type == "cpu" else [device]}
    everything |= {} if handler is None else handler.to_kwargs()
    wrapped = RingDP(model, **(everything | arguments))
    if handler is not None:
        handler.register_comm_hook(wrapped)
    return wrapped


def _compiled(accelerator: accelerate.Accelerator, wrapped: torch.nn.Module) -> torch.nn.Module:
    """The wrapped model, compiled with the Accelerator's settings, which compiles after wrapping."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.use_regional_compilation:
        return accelerate.utils.compile_regions(wrapped, **plugin.to_kwargs())
    compiled: Any = torch.compile(wrapped, **plugin.to_kwargs())
    return compiled


@contextlib.contextmanager
def _ranks_in_environment() -> Iterator[None]:
    """RANK and its kin for the time that Accelerate reads them, where the launcher (srun, mp.spawn) did not set them.

    Accelerate reads them even when the process group exists, and leaves some of its own behind.
    """
    if dist.get_world_size() == 1 or "LOCAL_RANK" in os.environ:
        yield
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    ranks = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": ringdp.local_rank()}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    os.environ.setdefault("MASTER_ADDR", "localhost")  # read, and not used: the process group exists
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
