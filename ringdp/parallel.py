"""RingDP: torch's DistributedDataParallel with ringdp's reducer inside."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ringdp.backend import named
from ringdp.errors import InvalidArgumentError
from ringdp.hooks.names import remember_names
from ringdp.model_check import check_same_model
from ringdp.reducer_log import ReducerLog
from ringdp.sync_batch_norm import synchronise_on_cpu

_log = logging.getLogger("ringdp.parallel")

_MIB = 1024 * 1024
_FIRST_BUCKET_BYTES = _MIB
_AVERAGING_BACKENDS = frozenset({"ring", "nccl"})  # those with ReduceOp.AVG

# torch's other arguments: what RingDP does with each, or the sentence that refuses it.
_PASSED_ON = frozenset(
    {
        "dim", "broadcast_buffers", "init_sync", "process_group", "check_reduction", "gradient_as_bucket_view",
        "static_graph", "delay_all_reduce_named_params", "param_to_hook_all_reduce", "device_mesh",
        "forward_sync_buffers",
    }
)  # fmt: skip
_WITHOUT_EFFECT = frozenset({"skip_all_reduce_unused_params", "batched_grad_copy"})  # faster ways to the same result
_REFUSED = {
    "mixed_precision": "RingDP has no mixed_precision: use torch.autocast, or cast the module before wrapping it",
}


@dataclass(frozen=True)
class Stats:
    """What reducing gradients cost in the last backward that synchronised, and in all of them.

    Attributes:
        steps: backwards that synchronised.
        buckets: operations per step.
        bytes: gradient bytes reduced per step.
        backward_s: from the first output or gradient to the last gradient, seconds.
        exposed_wait_s: how long the end of backward waited for communication, seconds.
        total_backward_s: backward_s summed over all steps.
        total_exposed_wait_s: exposed_wait_s summed over all steps.
    """

    steps: int
    buckets: int
    bytes: int
    backward_s: float
    exposed_wait_s: float
    total_backward_s: float
    total_exposed_wait_s: float


class RingDP(DistributedDataParallel):
    """Data parallelism: every rank holds the module, gradients are averaged during backward.

    A drop-in for torch's DistributedDataParallel, which it is a subclass of. What differs:

    - ``.grad`` is a part of its bucket: nothing is copied back. A ``.grad`` that somebody kept stays as it was; a view
      of one (``p.grad.view(-1)``, ``p.grad.detach()``) shows the next step's values.
    - ``find_unused_parameters=None`` (the default): a backward that left parameters without gradient ends as with True
      (zeros count for them, None stays where no rank had one) and a warning names them once. False raises DDP's error
      at the next forward, with their names. True says that it is meant; buckets the graph cannot fill leave early.
    - `load_state_dict` also takes the keys of the bare module.

    Args:
        module: on one device, or spread over several; its parameters and buffers become rank 0's.
        device_ids: the one device of the module, or None.
        output_device: where outputs go, for a module on one device.
        bucket_cap_mb: a bucket leaves when it holds this many MiB; the first one at 1 MiB. A list caps the first,
            second, … bucket one by one, its last number all others.
        find_unused_parameters: see above.
        ddp_arguments: torch's other arguments by their names.

    Raises:
        MismatchError: the ranks' modules differ; names the parameter and what both ranks have.
        InvalidArgumentError: an argument that RingDP does not have.
        RuntimeError, ValueError: as DistributedDataParallel.
    """

    reducer: Any  # ringdp._C.Reducer
    logger: Any  # ReducerLog

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        bucket_cap_mb: float | list[float] | None = 25,
        find_unused_parameters: bool | None = None,
        **ddp_arguments: Any,
    ) -> None:
        arguments, caps_mb = _accepted(ddp_arguments, bucket_cap_mb)
        # Plain attributes before Module.__init__ are fine; DistributedDataParallel calls the methods that read them.
        self._find_unused = find_unused_parameters
        self._caps_bytes = _caps_bytes(caps_mb)
        self._compare_models = bool(arguments.get("init_sync", True))
        super().__init__(
            module,
            device_ids,
            output_device,
            bucket_cap_mb=max(caps_mb),
            find_unused_parameters=bool(find_unused_parameters),
            **arguments,
        )

    # What torch's constructor and __setstate__ call.

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        if self.__dict__.pop("_compare_models", False):
            with named("comparing models"):
                check_same_model(self.module, self.process_group, self.device, ignored=self.parameters_to_ignore)
        return super()._build_params_for_reducer()

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        from ringdp import _C

        names = [param_to_name_mapping[index].removeprefix(".") for index in range(len(parameters))]
        remember_names(parameters, names)
        self.reducer = _C.Reducer(
            parameters,
            names,
            expect_sparse_gradient,
            self.process_group,
            caps_bytes=self._caps_bytes,
            find_unused=self._find_unused,
            average=_averages(self.process_group, self.device_type),
        )
        self.logger = ReducerLog(
            self.reducer,
            strings={
                "backend_name": str(dist.get_backend(self.process_group)),
                "comm_hook": "",
                "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
                "initial_bucket_sizes": ", ".join(str(size) for size in self.reducer.bucket_bytes()),
                "parameter_names": ", ".join(names),
            },
            integers={
                "world_size": self.process_group.size(),
                "rank": self.process_group.rank(),
                "bucket_cap_bytes": self._caps_bytes[-1],
                "find_unused_parameters": int(self._find_unused is not False),
                "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
                "is_multi_device_module": int(self.is_multi_device_module),
                "num_parameter_tensors": len(parameters),
                "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            },
        )
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            bool(self.broadcast_buffers),
            any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)
        _log.debug("%d parameters in buckets of %s bytes", len(parameters), self.reducer.bucket_bytes())

    # A step.

    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        sync = self.require_backward_grad_sync
        if torch.is_grad_enabled():
            outputs = [output] if isinstance(output, torch.Tensor) else list(_find_tensors(output))
            self.reducer.prepare_for_backward(outputs, sync)
        self.require_forward_param_sync = sync and torch.is_grad_enabled()
        self._clear_grad_buffer()
        return output

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """torch's refuses the layers on the CPU."""
        synchronise_on_cpu(module)

    def _sync_buffers(self) -> None:
        if self.process_group.size() > 1 or hasattr(self, "buffer_hook") or self._join_config.enable:
            super()._sync_buffers()

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        with named("buffers"):
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.nn.Module.zero_grad`; with ``set_to_none=False`` whole buckets are zeroed at once."""
        if set_to_none:
            super().zero_grad(set_to_none=True)
            return
        self.reducer.zero_gradients()
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and (name in self.parameters_to_ignore or not parameter.requires_grad):
                parameter.grad.detach_().zero_()

    def stats(self) -> Stats:
        """What reducing gradients cost; reading it costs a call, keeping it two clock readings per step."""
        return Stats(**self.reducer.stats())

    # Communication hooks.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` reduce each bucket; torch's hooks work unchanged.

        The bucket holds this rank's gradients, not divided. `ringdp.hooks.parameter_names` names them. May be called
        once, before the first backward.

        Raises:
            TypeError, ValueError: not a hook, as DistributedDataParallel says it.
            RuntimeError: there is one already.
        """
        self._check_comm_hook(hook)
        self.reducer.register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """torch's check, which would refuse annotations that are text (``from __future__ import annotations``)."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        try:
            signature = inspect.signature(hook, eval_str=True)
        except NameError:  # a name known to type checkers only: nothing to compare with
            return
        bucket = signature.parameters.get("bucket")
        if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, GradBucket):
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            )

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self.reducer.register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Reduce by torch's ``ALLREDUCE`` or ``FP16_COMPRESS`` hook, without Python in backward."""
        self._register_builtin_comm_hook(comm_hook_type)

    # Uneven inputs (torch's Join): a rank without input repeats the others' collectives.

    def _match_all_reduce_for_bwd_pass(self) -> None:
        super()._match_all_reduce_for_bwd_pass()
        self.reducer.shadow_used_map()

    def _match_unused_params_allreduce(self) -> None:
        """Nothing: _match_all_reduce_for_bwd_pass has done it, where it is an operation of its own."""

    # The rest of torch's surface that names the reducer's type.

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            self.process_group = new_process_group
            average = _averages(new_process_group, self.device_type)
            self.reducer._update_process_group(new_process_group, average)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `torch.nn.Module.load_state_dict`; keys without the prefix ``module.`` are taken as the module's own."""
        own = self.state_dict().keys()
        if not any(key in own for key in state_dict) and any(f"module.{key}" in own for key in state_dict):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _accepted(
    arguments: dict[str, Any], bucket_cap_mb: float | list[float] | None
) -> tuple[dict[str, Any], list[float]]:
    """What goes to torch's constructor, and the bucket sizes."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    passed: dict[str, Any] = {}
    listed = arguments.pop("bucket_cap_mb_list", None)
    for name, value in arguments.items():
        if name in _REFUSED:
            if value is not None:
                raise InvalidArgumentError(_REFUSED[name])
        elif name in _PASSED_ON and name in known:
            passed[name] = value
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"RingDP has no argument {name!r}")
    caps = listed or bucket_cap_mb
    if caps is None:
        caps = 25
    caps_mb = [float(cap) for cap in caps] if isinstance(caps, (list, tuple)) else [float(caps)]
    if not caps_mb or min(caps_mb) <= 0:
        raise InvalidArgumentError(f"bucket_cap_mb must be above zero, not {caps!r}")
    return passed, caps_mb


def _caps_bytes(caps_mb: list[float]) -> list[int]:
    caps = [max(1, int(cap * _MIB)) for cap in caps_mb]
    return caps if len(caps) > 1 else [min(_FIRST_BUCKET_BYTES, caps[0]), caps[0]]


def _averages(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the group's backend for this kind of device has ReduceOp.AVG."""
    backends = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return backends.get(device_type, str(dist.get_backend(group))) in _AVERAGING_BACKENDS
