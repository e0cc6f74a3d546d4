"""Gradients averaged through a compressor, over any backend: `ddp_hook` for torch's DDP, `CompressedHook` behind it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ringdp import refusals
from ringdp.compression import Auto, Compression, Compressor, CompressorLike, saved
from ringdp.compression.description import describe
from ringdp.compression.exchange import BucketSlice, Coder, Layout, Section, Tally, agree
from ringdp.compression.exchange.finite import all_finite
from ringdp.compression.rules import Rules
from ringdp.errors import PeerLostError
from ringdp.hooks.average import all_reduce_mean
from ringdp.hooks.checkpoint import Memory
from ringdp.hooks.comm_threads import CommThreads
from ringdp.hooks.exchange_runner import CodecSections, run_exchange
from ringdp.hooks.futures import Promise, after, failed
from ringdp.hooks.parameters import Parameters
from ringdp.hooks.rules import HookRules
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import is_elastic


class CompressedHook:
    """A communication hook that averages buckets through compressors: ``hook(bucket) -> Future[Tensor]``.

    Encoding, exchange and decoding run beside backward, on the threads of `CommThreads`; over NCCL, where no operation
    blocks the host, within the call, on a stream of their own. All ranks end with the same bits. All ranks see an
    infinity or NaN in one rank's gradient in that step, and the states of compressors and error feedback then stay as
    they were before.

    Args:
        choose: the compressor of a parameter, given its name and itself; None is exact.
        parameters: knows the names.
        process_group: whose ranks are averaged; None is the default group.
        scale: gives the loss scale of the step that begins.
        commit_alone: the states of a step whose buckets were all finite are committed when the next one begins or a
            checkpoint is asked for. False leaves that to the caller of `commit`.
        see: is given each bucket before it is changed.
    """

    def __init__(
        self,
        choose: Callable[[str, Tensor], Compressor | None],
        *,
        parameters: Parameters | None = None,
        process_group: dist.ProcessGroup | None = None,
        scale: Callable[[], float] | None = None,
        commit_alone: bool = True,
        see: Callable[[GradBucket], None] = lambda bucket: None,
    ) -> None:
        self._choose, self._scale, self._commit_alone, self._see = choose, scale, commit_alone, see
        self.parameters: Parameters = parameters or Parameters()
        self._given_group = process_group
        self._comm_threads: CommThreads | None = None
        self._stream: torch.cuda.Stream | None = None
        self._contents: dict[tuple[int, ...], _Content] = {}
        self.memory: Memory = Memory()
        self.tally: Tally = Tally()
        self._last_index = -1
        self._step = 0
        self._loss_scale = 1.0
        self._complete = True
        self._counts_later = False  # a step has begun, and `commit` was not called
        self._finite: list[Tensor] = []
        self._reports: list[Any] = []  # of the core's all-reduces, known when they are done
        self.divisor: float | None = None  # the divisor of sums; None: the number of ranks

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._given_group or dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        return group

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket; the future has its buffer.

        In an elastic job it is averaged within this call, by operations of the group itself, which belong to the step's
        unit; a loss is the future's error, and all buckets of the step come again. Any other error is raised here and
        now: a future's would be noticed after the next buckets, of which the others have not heard.
        """
        if is_elastic(self.group):
            from ringdp import _C

            with _C.CompleteFutures():  # a future does not know the members
                try:
                    return _done(self._average(bucket).wait())
                except PeerLostError as error:
                    return failed(error, bucket.buffer().device)
        return self._average(bucket)

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() <= self._last_index or self._last_index < 0:
            self._begin_step()
        self._last_index = bucket.index()
        self._complete = self._complete or bucket.is_last()
        self._see(bucket)
        buffer = bucket.buffer()
        if self.group.size() == 1:
            self._finite.append(_finite(buffer))
            return _done(buffer)
        content = None if buffer.is_sparse else self._content(bucket, buffer)
        if content is None or content.exact:
            return all_reduce_mean(buffer, self.group, self._note)
        divisor = float(self.divisor or self.group.size())
        works: list[torch.futures.Future[Any]] = []
        for codec in content.by_ring:
            work, report = codec.start(buffer, self.group, self.memory.states, self._loss_scale, divisor)
            works.append(work.get_future())
            self._reports.append(report)
        if content.over_c10d or content.layout.plans:
            works.append(self._beside_backward(bucket.index(), buffer, content, divisor))
        elif content.layout.exact:
            works.append(self._exactly(buffer, content.layout, divisor))
        together: torch.futures.Future[Any] = works[0] if len(works) == 1 else torch.futures.collect_all(works)
        return after(together, lambda _: buffer, buffer.device)

    def _beside_backward(
        self, index: int, buffer: Tensor, content: "_Content", divisor: float
    ) -> torch.futures.Future[Tensor]:
        ranks, states, loss_scale = self.group.size(), self.memory.states, self._loss_scale
        coder = Coder(
            states,
            self.group.rank(),
            ranks,
            self._step,
            loss_scale,
            buffer.device,
            self.tally,
            self.memory.is_fresh(self._step),
            raises_alone=is_elastic(self.group),
        )

        def average(group: dist.ProcessGroup) -> Tensor:
            for codec in content.over_c10d:
                self._reports.append(codec.average(buffer, group, states, loss_scale, divisor))
            if content.layout.plans or content.layout.exact:
                run_exchange(content.layout.average(buffer, coder, divisor), group)
                self._note(buffer)
            return buffer

        if is_elastic(self.group):
            return _done(average(self.group))
        if buffer.is_cuda and backend_of(self.group, "cuda") != BACKEND:
            return self._on_a_stream(buffer, lambda: average(self.group))
        if self._comm_threads is None:
            self._comm_threads = CommThreads(self.group, buffer.device)
        return self._comm_threads.submit(index, average)

    def _exactly(self, buffer: Tensor, layout: Layout, divisor: float) -> torch.futures.Future[Tensor]:
        flat = layout.exact_of(buffer)

        def put_back(_: list[Tensor]) -> Tensor:
            layout.put_exact(buffer, flat, divisor)
            return self._note(flat)

        reduced = dist.all_reduce(flat, group=self.group, async_op=True).get_future()
        return after(reduced, put_back, buffer.device)

    # Steps.

    def commit_later(self) -> None:
        """States count where the caller says so from now on: see `commit`."""
        self._commit_alone = False

    def _begin_step(self) -> None:
        if self._commit_alone:
            self._commit_if_finite()
        self.tally.begin()
        if is_elastic(self.group) and self._counts_later:
            self.memory.states.commit(False)  # the step is made again: what it has left so far does not count
        else:
            self._step = self.memory.step
            self.memory.step += 1
        self._counts_later = True
        self._follow_members()
        self._complete = False
        self._finite, self._reports = [], []
        self._loss_scale = 1.0 if self._scale is None else float(self._scale())

    def _follow_members(self) -> None:
        if self.memory.follow(self.group):
            self._contents.clear()

    def _commit_if_finite(self) -> None:
        self.commit(self._complete and self.finite)

    @property
    def finite(self) -> bool:
        """Whether all averages of the last step are finite: the same on all ranks."""
        return all(bool(mark) for mark in self._finite) and all(report.finite for report in self._reports)

    def commit(self, finite: bool, *, unused: Sequence[str] = ()) -> None:
        """Keep the states that the last step left in compressors and error feedback, or drop them.

        Args:
            finite: no gradient overflowed, compressed or not.
            unused: parameters that no rank used: their states are dropped.
        """
        self.memory.states.commit(finite, unused=unused)
        self._counts_later = False
        self._last_index = -1  # whatever bucket comes next begins a step

    def _note(self, average: Tensor) -> Tensor:
        self._finite.append(_finite(average))
        return average

    # Buckets.

    def _content(self, bucket: GradBucket, buffer: Tensor) -> "_Content":
        parameters = bucket.parameters()
        identity = tuple(id(it) for it in parameters)
        if identity not in self._contents:
            places, by_name = [], {}
            for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
                name = self.parameters.name(parameter)
                begin = gradient.storage_offset() - buffer.storage_offset()
                places.append(self._place(name, parameter, int(begin), buffer.dtype))
                by_name[name] = parameter
            content = _Content(places, self.group, buffer)
            run_exchange(agree(content.lines, buffer.device, self.group.rank()), self.group)
            self.memory.know(((one, by_name[one.name]) for one in content.sections), self.group.rank())
            self._contents[identity] = content
        return self._contents[identity]

    def _place(self, name: str, parameter: Tensor, begin: int, dtype: torch.dtype) -> BucketSlice:
        compressor = self._choose(name, parameter) if dtype.is_floating_point else None
        return BucketSlice(name, tuple(parameter.shape), begin, parameter.numel(), compressor)

    def _on_a_stream(self, buffer: Tensor, average: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """At once, but on a stream of its own: waits are the stream's, and backward goes on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            return Promise(buffer.device).keep(average)

    # Checkpoints.

    def expect_all(self) -> None:
        """Find the states of all parameters with a name, also of those that never come up."""
        self._follow_members()  # which may have changed since the last step
        ranks = self.group.size()
        known = []
        for name, parameter in self.parameters.known():
            section = self._place(name, parameter, 0, parameter.dtype).section(ranks, parameter.device)
            if section is not None:
                known.append((section, parameter))
        self.memory.know(known, self.group.rank())

    def state_dict(self, *, consolidated: bool = False) -> dict[str, Any]:
        """The state of compression, by parameter name.

        Args:
            consolidated: the mean over ranks, which loads at any world size; all ranks must call. Otherwise this rank's
                own, exactly.

        Raises:
            InvalidStateError: a state of the other kind was loaded, and has parameters that have not come up since.
        """
        if self._commit_alone:
            self._commit_if_finite()
        self.expect_all()
        return saved.State(
            self.group.size(),
            None if consolidated else self.group.rank(),
            self.memory.entries(self.group, consolidated=consolidated),
            self.memory.step,
            0,
            self.memory.step,
        ).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`, before the first backward or later.

        All ranks load what was saved after the same step: the next step that exchanges anything compares them, and
        raises a MismatchError on all ranks.

        Raises:
            InvalidArgumentError: an exact state of another rank or world size, one that does not fit the parameters, or
                not such a state; nothing has changed then.
        """
        self.expect_all()
        rank = self.group.rank()
        loaded = self.memory.read(saved.State.read(state, rank, self.group.size()), rank)
        self.memory.take(loaded)
        self._last_index, self._finite, self._reports = -1, [], []


class _Content:
    """The parameters of a bucket, grouped by how they are averaged."""

    def __init__(self, places: Sequence[BucketSlice], group: dist.ProcessGroup, buffer: Tensor) -> None:
        by_codec: dict[str, list[Section]] = {}
        rest = []
        self.lines = []  # what ranks must agree on before any of them sends a code
        for place in places:
            section = place.section(group.size(), buffer.device)
            if section is not None and CodecSections.serve(section):
                by_codec.setdefault(section.compressor.native, []).append(section)  # type: ignore[attr-defined]
                where = ", in the core"
            else:
                rest.append(place)
                where = ""
            how = "exact" if section is None else f"by {describe(section.compressor)}{where}"
            self.lines.append(f"{place.name} [{place.count}] {how}")
        codecs = [CodecSections(sections, group, buffer.dtype) for sections in by_codec.values()]
        self.by_ring = [codec for codec in codecs if codec.by_ring]
        self.over_c10d = [codec for codec in codecs if not codec.by_ring]
        self.layout = Layout(rest, group.size(), buffer.device)
        others = [section for plan in self.layout.plans.values() for section in plan.sections]
        self.sections = [section for sections in by_codec.values() for section in sections] + others

    @property
    def exact(self) -> bool:
        return not self.sections


def compressed_hook(state: CompressedHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook; torch wants a function, and its DDP compares the annotations: types, not text."""
    return state(bucket)


compressed_hook.repeatable = True  # type: ignore[attr-defined]  # for elastic jobs


def ddp_hook(
    compression: CompressorLike | Compression,
    *,
    model: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[CompressedHook, Callable[[CompressedHook, GradBucket], torch.futures.Future[Tensor]]]:
    """State and hook for torch's DDP: ``ddp.register_comm_hook(*ddp_hook("int8"))``. Also works on a RingDP.

    Works on ring and gloo, and on NCCL with compressors that torch operations make. The state has `state_dict`.

    Args:
        compression: a name or compressor, or a `Compression`, whose rules say more.
        model: the module or its DDP, to know names by; needed for rules by name or type of module, and for a state
            dict that fits after a restart with other buckets. Without it parameters are numbered as they come.
        scaler: the GradScaler whose scale the gradients carry: what is remembered is then kept without it.
        process_group: of the DDP; None is the default group.

    Raises:
        InvalidArgumentError: rules that cannot be used, that need the model, or that none of its parameters fits
            (without `model` a warning after the first backward); warmup_steps. On this rank alone: the other ranks find
            out when they wait for it in backward.
    """
    chosen = Rules(compression)
    if chosen.asked.warmup_steps:
        refusals.refuse("warmup_steps", "ddp_hook")
    if any(isinstance(one, Auto) for one in chosen.compressors):
        refusals.refuse("auto", "ddp_hook")
    of_hook = HookRules(chosen, model, process_group)
    hook = CompressedHook(
        of_hook.choose,
        parameters=of_hook.parameters,
        process_group=process_group,
        scale=None if scaler is None else scaler.get_scale,
        see=of_hook.see,
    )
    return hook, compressed_hook


def _finite(average: Tensor) -> Tensor:
    values = average._values() if average.is_sparse else average
    return all_finite(torch.view_as_real(values) if values.is_complex() else values)


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
