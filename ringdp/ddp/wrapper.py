"""RingDP: torch's DistributedDataParallel with ringdp's reducer inside."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel.distributed import _find_tensors

from ringdp import config, refusals
from ringdp.config import report_every
from ringdp.ddp import in_use
from ringdp.ddp.arguments import (
    accepted,
    bucket_caps,
    default_cap_mb,
    for_torch,
    growing_caps,
    line_mesh,
    reduction_dtype,
    shows_all_arguments,
)
from ringdp.ddp.batch_weight import BatchWeight
from ringdp.ddp.comm_hooks import CommHooks
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.divergence.options import Guard, ReplicaGuard
from ringdp.ddp.dtensors import ShardedParameters
from ringdp.ddp.elastic import Elastic
from ringdp.ddp.features import Features
from ringdp.ddp.finalization import AutomaticFinalization
from ringdp.ddp.gradient_memory import allowed_pool, on_cpu
from ringdp.ddp.listeners import Listeners
from ringdp.ddp.logging_data import ReducerLog
from ringdp.ddp.mixed_precision import MixedPrecision, in_backward
from ringdp.ddp.model_check import check_same_model
from ringdp.ddp.module_state import SentState
from ringdp.ddp.overflow import Overflows
from ringdp.ddp.own_methods import OwnMethods
from ringdp.ddp.parameter_changes import ReducedParameters
from ringdp.ddp.refusal import COMPARING_MODELS, refuse_capture, refuse_distributed_autograd, report_refusals
from ringdp.ddp.reproducible import Reproducible
from ringdp.ddp.step_report import StepReport
from ringdp.ddp.sync_batch_norm import synchronise_on_cpu
from ringdp.ddp.unaveraged import Unaveraged
from ringdp.ddp.uneven_inputs import UnevenInputs
from ringdp.errors import InvalidStateError
from ringdp.job.backend import BACKEND, backend_of, connect_log, has_average, named
from ringdp.job.elastic import size_at_start
from ringdp.job.placement import Placement, kind_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringdp.compression import Compression, CompressorLike
    from ringdp.ddp.arguments import DDPArguments

_log = logging.getLogger("ringdp.parallel")


class RingDP(OwnMethods, CommHooks, UnevenInputs, AutomaticFinalization):
    """Data parallelism: every rank holds the module, gradients are averaged during backward.

    A drop-in for torch's DistributedDataParallel, which it is a subclass of. What differs:

    - ``.grad`` is a part of its bucket: nothing is copied back. As long as it is only zeroed in place, all tensors and
      arrays on its memory (``p.grad.view(-1)``, ``p.grad.numpy()``) show each step's mean. After ``.grad = None`` a
      ``.grad`` that the program keeps stays as it was, and a view of one may show the next step's values. With
      ``gradient_as_bucket_view=False`` it is memory of its own, which costs a copy into the bucket and one back.
    - Gradients are averaged in the type that ``parameter.grad_dtype`` gives them.
    - A parameter that was frozen or unfrozen (``requires_grad_``) is found at the next forward that trains and
      synchronises: the buckets are laid out anew. Ranks that do not freeze the same get a MismatchError.
    - A parameter that was replaced, added or removed after wrapping is found there, too. New ones become rank 0's,
      unless ``init_sync=False``; ranks that do not change the same get a MismatchError.
    - ``find_unused_parameters=None`` (the default): a backward that left parameters without gradient ends as with True
      (zeros count for them, None stays where no rank had one) and a warning names them once. False raises DDP's error
      at the next forward, with their names. True: no warning, and buckets that the graph cannot fill leave early.
    - `load_state_dict` also takes the keys of the bare module.

    Args:
        module: on one device, or spread over several; its parameters and buffers become rank 0's.
        device_ids: the one device of the module, or None.
        bucket_cap_mb: a bucket leaves when it holds this many MiB; the first one at 1 MiB, each later one at twice as
            much, until that is reached. None: 4 over ring, and from 16 ranks on a quarter of their number, up to 25; 25
            over other backends and with compression. A list caps the first, second, … bucket one by one, its last
            number all others.
        find_unused_parameters: see above.
        compression: how gradients are compressed on their way: a name ("int8", "int4", "bf16", "fp16", "auto", or one
            that was registered), a compressor of `ringdp.compression` or of your own, None (the default): not at all.
            A `ringdp.Compression` also has rules by name, size or type of module, a warm-up of exact steps, and what
            "auto" may choose among. Biases, norms and tensors under 1,024 elements stay exact unless a rule says
            otherwise.
        scaler: a torch.amp.GradScaler that scales this module's losses, so that compression's residuals stay right when
            the scale changes. `ringdp.amp.GradScaler` need not be given.
        reduce_dtype: average gradients in this dtype and round once, for parameters of lower precision
            (torch.float32 for bfloat16 or float16 ones); None: in their own.
        weight: the weight of a rank's batch in the average. None (the default): all ranks count the same, as in DDP.
            "samples": the first dimension of the first tensor that its forward gets; "call": the number given to
            `set_weight` before each forward. Then the gradient is the one of the mean loss over the samples of all
            ranks, and of all micro-batches under `no_sync` (do not divide their losses by how many they are).
        gradient_pool: keep the memory of gradients on the CPU between steps, in huge pages, instead of getting it from
            the kernel anew in every backward; see `gradient_memory`. False leaves torch's CPU allocator as it is, and
            so does RINGDP_GRADIENT_POOL=0.
        guard: how replicas are compared: a `ringdp.Guard`, or its number of steps, such as 100, within which a tensor
            that differs between ranks is an error; 0: not at all. None, the default: within 500 steps, with a warning.
        reproducible: every element's mean has the same bits for any size and order of buckets, transport and number of
            hosts, and any placement of the ranks on them, at one number of ranks. This also changes every other
            all-reduce of `process_group`: they add in rank order. The documentation ("the same bits") has its cost on
            several hosts of several ranks.
        *positional: torch's other arguments in its order.
        **named: torch's other arguments by their names; the documentation ("moving from DDP") has what each does here.

    Raises:
        MismatchError: the ranks' modules differ; names the parameter and what both ranks have.
        InvalidArgumentError: a value that cannot be used; says what is wanted.
        TypeError: an argument that RingDP does not have.
        RuntimeError, ValueError: as DistributedDataParallel.
    """

    @shows_all_arguments
    @report_refusals
    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | list[float] | None = None,
        find_unused_parameters: bool | None = None,
        *positional: Any,
        compression: CompressorLike | Compression = None,
        scaler: torch.amp.GradScaler | None = None,
        reduce_dtype: torch.dtype | None = None,
        weight: str | None = None,
        gradient_pool: bool = True,
        guard: Guard | int | None = None,
        reproducible: bool = False,
        **named: Unpack[DDPArguments],
    ) -> None:
        common = (module, device_ids, output_device, dim, broadcast_buffers, init_sync, process_group, bucket_cap_mb)
        arguments = accepted((*common, find_unused_parameters, *positional), dict(named))
        if process_group is None and arguments.get("device_mesh") is None and not dist.is_initialized():
            raise InvalidStateError(
                "RingDP: there is no process group yet: call ringdp.init() first (or torch.distributed."
                "init_process_group('ring')), in a script that ringrun, torchrun, mpirun or srun starts"
            )
        # Plain attributes before Module.__init__ are fine; DistributedDataParallel calls the methods that read them.
        self._find_unused = None if find_unused_parameters is None else bool(find_unused_parameters)
        listed, self._caps_bytes = bucket_caps(arguments)
        self._compare_models = bool(init_sync)
        # As torch's: broadcast_buffers=False leaves them alone here, too.
        self._init_sync_buffers = arguments.get("forward_sync_buffers") is not None or broadcast_buffers is not False
        as_view = arguments.get("gradient_as_bucket_view")
        if arguments.get("lazy_bucket_allocation"):
            warnings.warn(
                "RingDP: lazy_bucket_allocation=True has no effect: gradients are parts of their buckets, which stay as"
                " long as the gradients do",
                stacklevel=4,
            )
        self._reduce_dtype = reduction_dtype(reduce_dtype)
        self._gradient_pool = allowed_pool(gradient_pool)
        self.ringdp_features = Features(
            Elastic(),
            Reproducible(reproducible),
            in_use.OfTorch(),
            StepReport(),
            ReducedParameters(broadcast_new=bool(init_sync)),
            SentState(),
            ShardedParameters(),
            Overflows(),
            ReplicaGuard(Guard.checked(guard, module), starts_alike=bool(init_sync)),
            Listeners(),
            Unaveraged(),
            MixedPrecision(arguments.get("mixed_precision")),
            GradientCompression(compression, scaler),
            BatchWeight(weight),
        )
        passed_on = for_torch(arguments) | {"init_sync": False}  # _build_params_for_reducer does it
        mesh = line_mesh(passed_on)
        try:
            super().__init__(
                module,
                bucket_cap_mb=None if listed else bucket_cap_mb,
                bucket_cap_mb_list=listed,
                find_unused_parameters=bool(find_unused_parameters),
                gradient_as_bucket_view=True if as_view is None else bool(as_view),
                **passed_on,
            )
        except BaseException:
            self.ringdp_features[ShardedParameters].put_back()
            raise
        if mesh is not None:
            self.device_mesh = mesh
        self.ringdp_features[MixedPrecision].start(self)

    # Called by torch's constructor and __setstate__.

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        sent = self.ringdp_features[SentState]
        self.ringdp_features[ShardedParameters].take_out(self)  # until _ddp_init_helper has made the reducer
        refusals.check(self.ringdp_features.in_use(self))
        sent.refuse_unusable(self)
        compares = self.__dict__.pop("_compare_models", False)
        if compares:
            with named(COMPARING_MODELS):
                kinds = check_same_model(
                    self.module,
                    self.process_group,
                    self.device,
                    ignored=self.parameters_to_ignore,
                    compression=self.ringdp_features[GradientCompression].chosen,
                    kind=kind_of(self.device),
                    settings=self.ringdp_features.settings(),
                )
                self.placement = Placement.of(kinds, self.process_group, self.device)
                self.placement.log_mixed(self.process_group.rank())
        built = super()._build_params_for_reducer()
        sent.note_what_is_not_plain(self)
        if compares:
            sent.buffers_are_alike()
            sent.send(self, 0, buffers=self._init_sync_buffers)
        return built

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        from ringdp import _C

        backend = backend_of(self.process_group, self.device_type)
        connect_log()
        for feature in self.ringdp_features:
            feature.before_reducer(self)
        watched = self.ringdp_features[ReducedParameters].watched
        if "placement" not in self.__dict__:
            self.placement = Placement.alike(self.process_group, self.device)
        if not self._caps_bytes:  # of the user
            over_ring = backend == BACKEND and self.ringdp_features[GradientCompression].chosen is None
            self._caps_bytes = growing_caps(
                default_cap_mb(size_at_start(self.process_group), exact_over_ring=over_ring)
            )
        options = _C.ReducerOptions()
        options.caps_bytes = self._caps_bytes
        if self._find_unused is not None:
            options.expect_unused(self._find_unused)
        options.average = has_average(self.process_group, self.device_type)
        options.own_gradients = not self.gradient_as_bucket_view
        options.skip_unused = self.skip_all_reduce_unused_params
        options.names_compared = backend == BACKEND
        options.graph_shows_unused = not self.ringdp_features[ShardedParameters].found
        options.reduce_dtype = self._reduce_dtype
        options.host_control = self.placement.host_control
        options.weighted = self.ringdp_features[BatchWeight].mode is not None
        options.gradient_pool = self._gradient_pool and on_cpu(one.parameter for one in watched)
        options.report_every = report_every()
        options.alone = config.reduce_alone()
        self.reducer = _C.Reducer([one.describe() for one in watched], self.process_group, options)
        if self._use_python_reducer:  # torch's own hooks, for a backward that is compiled as one graph
            self.reducer._remove_autograd_hooks()
        self.ringdp_features[ShardedParameters].put_back()
        for feature in self.ringdp_features:
            feature.reducer_made(self)
        trainable = [one.name for one in watched if one.parameter.requires_grad]
        self.logger = ReducerLog(self, parameters, trainable, bucket_cap_bytes=self._caps_bytes[-1])
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            bool(self.broadcast_buffers),
            any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)
        _log.debug("%d parameters in buckets of %s bytes", len(parameters), self.reducer.plan.bucket_bytes())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("placement", None)  # of other ranks, maybe
        return state

    # A step. torch.compile over RingDP compiles the module and leaves out what is done around it.

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        refuse_capture(self.device_type)
        if in_backward():
            self.reducer.called_in_backward()
        for feature in self.ringdp_features:
            feature.before_forward(self)
        prepared = super()._pre_forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and not self._join_config.enable and not in_backward():  # of checkpointing
            for feature in self.ringdp_features:
                feature.between_steps(self)
        self.ringdp_features[BatchWeight].announce(self, inputs, kwargs)
        return prepared

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        sync = self.require_backward_grad_sync
        if torch.is_grad_enabled():
            for feature in self.ringdp_features:
                feature.before_backward(self)
            outputs = [output] if isinstance(output, torch.Tensor) else list(_find_tensors(output))
            self.reducer.prepare_for_backward(outputs, sync, self.module.training)
        self.require_forward_param_sync = sync and torch.is_grad_enabled()
        self._clear_grad_buffer()
        return output

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """torch's refuses the layers on the CPU."""
        synchronise_on_cpu(module)

    # The buffers that each forward sends.

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = self.ringdp_features[SentState].buffers_to_send(self)

    def _sync_buffers(self) -> None:
        if self.ringdp_features[SentState].is_repeating(self):
            return
        if self.process_group.size() > 1 or hasattr(self, "buffer_hook") or self._join_config.enable:
            super()._sync_buffers()

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        send = functools.partial(super()._distributed_broadcast_coalesced, tensors, buffer_size, authoritative_rank)
        self.ringdp_features[SentState].broadcast(self, tensors, send)

    # The rest of torch's methods that use the reducer's type.

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            for feature in self.ringdp_features:
                feature.group_replaced(self, new_process_group)
            self.process_group = new_process_group
            self.reducer._update_process_group(
                new_process_group,
                average=has_average(new_process_group, self.device_type),
                names_compared=backend_of(new_process_group, self.device_type) == BACKEND,
            )

    def begin_again(self, step: int) -> None:
        """Go on behind `step`, with buckets as at the start: the elastic job has other members, or a checkpoint was
        loaded. All ranks call it; `ringdp.elastic.Job` does."""
        self._has_rebuilt_buckets = False
        self.require_forward_param_sync = True  # whatever the last forward of each rank was
        for feature in self.ringdp_features:
            feature.group_replaced(self, self.process_group)
        self.reducer.begin_again(step)

    def _lazy_init(self) -> None:
        refuse_distributed_autograd()
        super()._lazy_init()

    def _register_delay_all_reduce_hook(
        self, bucket_cap_mb: int, param_to_hook_all_reduce: torch.Tensor, device_ids: Any
    ) -> None:
        """On the parameters' device, also without device_ids."""
        devices = [self._delay_all_reduce_params[0].device]
        super()._register_delay_all_reduce_hook(bucket_cap_mb, param_to_hook_all_reduce, devices)

    def _delayed_all_reduce_hook(self, gradient: torch.Tensor) -> torch.Tensor:
        """Without torch's assumption that a stream waits for the result."""
        if self.ringdp_features[Elastic].repairs:  # when the step counts
            return gradient
        assert self._delay_grad_buffer is not None
        self._delay_grad_buffer.div_(self.process_group.size())
        work = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
        Variable._execution_engine.queue_callback(work.wait)
        return gradient

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self.logger.set_sample_rate(sample_rate)
