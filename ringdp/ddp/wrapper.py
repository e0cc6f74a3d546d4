"""RingDP: torch's DistributedDataParallel with ringdp's reducer inside."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.autograd import Variable
from torch.nn.parallel.distributed import _find_tensors

from ringdp import config, refusals
from ringdp.compression.parameters import model_parameters, never_reduced
from ringdp.compression.rules import Rules
from ringdp.config import report_every
from ringdp.ddp import in_use
from ringdp.ddp.arguments import (
    accepted,
    bucket_caps,
    default_cap_mb,
    for_torch,
    growing_caps,
    reduction_dtype,
    shows_all_arguments,
)
from ringdp.ddp.batch_weight import BatchWeight
from ringdp.ddp.divergence.options import Guard, ReplicaGuard
from ringdp.ddp.dtensors import ShardedParameters
from ringdp.ddp.elastic import Elastic
from ringdp.ddp.features import FeaturedDDP, Features
from ringdp.ddp.finalization import AutomaticFinalization
from ringdp.ddp.gradient_memory import allowed_pool, on_cpu
from ringdp.ddp.listeners import Listeners
from ringdp.ddp.logging_data import ReducerLog
from ringdp.ddp.loss_scale import LossScale
from ringdp.ddp.mixed_precision import MixedPrecision, in_backward
from ringdp.ddp.model_check import check_same_model
from ringdp.ddp.module_state import SentState
from ringdp.ddp.optimizer_in_backward import OptimizerInBackward, has_optimizers, stepping_hook
from ringdp.ddp.overflow import ReducedGradients
from ringdp.ddp.parameter_changes import ChangingModule
from ringdp.ddp.reduction_stats import Stats
from ringdp.ddp.refusal import COMPARING_MODELS, report_refusals
from ringdp.ddp.reproducible import Reproducible
from ringdp.ddp.step_report import StepReport
from ringdp.ddp.sync_batch_norm import synchronise_on_cpu
from ringdp.ddp.unaveraged import optimizers
from ringdp.ddp.uneven_inputs import UnevenInputs
from ringdp.errors import InvalidStateError
from ringdp.hooks.names import remember_names
from ringdp.hooks.signature import what_is_wrong_with
from ringdp.job.backend import BACKEND, backend_of, connect_log, has_average, named
from ringdp.job.placement import Placement, kind_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringdp.compression import Compression, CompressorLike
    from ringdp.ddp.arguments import DDPArguments
    from ringdp.diagnosis.report import Report

_log = logging.getLogger("ringdp.parallel")


class RingDP(
    UnevenInputs,
    AutomaticFinalization,
    ChangingModule,
    SentState,
    FeaturedDDP,
):
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
            all-reduce of `process_group`: they add in rank order. See docs/how-to/reproducible.md for what it costs on
            several hosts of several ranks.
        *positional: torch's other arguments in its order.
        **named: torch's other arguments by their names: ringdp/ddp/arguments.py has what each does here.

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
        self._compare_models = self._broadcast_new = bool(init_sync)
        # As torch's: broadcast_buffers=False leaves them alone here, too.
        self._init_sync_buffers = arguments.get("forward_sync_buffers") is not None or broadcast_buffers is not False
        as_view = arguments.get("gradient_as_bucket_view")
        if arguments.get("lazy_bucket_allocation"):
            warnings.warn(
                "RingDP: lazy_bucket_allocation=True has no effect: gradients are parts of their buckets, which stay as"
                " long as the gradients do",
                stacklevel=4,
            )
        self._warned_unaveraged = False  # a step of an optimizer applied gradients that were not averaged
        self._repeated_after = -1
        self._sharded: ShardedParameters | None = None
        chosen = Rules(compression)
        self._chosen = chosen if chosen.compressor is not None or chosen.pairs else None
        self._compression = None
        self._loss_scale = None if scaler is None else LossScale(scaler)
        self._reduce_dtype = reduction_dtype(reduce_dtype)
        self._gradient_pool = allowed_pool(gradient_pool)
        self.features = Features(
            Elastic(),
            Reproducible(reproducible),
            in_use.OfTorch(),
            StepReport(),
            ReplicaGuard(Guard.checked(guard, module), starts_alike=bool(init_sync)),
            Listeners(),
            MixedPrecision(arguments.get("mixed_precision")),
            OptimizerInBackward(),
            BatchWeight(weight),
        )
        passed_on = for_torch(arguments) | {"init_sync": False}  # _build_params_for_reducer does it
        mesh = _line_mesh(passed_on)
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
            if self._sharded is not None:
                self._sharded.put_back()
            raise
        if mesh is not None:
            self.device_mesh = mesh
        self.features[MixedPrecision].start(self)

    # Called by torch's constructor and __setstate__.

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        self._sharded = ShardedParameters.of(self.module, self.process_group)
        if self._sharded is not None:
            self._sharded.take_out()  # until _ddp_init_helper has made the reducer
        refusals.check(self._features())
        self._refuse_unusable()
        compares = self.__dict__.pop("_compare_models", False)
        if compares:
            with named(COMPARING_MODELS):
                kinds = check_same_model(
                    self.module,
                    self.process_group,
                    self.device,
                    ignored=self.parameters_to_ignore,
                    compression=self._describe_choice,
                    kind=kind_of(self.device),
                    settings=self.features.settings(),
                )
                self._devices = Placement.of(kinds, self.process_group, self.device)
                self._devices.log_mixed(self.process_group.rank())
        built = super()._build_params_for_reducer()
        self._note_what_is_not_plain()
        if compares:
            self._buffers_are_alike()
            self._send_state(0, buffers=self._init_sync_buffers)
        return built

    def _features(self) -> dict[str, str]:
        """Those of `refusals.FEATURES` that the module and the arguments bring along."""
        found = {
            "dtensor": self._sharded is not None,
            "compression": self._compression is not None and any(self._compression.compressors),
        }
        features = dict.fromkeys((feature for feature, is_found in found.items() if is_found), "")
        return self.features.in_use(self) | features

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        from ringdp import _C

        # Frozen ones too: they may be unfrozen later.
        watched = model_parameters(self.module, ignored=self.parameters_to_ignore)
        names = [one.name for one in watched]
        remember_names([one.parameter for one in watched], names)
        backend = backend_of(self.process_group, self.device_type)
        connect_log()
        for feature in self.features:
            feature.before_reducer(self)
        if "_devices" not in self.__dict__:
            self._devices = Placement.alike(self.process_group, self.device)
        if not self._caps_bytes:  # of the user
            over_ring = backend_of(self.process_group, self.device_type) == BACKEND and self._chosen is None
            self._caps_bytes = growing_caps(default_cap_mb(self.process_group.size(), exact_over_ring=over_ring))
        self.reducer = _C.Reducer(
            [one.parameter for one in watched],
            names,
            [one.describe_use() for one in watched],
            [one.sparse for one in watched],
            self.process_group,
            caps_bytes=self._caps_bytes,
            find_unused=self._find_unused,
            average=has_average(self.process_group, self.device_type),
            own_gradients=not self.gradient_as_bucket_view,
            skip_unused=self.skip_all_reduce_unused_params,
            names_compared=backend == "ring",
            graph_shows_unused=self._sharded is None,
            reduce_dtype=self._reduce_dtype,
            host_control=self._devices.host_control,
            weighted=self.features[BatchWeight].mode is not None,
            gradient_pool=self._gradient_pool and on_cpu(one.parameter for one in watched),
            report_every=report_every(),
            alone=config.reduce_alone(),
        )
        self._watched = watched
        self._never_reduced = never_reduced(self.module, ignored=self.parameters_to_ignore)
        self._reduced = ReducedGradients(self)
        if self._use_python_reducer:  # torch's own hooks, for a backward that is compiled as one graph
            self.reducer._remove_autograd_hooks()
        if self._sharded is not None:
            self._sharded.watch(self.reducer, parameters, weighted=self.features[BatchWeight].mode is not None)
            self._sharded.put_back()
        self._snapshot = _C.ModuleSnapshot(self.module)
        optimizers.watch(self)
        for feature in self.features:
            feature.reducer_made(self)
        self._compression = None
        if (chosen := self._chosen) is not None:
            self._attach_compression(lambda: chosen)
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
        _log.debug("%d parameters in buckets of %s bytes", len(parameters), self.reducer.bucket_bytes())

    def __getstate__(self) -> dict[str, Any]:
        # Made anew with the reducer.
        none = dict.fromkeys(("_sharded", "_reduced", "_compression", "_snapshot"))
        lists: dict[str, Any] = {
            "_watched": [],
            "_never_reduced": (),
            "_never_averaged": (),
            "_plain_buffers": (),
        }
        state = super().__getstate__() | none | lists | {"_repeated_after": -1}
        state.pop("_devices", None)  # of other ranks, maybe
        return state

    # A step. torch.compile over RingDP compiles the module and leaves out what is done around it.

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                "RingDP's forward cannot be captured in a CUDA graph: its reducer decides on the host in every step."
                " Capture parts of the module (torch.cuda.make_graphed_callables) and leave RingDP outside."
            )
        if in_backward():
            self.reducer.called_in_backward()
        if torch.is_grad_enabled() and self.require_backward_grad_sync and self._snapshot.differs(self.module):
            self._follow_parameters()
        if self._never_averaged and torch.is_grad_enabled():
            self._refuse_unfrozen()
        if self._sharded is not None:
            self._sharded.before_forward()
        if self._compression is not None:
            joining = bool(self._join_config.enable)
            self._compression.before_forward(self.require_backward_grad_sync, joining=joining)
            if self._loss_scale is not None:
                self._loss_scale.prefetch()
        prepared = super()._pre_forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and not self._join_config.enable and not in_backward():  # of checkpointing
            for feature in self.features:
                feature.between_steps(self)
        self.features[BatchWeight].announce(self, inputs, kwargs)
        return prepared

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        sync = self.require_backward_grad_sync
        if torch.is_grad_enabled():
            if self._sharded is not None:
                self._sharded.before_backward()
            if self._compression is not None and self._loss_scale is not None and sync:
                self._compression.set_loss_scale(self._loss_scale.read())
            if sync and self._snapshot.differs(self.module):
                self._refuse_changes_of_this_forward()
            outputs = [output] if isinstance(output, torch.Tensor) else list(_find_tensors(output))
            self.reducer.prepare_for_backward(outputs, sync, self.module.training)
        self.require_forward_param_sync = sync and torch.is_grad_enabled()
        self._clear_grad_buffer()
        return output

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        """torch's refuses the layers on the CPU."""
        synchronise_on_cpu(module)

    def _repeat_batch(self) -> None:
        """Treat the forwards up to the next backward that synchronises as those of the batch whose forward failed. Its
        buffers and weight are not sent again.
        """
        self._repeated_after = self.reducer.steps()
        self.reducer.repeat_batch()

    def _sync_buffers(self) -> None:
        if 0 <= self._repeated_after == self.reducer.steps():
            return
        if self.process_group.size() > 1 or hasattr(self, "buffer_hook") or self._join_config.enable:
            super()._sync_buffers()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.nn.Module.zero_grad`; with ``set_to_none=False`` whole buckets are zeroed at once."""
        if set_to_none or self._sharded is not None:
            super().zero_grad(set_to_none=set_to_none)
            return
        self.reducer.zero_gradients()
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and (name in self.parameters_to_ignore or not parameter.requires_grad):
                parameter.grad.detach_().zero_()

    def stats(self) -> Stats:
        """The costs of reducing gradients; keeping them costs two clock readings per step."""
        return Stats(**self.reducer.stats())

    def report(self) -> Report:
        """Where the time of the last steps went, on all ranks, the largest cost, and a remedy. Prints as tables.

        The ranks exchange their times after 10 steps and then every 20 (RINGDP_REPORT_EVERY), beside the training; this
        is their last exchange, and does not communicate. Rank 0 logs the verdict when communication costs a fifth of a
        step.
        """
        return self.features[StepReport].monitor.report()

    @property
    def _before_forward(self) -> list[Callable[[], None]]:
        """For `ringdp.data.BalancedSampler`."""
        return self.features[Listeners].calls

    def set_weight(self, weight: float | torch.Tensor) -> None:
        """Set the weight of the next forward's batch: the number of samples or tokens over which its loss is a mean.

        Call it before each forward that trains; with ``weight="samples"`` it takes the place of what is counted. A
        weight of 0 leaves this rank's gradients out, also if they are not finite.

        Args:
            weight: a finite number that is not negative, or a tensor with one.

        Raises:
            InvalidStateError: RingDP was made without ``weight``.
            InvalidArgumentError: not a number. One that is negative or not finite is an error of the forward, where
                the other ranks raise a MismatchError that names this rank.
        """
        self.features[BatchWeight].set(weight)

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the guard look at this optimizer's state, too. All ranks call it; not for one that shards its state.

        Raises:
            InvalidArgumentError: not an optimizer.
        """
        self.features[ReplicaGuard].add_optimizer(optimizer)

    def check_replicas(self) -> None:
        """Compare all parameters and buffers between the ranks now, to the bit. All ranks call it, between two steps.

        As the guard it leaves out the tensors of its ``ignore``, and buffers that each forward broadcasts.

        Raises:
            MismatchError: they differ; names the first tensor and the ranks.
        """
        self.features[ReplicaGuard].check(self)

    # Communication hooks.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` reduce each bucket; torch's hooks work unchanged.

        The bucket holds this rank's gradients, not divided. `ringdp.hooks.parameter_names` names them. May be called
        once, before the first backward.

        Raises:
            TypeError, ValueError: not a hook, as by DistributedDataParallel.
            RuntimeError: there is one already.
        """
        self._check_comm_hook(hook)
        refusals.check(self._features() | in_use.of_hook(hook, state, self.process_group))
        self._take_hook(state, hook)
        self.features[in_use.OfTorch].hook = hook.__qualname__

    def _take_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.reducer.register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        self.features[ReplicaGuard].rest_beside(self, hook)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """torch's check, which would refuse annotations that are text (``from __future__ import annotations``)."""
        wrong = what_is_wrong_with(hook)
        if wrong is not None:
            self._log_and_throw(*wrong)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self.reducer.register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Reduce by torch's ``ALLREDUCE`` or ``FP16_COMPRESS`` hook, without Python in backward."""
        self._register_builtin_comm_hook(comm_hook_type)

    def _attach_compression(self, asked: Callable[[], Rules]) -> Rules:
        def possible() -> Rules:
            rules = asked()
            refusals.check(self._features() | in_use.of_rules(rules))
            return rules

        attached = super()._attach_compression(possible)
        if self._compression is not None and self._compression.auto is not None:
            refusals.check(self._features() | {"choosing": ""})
        return attached

    # The rest of torch's methods that use the reducer's type.

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self._has_rebuilt_buckets = False
        self.reducer._reset_state()
        if not dist.distributed_c10d._rank_not_in_group(new_process_group):
            for feature in self.features:
                feature.group_replaced(self, new_process_group)
            self.process_group = new_process_group
            self.reducer._update_process_group(
                new_process_group,
                average=has_average(new_process_group, self.device_type),
                names_compared=backend_of(new_process_group, self.device_type) == "ring",
            )

    def _lazy_init(self) -> None:
        if _in_distributed_autograd():
            raise InvalidStateError(
                "RingDP does not average the gradients that distributed autograd (torch.distributed.rpc) keeps in its "
                "context: use DistributedDataParallel for this module"
            )
        super()._lazy_init()

    def _setup_in_backward_optimizers(self) -> None:
        if has_optimizers(self._module_parameters):
            refusals.check(self._features())  # optimizers may be given after wrapping
            self._take_hook(None, stepping_hook(self))
            self.reducer._set_optimizer_in_backward()

    def _register_delay_all_reduce_hook(
        self, bucket_cap_mb: int, param_to_hook_all_reduce: torch.Tensor, device_ids: Any
    ) -> None:
        """On the parameters' device, also without device_ids."""
        devices = [self._delay_all_reduce_params[0].device]
        super()._register_delay_all_reduce_hook(bucket_cap_mb, param_to_hook_all_reduce, devices)

    def _delayed_all_reduce_hook(self, gradient: torch.Tensor) -> torch.Tensor:
        """Without torch's assumption that a stream waits for the result."""
        assert self._delay_grad_buffer is not None
        self._delay_grad_buffer.div_(self.process_group.size())
        work = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
        Variable._execution_engine.queue_callback(work.wait)
        return gradient

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self.logger.set_sample_rate(sample_rate)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `torch.nn.Module.load_state_dict`; keys without the prefix ``module.`` are taken as the module's own."""
        own = self.state_dict().keys()
        if not any(key in own for key in state_dict) and any(f"module.{key}" in own for key in state_dict):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _in_distributed_autograd() -> bool:
    if not dist.rpc.is_available() or not dist.rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return False
    try:
        dist.autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return False
    return True


def _line_mesh(arguments: dict[str, Any]) -> Any:
    """The one-dimensional mesh among torch's arguments, in whose place stands its group from now on.

    With a slice of a mesh torch's constructor would make plain attributes of the module's DTensors.
    """
    mesh = arguments.get("device_mesh")
    if mesh is None or mesh.ndim != 1 or arguments.get("process_group") is not None:
        return None  # torch says what is wrong
    del arguments["device_mesh"]
    arguments["process_group"] = mesh.get_group(mesh_dim=0)
    return mesh
