"""DiLoCo: ranks train alone and average their changes, in fragments, as codes, while they go on.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1;
"Streaming DiLoCo with overlapping communication", arXiv 2501.18512. With a fragment's global parameters g and a rank's
own p: at its turn d = g - p is sent; `delay` steps later g = outer(g, mean of d) and p = mix * p + (1 - mix) * g.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringdp import values
from ringdp.compression import Compression, CompressorLike
from ringdp.compression.parameters import ModelParameter
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.job.byte_collectives import device_for
from ringdp.job.elastic import is_elastic
from ringdp.job.sibling_group import sibling_groups
from ringdp.rounds import outer as outer_steps
from ringdp.rounds import start, state
from ringdp.rounds.exchange import Arrival, Beside, Flight, FragmentExchange, Record
from ringdp.rounds.fragments import Fragment, dealt, digest, local_part
from ringdp.rounds.not_finite import log_clipped, log_not_finite, start_over
from ringdp.rounds.pace import Pace
from ringdp.rounds.quorum import Attendance, Change, Coming, Meetings, Part
from ringdp.rounds.schedule import OpenSchedule, Turn
from ringdp.rounds.settings import MOVED, Fragments, Settings
from ringdp.rounds.stats import RoundStats


class DiLoCo:
    """Ranks that step alone and average every so many steps: 100 times less traffic than averaging gradients.

    Hangs on the inner optimizer's ``step()``; the training loop stays as it is. All ranks make one, with the same
    model, after `ringdp.init`; parameters and buffers become rank 0's. After each round all ranks have the same bits of
    the global parameters, whatever the codec. A rank at another turn than the others is a MismatchError on all of them.

    With ``outer={"lr": 1, "momentum": 0}`` and no compression, parameters themselves are averaged (`LocalSGD`); a rank
    without others is then as without DiLoCo, to the bit.

    Buffers, such as BatchNorm's running statistics, stay each rank's own; `finish` averages them. Parameters that do
    not require grad when this is made stay as rank 0 had them.

    Args:
        model: a module, or one in a `RingDP` over other ranks (a host's): see `levels`.
        inner: its optimizer, or several, of which the last one steps last.
        every: steps of a round, or a function of n: the steps of the round that begins after n steps.
        outer: "auto", a dict with ``lr``, ``momentum`` and ``nesterov``, or a function that makes a torch optimizer of
            a list of parameters. "auto", the default: a learning rate of 1, and Nesterov's momentum, n / (n + 9) in
            round n, at most 0.8: nothing of the training's length has to be known. With "sparse2" ``{"lr": 1,
            "momentum": 0}``. DiLoCo's authors have ``{"lr": 0.7, "momentum": 0.9, "nesterov": True}``.
        fragments: into how many parts the model is cut, or a `ringdp.Fragments`: how long each is on its way, too.
        compression: how changes are encoded: a codec of the core ("int4", "int8", "bf16", ...), "sparse2" or None
            (exact). The error of a code is added to the next one where the codec has error feedback; that of sparse2
            times 0.95, which takes the place of an outer momentum (`ringdp.compression.Sparse2`). A
            `ringdp.Compression` also has ``warmup_steps``: first steps after each of which parameters are averaged
            exactly, which for SGD is what RingDP does.
        unequal: ranks are not equally fast: a round ends at an agreed time, when ranks have made `every` steps on
            average, and each counts by its steps. Train until `round` has some number, not for a number of steps.
        quorum: a share of the ranks: once so many have made their steps, the others come as they are at their next
            step, and who has not come `grace` seconds later is left out of the round. Its change joins the next one,
            with its weight, unless it is more than four rounds old. Ranks count by their steps, or by `did`. Train
            until `round` has some number; call `finish` before `state_dict`. None: all ranks are waited for.
        grace: seconds.
        clip: a rank's change of a fragment whose norm is beyond so many times the median of the ranks' in the round
            before counts as one of that norm, and is named in the log. None: changes count as they are. (What is not
            finite never counts.)
        scaler: a GradScaler. Steps that it skips count, so that ranks stay in step.
        process_group: of the ranks that are averaged over; the default group if None.

    Attributes:
        ended_at: the step that ended the last round; 0 before there was one.
        counted: the step up to which this rank's steps are in a mean that has come, and in an elastic group the view
            whose ranks that mean is of.

    Raises:
        InvalidArgumentError: a value that cannot be used.
        MismatchError: the ranks' models or arguments differ, or cannot be used on another rank.
        InvalidStateError: before `ringdp.init`.
    """

    _average_momenta = False

    @values.moved("DiLoCo", MOVED)
    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every: int | Callable[[int], int] = 100,
        outer: outer_steps.Outer | None = None,
        fragments: int | Fragments = 1,
        compression: CompressorLike | Compression = None,
        unequal: bool = False,
        quorum: float | None = None,
        grace: float = 10.0,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        who = type(self).__name__
        together = model.process_group if isinstance(model, DistributedDataParallel) else None
        members = start.members_of(who, process_group, together)

        def checked() -> tuple[Settings, list[ModelParameter], list[torch.optim.Optimizer]]:
            optimizers = start.checked_optimizers(who, inner)
            _refuse_second(who, optimizers[-1], members)
            parameters = start.checked_parameters(who, model, optimizers, members)
            settings = Settings.checked(
                who,
                every=every,
                fragments=fragments,
                compression=compression,
                outer=outer,
                unequal=unequal,
                average_momenta=self._average_momenta,
                quorum=quorum,
                grace=grace,
                clip=clip,
                parameters=len(parameters),
            )
            start.check_group(who, settings, members, together)
            start.check_scaler(who, scaler)
            return settings, parameters, optimizers

        self._settings, self._parameters, self._inner = start.agreed(who, checked, model, members)
        self._model, self._members = model, members
        device = device_for(members, torch.device("cpu"))
        start.broadcast(model, members)
        dtype = torch.float64 if any(local_part(it.parameter).itemsize == 8 for it in self._parameters) else None
        sizes = [local_part(one.parameter).numel() for one in self._parameters]
        self._fragments = [
            Fragment([self._parameters[i] for i in indices], dtype or torch.float32, device)
            for indices in dealt(sizes, self._settings.fragments)
        ]
        self._outer = outer_steps.outer_steps(self._settings.outer, [one.total for one in self._fragments])
        own = _group_of_rounds(members, device)
        self._exchanges = [
            FragmentExchange(one, own, self._settings.codec, self._settings.clip) for one in self._fragments
        ]
        self._flights: dict[int, Flight] = {}
        self._left_at = [0] * len(self._fragments)  # steps
        self.ended_at, self.counted = 0, (0, 0)
        count = len(self._fragments)
        self._since: tuple[list[int], list[float]] = ([0] * count, [0.0] * count)  # it last left: steps, samples
        by_steps = unequal or quorum is not None
        self._units = [float(every) if by_steps and isinstance(every, int) else 1.0] * count
        self._pace = Pace(self._settings.schedule(), who, own, together)
        self._attendance: Attendance | None = None
        if self._settings.quorum is not None:
            meetings = Meetings(who, self._settings.quorum, own, self._exchanges, self._outer, self._units)
            self._attendance = Attendance(who, meetings, self._fragments)
        self._frozen = start.frozen(model)
        self._known = {id(one.parameter) for one in (*self._parameters, *self._frozen)}  # which these lists keep alive
        self._evaluating = False
        self._waited_s = self._busy_s = self._bytes = 0.0
        self._changes, self._left_out = [0.0] * count, 0  # the norm of a fragment's, when it last left
        self._counts_samples = False
        self._handle = self._inner[-1].register_step_post_hook(self._stepped)
        self._scaler = scaler
        self._watch_scaler()

    # Called by the training loop.

    @property
    def model(self) -> torch.nn.Module:
        """As given."""
        return self._model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The inner ones, as given."""
        return tuple(self._inner)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Of the ranks that are averaged over."""
        return self._members

    def described(self) -> dict[str, str]:
        """The arguments that are equal on all ranks, by name."""
        return dict(line.split(": ", 1) for line in self._settings.lines())

    @property
    def round(self) -> int:
        """Rounds that have ended."""
        return self._pace.schedule.round

    @property
    def turn(self) -> int:
        """With `quorum`: fragments' turns that are over, also those that this rank's parameters have not yet: within
        `global_parameters` those of which the model has the result."""
        return 0 if self._attendance is None else self._attendance.meetings.turn

    @property
    def step(self) -> int:
        """Steps of the inner optimizer so far, also those that a loss scaler skipped."""
        return self._pace.schedule.step

    def did(self, samples: float) -> None:
        """This step's samples (or tokens): in the means of this round the rank counts by them. Before ``inner.step()``.

        All ranks call it in every step, or none.

        Raises:
            InvalidArgumentError: not a number of at least 0.
        """
        values.number(f"{self._settings.who}.did", "samples", samples, "from 0 on", lambda it: it >= 0)
        self._counts_samples = True
        self._since = (self._since[0], [one + samples for one in self._since[1]])

    @torch.no_grad()
    def finish(self) -> None:
        """End the round now: the model has the global parameters on all ranks, and its buffers are averaged.

        All ranks call it, after the same number of steps, or rounds where they are unequal. Training may go on.

        Raises:
            MismatchError: another rank is at another step.
        """
        self._refuse_inside_evaluation("finish()")
        turn = self._pace.schedule.finish()
        if self._attendance is None:
            self._take(turn)
            for fragment in self._fragments:
                fragment.write(fragment.total)
        else:
            self._attendance.meetings.begin()
            while not self._come(self._attendance, Coming.FINISH, turn.leaves):
                pass
            self._attendance.finished = True
        start.average_buffers(
            self._model, self._members, f"{self._settings.who} {self._pace.schedule.label()}: buffers"
        )

    def detach(self) -> None:
        """Leave the inner optimizer alone from now on.

        Raises:
            InvalidStateError: with `quorum`, in an elastic job, before `finish`.
        """
        if self._attendance is not None and self._attendance.meetings.runs and is_elastic(self._members):
            raise InvalidStateError(
                f"{self._settings.who}: detach() with quorum= has to come after finish(): ranks meet in the job's own"
                " group"
            )
        self._handle.remove()
        if self._attendance is not None:
            self._attendance.meetings.end()
        if self._scaler is not None:
            self._scaler.__dict__.pop("step", None)

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Inside the block the model has the global parameters, the same on all ranks: for evaluation and saving. Does
        not communicate. Buffers stay this rank's own.
        """
        self._refuse_inside_evaluation("global_parameters()")
        with torch.no_grad(), self._global_parameters_kept():
            own = [torch.empty_like(one.total) for one in self._fragments]
            for fragment, values in zip(self._fragments, own, strict=True):
                fragment.read(values)
                fragment.write(fragment.total)
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False
            with torch.no_grad():
                for fragment, values in zip(self._fragments, own, strict=True):
                    fragment.write(values)

    def stats(self) -> RoundStats:
        """The costs of rounds so far."""
        ranks = self._members.size()
        exact = sum(one.total.numel() * one.total.itemsize for one in self._fragments) * 2 * (ranks - 1) / ranks
        with self._global_parameters_kept():
            sizes = [float(torch.linalg.vector_norm(one.total)) for one in self._fragments]
        of_meetings = 0.0 if self._attendance is None else self._attendance.meetings.bytes_sent
        return RoundStats(
            self.step,
            self.round,
            round(self._bytes + of_meetings),
            round(exact * self.step),
            self._waited_s,
            self._busy_s,
            tuple(change / (size or 1.0) for change, size in zip(self._changes, sizes, strict=True)),
            self._left_out,
        )

    def state_dict(self, *, consolidated: bool = False) -> dict[str, Any]:
        """The state to go on from: global parameters, outer optimizer, this rank's parameters and residuals.

        Waits for fragments in flight, so all ranks call it after the same step. The inner optimizer's state is not in
        it: each rank has its own.

        Args:
            consolidated: the same on all ranks, for any number of them: of the ranks' parameters the mean.
        """
        self._refuse_inside_evaluation("state_dict()")
        self._refuse_while_ranks_meet("state_dict()")
        self._wait_for_flights()
        return state.state_dict(self._rounds(), consolidated=consolidated)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from such a state, also with this rank's parameters; all ranks call it.

        Raises:
            InvalidArgumentError: it is of another model, of other fragments or codecs, or of another number of ranks
                and not consolidated.
            MismatchError: the ranks load states of different steps, or another rank's does not fit.
        """
        self._refuse_inside_evaluation("load_state_dict()")
        self._refuse_while_ranks_meet("load_state_dict()")
        self._wait_for_flights()  # which write into buffers
        self._load(state.load_state_dict, saved)

    def follow_turns(self, ended: Callable[[bool], None]) -> None:
        """With `quorum`: have `ended(came)` called where a turn has ended, on the threads of all ranks, while a rank
        that came to it waits. For `ringdp.elastic.Job`."""
        assert self._attendance is not None
        self._attendance.meetings.ended = ended

    def meet(self) -> None:
        """Take part in the meetings from now on, before this newcomer's first step; the first one begins with what
        `follow_turns` calls."""
        assert self._attendance is not None
        self._attendance.meetings.begin(new=True)

    def state_of_turn(self) -> dict[str, Any]:
        """Within that call, as ``state_dict(consolidated=True)``: the same on all ranks. A rank's own parameters are
        not in it."""
        assert self._attendance is not None
        saved = state.state_dict(self._rounds(), consolidated=True)
        saved["schedule"]["met"] = self._attendance.meetings.turn + 1
        return saved

    def take_over(self, saved: Mapping[str, Any]) -> None:
        """Become one of the ranks that have saved this consolidated state, and that `share` it: for
        `ringdp.elastic.Job`.

        Raises:
            InvalidArgumentError: it is of another model or of other arguments.
        """
        self._load(state.take_over, saved)

    def share(self, saved: Mapping[str, Any]) -> None:
        """What codes owed in this consolidated state is owed by the ranks that are there now, of which others take it
        over: for `ringdp.elastic.Job`, when ranks have come or left."""
        state.share(self._rounds(), saved)

    def _load(self, load: Callable[[state.Rounds, Mapping[str, Any]], None], saved: Mapping[str, Any]) -> None:
        rounds = self._rounds()
        load(rounds, saved)
        self._units, self._since, self._counts_samples = rounds.units, rounds.since, rounds.counts_samples
        self.ended_at = 0
        if self._attendance is not None:
            self._attendance.begin_again(int(saved["schedule"]["met"]), self._units)

    def _rounds(self) -> state.Rounds:
        return state.Rounds(
            self._settings,
            self._members,
            self._pace,
            self._fragments,
            self._exchanges,
            self._outer,
            self._flights,
            self._units,
            self._since,
            self._counts_samples,
        )

    # The actions of a step.

    def _stepped(self, optimizer: object, args: object, kwargs: object) -> None:
        del optimizer, args, kwargs
        self._attempted()

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
    @torch.no_grad()
    def _attempted(self) -> None:
        self._refuse_inside_evaluation("the inner optimizer's step")
        began, waited_before = time.monotonic(), self._waited_s
        self._since = ([one + 1 for one in self._since[0]], self._since[1])
        if self._attendance is None:
            self._take(self._pace.turn(began))
        else:
            self._attend(self._attendance, self._pace.turn(began, self._attendance.meetings.called))
        self._busy_s += self._pace.ended() - began - (self._waited_s - waited_before)

    def _take(self, turn: Turn) -> None:
        for number in turn.lands:
            self._land(number)
        self._refuse_other_parameters(turn)
        for number in turn.leaves:
            self._leave(number, exact=turn.exact)
        for number in turn.lands_at_once:
            self._land(number)

    def _attend(self, attendance: Attendance, turn: Turn) -> None:
        """As `_take`, where turns may have gone by without this rank."""
        if turn.exact:
            self._take(turn)
            attendance.take(turn.leaves, attendance.seen)
            return
        attendance.finished = False
        attendance.meetings.begin()
        if attendance.missed():
            self._went_by(attendance, {})
        elif turn.leaves:
            self._refuse_other_parameters(turn)
            self._come(attendance, Coming.TURN, turn.leaves)

    def _come(self, attendance: Attendance, coming: Coming, numbers: Sequence[int]) -> bool:
        """Bring this rank's changes. Whether they count in this turn; else they join a later one."""
        changes = {number: self._change(attendance, number) for number in numbers}
        came_s = time.monotonic()
        part = Part(coming, attendance.seen, changes, self._counts_samples, came_s)
        counts = attendance.meetings.bring(part)
        self._waited_s += time.monotonic() - came_s
        with attendance.meetings.lock:  # so that no turn ends between what is read of it and what is taken
            if counts:
                attendance.counted(changes)
                self.counted = self.step, attendance.meetings.view
                self._go_on(attendance, numbers, part.turn + 1 if coming is Coming.TURN else attendance.meetings.turn)
            if attendance.missed():
                self._went_by(attendance, {} if counts else changes)
        return counts

    def _went_by(self, attendance: Attendance, changes: Mapping[int, Change]) -> None:
        with attendance.meetings.lock:
            numbers = attendance.missed()
            for number in numbers:
                attendance.left_out(number, changes[number] if number in changes else self._change(attendance, number))
            self._go_on(attendance, numbers, attendance.meetings.turn)

    def _change(self, attendance: Attendance, number: int) -> Change:
        values, norm = attendance.change(number)
        if math.isfinite(norm):
            self._changes[number] = norm
            return attendance.brings(number, values, self._weight(number))
        fragment = self._fragments[number]
        wrong = fragment.first_not_finite()
        self._left_out += 1
        start_over(self._fragments, attendance.bases, fragment, self._inner)
        return Change(values.zero_(), 0.0, 0 if wrong is None else wrong)

    def _go_on(self, attendance: Attendance, numbers: Sequence[int], turn: int) -> None:
        attendance.take(numbers, turn)
        for number in numbers:
            self._since[0][number], self._since[1][number] = 0, 0.0
            self._left_at[number] = self.step
        schedule = self._pace.schedule
        assert isinstance(schedule, OpenSchedule)
        schedule.met(attendance.seen)
        self.ended_at = self.step

    def _global_parameters_kept(self) -> contextlib.AbstractContextManager[object]:
        """Inside, no other thread changes them."""
        return contextlib.nullcontext() if self._attendance is None else self._attendance.meetings.lock

    def _refuse_while_ranks_meet(self, what: str) -> None:
        if self._attendance is not None and not self._attendance.finished:
            raise InvalidStateError(
                f"{self._settings.who}: {what} with quorum= has to come after finish(): ranks are at steps of their"
                " own, and some of their changes are in no round yet"
            )

    def _leave(self, number: int, *, exact: bool) -> None:
        fragment, exchange, settings = self._fragments[number], self._exchanges[number], self._settings
        averages = self._outer[number].averages
        of_parameters = exchange.of_parameters(exact=exact, averages=averages)
        change = fragment.read_parameters() if of_parameters else fragment.read_changes()
        wrong = None if math.isfinite(change) else fragment.first_not_finite()
        if wrong is None:
            self._changes[number] = change
        else:
            self._left_out += 1
            start_over(self._fragments, [one.total for one in self._fragments], fragment, self._inner)
            fragment.buffer.zero_()
        weight = 0.0 if wrong is not None else 1.0 if exact else self._weight(number)
        name = f"{settings.who} {self._pace.schedule.label()}, fragment {number + 1}/{len(self._fragments)}"
        step_s = 0.0 if exact else self._pace.step_s()
        record = Record(
            weight,
            step_s,
            -1 if wrong is None else wrong,
            digest(fragment.total),
            self._counts_samples,
            norm=change if wrong is None else 0.0,
        )
        unit = 1.0 if exact else self._units[number]
        flight = Flight(f"{name}: {fragment.label}", record, unit=unit, exact=exact, averages=averages)
        exchange.start(flight)
        self._flights[number] = flight
        self._left_at[number] = self._pace.schedule.step
        if number + 1 == len(self._fragments):
            self.ended_at = self._left_at[number]
        self._pace.leaves(flight)
        self._since[0][number], self._since[1][number] = 0, 0.0
        self._bytes += exchange.sent_bytes(exact=exact)

    def _land(self, number: int) -> None:
        fragment, flight = self._fragments[number], self._flights[number]
        arrival = self._wait(number, flight)
        del self._flights[number]
        log_not_finite(flight, fragment, arrival)
        log_clipped(flight, arrival)
        if arrival.usable:
            if arrival.of_parameters:
                fragment.total.copy_(fragment.buffer)
            else:
                self._outer[number].step(fragment.buffer)
        left_out = arrival.rank in arrival.left_out
        fragment.write(fragment.total, 0.0 if left_out or flight.exact else self._settings.mix)
        if not flight.exact:
            self._units[number] = arrival.weight

    def _wait(self, number: int, flight: Flight) -> Arrival:
        began = time.monotonic()
        arrival = self._exchanges[number].wait(flight, self._beside(number))
        self._waited_s += time.monotonic() - began
        if number + 1 == len(self._fragments):
            self.counted = self._left_at[number], flight.view
        return arrival

    def _beside(self, number: int) -> Beside | None:
        """What is averaged with this fragment, at once."""
        del number
        return None

    def _wait_for_flights(self) -> None:
        for number, flight in self._flights.items():
            self._wait(number, flight)

    def _weight(self, number: int) -> float:
        if self._counts_samples:
            return self._since[1][number]
        by_steps = self._settings.unequal or self._settings.quorum is not None
        return float(self._since[0][number]) if by_steps else 1.0

    def _refuse_inside_evaluation(self, what: str) -> None:
        if self._evaluating:
            raise InvalidStateError(
                f"{self._settings.who}: {what} inside a block of global_parameters(), where the model has"
                " other parameters than this rank's own"
            )

    def _refuse_other_parameters(self, turn: Turn) -> None:
        """Refuse parameters that would be trained and not averaged. No fragment leaves then; `finish` may still be
        called."""
        if turn.last or not turn.leaves:
            return
        unfrozen = next((one.name for one in self._frozen if one.parameter.requires_grad), None)
        added = (name for name, it in self._model.named_parameters() if it.requires_grad and id(it) not in self._known)
        name = unfrozen or next(added, None)
        if name is not None:
            self._pace.schedule.stay(turn.leaves)
            raise InvalidStateError(
                f"{self._settings.who}: parameter {name} was {'unfrozen' if unfrozen else 'added or replaced'} since"
                " and is not averaged: call finish() and detach(), and make a new one",
                name=name,
            )

    def _watch_scaler(self) -> None:
        """A step that the scaler skips never reaches the optimizer's hook."""
        scaler = self._scaler
        if scaler is None:
            return
        original = scaler.step

        @functools.wraps(original)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self._pace.schedule.step
            result = original(optimizer, *args, **kwargs)
            if optimizer is self._inner[-1] and self._pace.schedule.step == before:
                self._attempted()
            return result

        scaler.step = step  # type: ignore[method-assign]


def _group_of_rounds(members: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup | None:
    """The group that exchanges fragments; None for one rank alone. In an elastic job `members` itself."""
    if is_elastic(members):
        return members
    return None if members.size() == 1 else sibling_groups(members, device, 1, purpose="rounds")[0]


def _refuse_second(who: str, optimizer: torch.optim.Optimizer, members: dist.ProcessGroup) -> None:
    """Allow a second one on this optimizer only for another level of ranks. Raises InvalidArgumentError."""
    ranks = set(dist.get_process_group_ranks(members))
    for hook in optimizer._optimizer_step_post_hooks.values():
        other = getattr(hook, "__self__", None)
        if isinstance(other, DiLoCo) and len(ranks & set(dist.get_process_group_ranks(other._members))) > 1:
            raise InvalidArgumentError(
                f"{who}: a {other._settings.who} hangs on this optimizer already and averages over the same ranks: call"
                " its finish() and detach() first"
            )
