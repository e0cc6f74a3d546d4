"""Gradients averaged through a compressor, over any backend: `ddp_hook` for torch's DDP, `CompressedHook` behind it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ringdp.compression import Compressor, Rules
from ringdp.compression.exchange import Coder, Layout, Place
from ringdp.compression.exchange.finite import all_finite
from ringdp.errors import InvalidArgumentError
from ringdp.hooks.average import all_reduce_mean
from ringdp.hooks.carrier import carry
from ringdp.hooks.checkpoint import Memory
from ringdp.hooks.lanes import Lanes, Promise
from ringdp.hooks.parameters import Parameters


class CompressedHook:
    """A communication hook that averages buckets through compressors: ``hook(bucket) -> Future[Tensor]``.

    Encoding, exchange and decoding run beside backward, on the threads of `Lanes`; on CUDA on a stream of their own.
    All ranks end with the same bits. An infinity or NaN in one rank's gradient is seen by all of them in that step, and
    what compressors and error feedback remember then stays as it was before.

    Args:
        choose: the compressor of a parameter, given its name and itself; None is exact.
        parameters: who knows the names.
        process_group: whose ranks are averaged; None is the default group.
        scale: gives the loss scale of the step that begins.
        commit_alone: the step's memory counts as soon as the next one begins, or it is asked for, where all buckets
            were finite. False leaves that to the caller of `commit`.
    """

    def __init__(
        self,
        choose: Callable[[str, Tensor], Compressor | None],
        *,
        parameters: Parameters | None = None,
        process_group: dist.ProcessGroup | None = None,
        scale: Callable[[], float] | None = None,
        commit_alone: bool = True,
    ) -> None:
        self._choose, self._scale, self._commit_alone = choose, scale, commit_alone
        self.parameters = parameters or Parameters()
        self._given_group = process_group
        self._lanes: Lanes | None = None
        self._stream: torch.cuda.Stream | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self.memory = Memory()
        self._last_index = -1
        self._step = 0
        self._factor = 1.0
        self._complete = True
        self._finite: list[Tensor] = []
        self.divisor: float | None = None  # what sums are divided by; None: the number of ranks

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._given_group or dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        return group

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket; the future has its buffer."""
        if bucket.index() <= self._last_index or self._last_index < 0:
            self._begin_step()
        self._last_index = bucket.index()
        self._complete = self._complete or bucket.is_last()
        buffer = bucket.buffer()
        if self.group.size() == 1:
            self._finite.append(_finite(buffer))
            return _done(buffer)
        layout = None if buffer.is_sparse else self._layout(bucket, buffer)
        if layout is None or not layout.plans:
            return all_reduce_mean(buffer, self.group, self._note)
        coder = Coder(self.memory.states, self.group.rank(), self.group.size(), self._step, self._factor, buffer.device)
        divisor = float(self.divisor or self.group.size())

        def average(group: dist.ProcessGroup) -> Tensor:
            carry(layout.average(buffer, coder, divisor), group)
            return self._note(buffer)

        if buffer.is_cuda:
            return self._on_a_stream(buffer, lambda: average(self.group))
        if self._lanes is None:
            self._lanes = Lanes(self.group, buffer.device)
        return self._lanes.submit(bucket.index(), average)

    # Steps.

    def _begin_step(self) -> None:
        if self._commit_alone:
            self._commit_if_finite()
        self._step = self.memory.step
        self.memory.step += 1
        self._complete = False
        self._finite = []
        self._factor = 1.0 if self._scale is None else float(self._scale())

    def _commit_if_finite(self) -> None:
        self.commit(self._complete and self.finite)

    @property
    def finite(self) -> bool:
        """Whether all averages of the last step are finite: the same on all ranks."""
        return all(bool(mark) for mark in self._finite)

    def commit(self, finite: bool, *, unused: Sequence[str] = ()) -> None:
        """What the last step left in compressors and error feedback counts, or is forgotten.

        Args:
            finite: no gradient overflowed, compressed or not.
            unused: parameters that no rank used: theirs is forgotten.
        """
        self.memory.states.commit(finite, unused=unused)

    def _note(self, average: Tensor) -> Tensor:
        self._finite.append(_finite(average))
        return average

    # Buckets.

    def _layout(self, bucket: GradBucket, buffer: Tensor) -> Layout:
        parameters = bucket.parameters()
        identity = tuple(id(it) for it in parameters)
        if identity not in self._layouts:
            places = []
            for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                name = self.parameters.name(parameter)
                begin = gradient.storage_offset() - buffer.storage_offset()
                compressor = self._choose(name, parameter) if buffer.is_floating_point() else None
                places.append(Place(name, tuple(parameter.shape), int(begin), parameter.numel(), compressor))
            layout = Layout(places, self.group.size(), buffer.device)
            self.memory.know([section for plan in layout.plans.values() for section in plan.sections], self.group)
            self._layouts[identity] = layout
        return self._layouts[identity]

    def _on_a_stream(self, buffer: Tensor, average: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """At once, but on a stream of its own: waits are the stream's, and backward goes on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            promise = Promise([buffer.device])
            promise.keep(average)
        return promise.future

    # Checkpoints.

    def state_dict(self, *, consolidated: bool = False) -> dict[str, Any]:
        """What compression remembers, by parameter name.

        Args:
            consolidated: the mean over ranks, which loads at any world size; all ranks must call. Otherwise this rank's
                own, exactly.
        """
        if self._commit_alone:
            self._commit_if_finite()
        return self.memory.state_dict(self.group, consolidated=consolidated)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, before the first backward or later.

        Raises:
            InvalidArgumentError: an exact one of another rank or world size.
        """
        self._last_index, self._finite = -1, []
        self.memory.load_state_dict(state, self.group)


def compressed_hook(state: CompressedHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook; torch wants a function. Its annotations are no text: torch's DDP compares them."""
    return state(bucket)


def ddp_hook(
    compression: Any,
    *,
    rules: Sequence[tuple[Any, Any]] = (),
    model: nn.Module | None = None,
    scaler: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[CompressedHook, Callable[..., Any]]:
    """State and hook for torch's DDP: ``ddp.register_comm_hook(*ddp_hook("int8"))``. Also works on a RingDP.

    Works on ring and gloo, and on NCCL with compressors that torch operations make. The state has `state_dict`.

    Args:
        compression: a name or compressor for what no rule speaks of.
        rules: as `ringdp.compression.Rules` has them.
        model: the module or its DDP, to know names by; needed for rules by name or type of module, and for a state
            dict that fits after a restart with other buckets. Without it parameters are numbered as they come.
        scaler: the GradScaler whose scale the gradients carry: what is remembered is then kept without it.
        process_group: of the DDP; None is the default group.

    Raises:
        InvalidArgumentError: rules that cannot be used, or that need the model.
    """
    chosen = Rules(compression, tuple(rules))
    if chosen.need_names and model is None:
        raise InvalidArgumentError("rules by name or type of module need to know the names: pass model=")
    parameters = Parameters(model)
    hook = CompressedHook(
        lambda name, parameter: chosen.of(name, parameter, parameters.module(name)),
        parameters=parameters,
        process_group=process_group,
        scale=None if scaler is None else scaler.get_scale,
    )
    return hook, compressed_hook


def _finite(average: Tensor) -> Tensor:
    values = average._values() if average.is_sparse else average
    return all_finite(torch.view_as_real(values) if values.is_complex() else values)


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
