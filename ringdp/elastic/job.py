"""A training whose ranks may come and go."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from ringdp import config, values
from ringdp.data.sampler import BalancedSampler
from ringdp.data.settings import Limits
from ringdp.elastic.loader import Loader
from ringdp.elastic.members import Change, Members
from ringdp.elastic.parts import Parts
from ringdp.elastic.training import training_of
from ringdp.errors import InvalidArgumentError
from ringdp.job import elastic
from ringdp.rounds.diloco import DiLoCo

_log = logging.getLogger("ringdp.elastic")


class Job:
    """The parts that make up the state of a training, and the place in it where ranks may come and go.

        job = ringdp.elastic.Job(model, optimizer, scheduler)
        loader = job.loader(dataset, global_batch=256)
        for epoch in job.epochs(10):
            for x, y in loader:
                ...

    Under ``ringrun --elastic`` a newcomer (a process that replaces one that died, or of a host that comes) builds the
    same objects, and gets their state when it first iterates over `epochs` or a loader: from all other ranks at once,
    between two of their steps. In any other job nobody comes, and the same script runs.

    Args:
        *parts: a RingDP, or a DiLoCo, whose ranks come and go where a round ends; and all other objects with
            `state_dict` and `load_state_dict` that a newcomer needs: the optimizer, a scheduler, a scaler, averaged
            weights. Beside a DiLoCo, each rank's are its own: newcomers get those of the lowest rank.
        min_ranks: with fewer ranks the others wait for newcomers, before their next batch; of all ranks' the largest
            counts. None: what ``ringrun --min-ranks`` says (RINGDP_MIN_RANKS), or 1.
        max_ranks: nobody is let in beyond so many; None: what ``--max-ranks`` says (RINGDP_MAX_RANKS), or no limit.

    Raises:
        InvalidArgumentError: none of the parts is a RingDP or a DiLoCo, several are, or one has no state; a DiLoCo has
            sites of several ranks, or rounds by time; or the job is elastic, and that part averages over some of the
            ranks, or newcomers cannot be sent a part's state.
    """

    def __init__(self, *parts: Any, min_ranks: int | None = None, max_ranks: int | None = None) -> None:
        who = "ringdp.elastic.Job"
        training = self.training = training_of(who, parts)
        group = self._group = training.group
        lasts = elastic.is_elastic(group)
        least = config.min_ranks() if min_ranks is None else values.whole(who, "min_ranks", min_ranks, 1)
        most = config.max_ranks() if max_ranks is None else values.whole(who, "max_ranks", max_ranks, least)
        self._parts = Parts(who, training, lasts=lasts)
        if most is not None and most < least:
            raise InvalidArgumentError(f"{who}: min_ranks={least} is above the most ranks, {most} (RINGDP_MAX_RANKS)")
        self._callbacks: list[Callable[[Change], Any]] = []
        self._audit: Any = None
        self._members: Members | None = None
        if not lasts:
            return
        if group is not dist.group.WORLD:
            kind = type(training.part).__name__
            raise InvalidArgumentError(f"{who}: its {kind} averages over a group of some ranks, which nobody can join")
        elastic.use("job")
        self._members = Members(training, self._parts, least, most)
        self._take_signals(self._members)

    # What scripts use.

    def loader(
        self,
        dataset: Any,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        balance: str = "equal",
        limits: Limits | None = None,
        cost: Callable[[int], float] | None = None,
        **arguments: Any,
    ) -> Loader:
        """A DataLoader whose global batches are split over the ranks that there are. The first one is that of the
        training: ranks come and go before its batches, and not in the passes of others, such as for a validation.

        Each sample of an epoch is in exactly one step that counts, or a line of the log says how many are in none. The
        batches of an epoch are the same for any number of ranks; give RingDP ``weight="samples"`` where the ranks'
        parts may be unequal. A rank for which a batch has no sample gets the dataset's first one, with weight 0.

        Args:
            dataset: as for DataLoader, of known length.
            global_batch: samples of a step, of all ranks together.
            seed: of the order of samples, the same on all ranks.
            shuffle: whether each epoch has an order of its own.
            drop_last: whether the last, smaller global batch of an epoch is left out.
            balance: ``"equal"`` or ``"speed"``, as of `ringdp.data.BalancedSampler`.
            limits: the least and the most samples of a rank, as there; at least 0 where None.
            cost: what a sample costs, as there.
            **arguments: of torch's DataLoader (num_workers, collate_fn, pin_memory, …).

        Raises:
            InvalidArgumentError: arguments that cannot be used, also those of DataLoader that choose batches.
        """
        self.training.refuse_batches()
        for name in ("batch_size", "sampler", "batch_sampler"):
            if name in arguments:
                raise InvalidArgumentError(
                    f"Job.loader: {name} is what global_batch and the ranks decide; leave it out"
                )

        if balance not in ("equal", "speed"):
            raise InvalidArgumentError(
                f'Job.loader: balance is "equal" or "speed", for any number of ranks, not {balance!r}'
            )

        allowed = Limits(least=0) if limits is None else limits  # there may be more ranks than samples

        def sampler() -> BalancedSampler:
            return BalancedSampler(
                dataset,
                global_batch,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                balance=balance,
                limits=allowed,
                cost=cost,
                group=self._group,
            )

        split = f"balance: {balance}, limits: {allowed}, cost: {'given' if cost else 'none'}"
        made = Loader(self, dataset, sampler, split, arguments)
        self._parts.loaders.append(made)
        return made

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs from where the job is to `number`: 0 to number - 1 in a job that begins.

        Raises:
            InvalidArgumentError: not a whole number.
        """
        values.whole("Job.epochs", "number", number, 0)
        self.training.refuse_batches()
        self.enter()
        while self._parts.epoch < number:
            yield self._parts.epoch
            self._parts.epoch += 1
        self.close()

    def rounds(self, number: int) -> Iterator[int]:
        """Steps of a DiLoCo until `number` rounds have ended, with data of the script's own; each time the rounds that
        have. Then it finishes the rounds: the model has the global parameters, the same on all ranks.

        Ranks come and go where a round ends; with a quorum, where a turn of a fragment does.

        Raises:
            InvalidArgumentError: the part that keeps the ranks together is no DiLoCo; not a whole number.
        """
        values.whole("Job.rounds", "number", number, 0)
        rounds = self.training.part
        if not isinstance(rounds, DiLoCo):
            raise InvalidArgumentError(
                f"Job.rounds is for a DiLoCo, and this Job has a {type(rounds).__name__}: iterate over job.epochs()"
            )
        self.enter()
        while rounds.round < number:
            self._before_step()
            if rounds.round < number:
                yield rounds.round
        rounds.finish()
        self.close()

    def close(self) -> None:
        """The training has ended, and nobody is let in any more. `epochs` and `rounds` do it at their end; call it
        where the script leaves that loop before, on all ranks."""
        if self._members is not None:
            self._members.close()

    def on_change(self, call: Callable[[Change], Any]) -> Callable[[Change], Any]:
        """Call `call(change)` on all ranks after the members have changed, before the next batch; a decorator.
        Newcomers have the state then, and call it, too."""
        self._callbacks.append(call)
        return call

    def leave(self, why: str = "job.leave()") -> None:
        """Leave before the next batch, without a loss: this rank hands on what its error feedback owes, and its process
        ends with exit code 0. Any thread, and signal handlers."""
        if self._members is not None:
            self._members.leaving = why

    def audit(self, path: str | os.PathLike[str]) -> None:
        """From now on append a line of JSON to this file for each batch that a rank gets of a loader: step, view, place
        of the rank, epoch, position and samples. Each rank needs a path of its own. Where the disk is full, the lines
        end, with a warning."""
        self._audit = open(Path(path), "a", buffering=1)  # noqa: SIM115  # for the life of the job

    def state_dict(self) -> dict[str, Any]:
        """Of all parts, and the place in the data: the same on all ranks, for `ringdp.checkpoint` or ``torch.save``. It
        loads at any number of ranks. The error feedback of a RingDP is not in it (`RingDP.compression_state_dict`). All
        ranks call it where there is a DiLoCo, whose parts beside its own state are those of this rank."""
        return self._parts.state() | self.training.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`; all ranks call it, before they iterate over `epochs`.

        Raises:
            InvalidArgumentError: it is of other parts or loaders.
        """
        self._parts.require_fit(state)
        self._parts.load(state)
        place = state["ringdp"]
        self.training.load(state, place["step"])
        for loader, position in zip(self._parts.loaders, place["positions"], strict=True):
            loader.sampler.load_state_dict(position)

    @property
    def step(self) -> int:
        """The steps that the job has made."""
        return self.training.step()

    # What loaders use.

    @property
    def _number(self) -> int:
        return self._group.rank() if self._members is None else self._members.number

    @property
    def changes(self) -> int:
        """How often the ranks that loaders follow have changed."""
        return 0 if self._members is None else self._members.turns

    def enter(self) -> None:
        """A newcomer becomes a member. Blocks until the others let it in."""
        if self._members is not None:
            self._members.enter()
            self._tell_changes(self._members)

    def before_step(self, loader: Loader) -> None:
        """Before each batch, on all ranks: let newcomers in, and those that want to leave out. Of the loader that was
        made first alone: what an epoch does behind it, a newcomer would not do."""
        if loader is self._parts.loaders[0]:
            self._before_step()

    def _before_step(self) -> None:
        if self._members is not None:
            self._members.ask_before_step()
            self._tell_changes(self._members)

    def _tell_changes(self, members: Members) -> None:
        while members.changes:
            change = members.changes.pop(0)
            for call in self._callbacks:
                call(change)

    def _take_signals(self, members: Members) -> None:
        """SIGTERM: this rank leaves; a second one ends the process as it would have."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, process = signal.getsignal(signal.SIGTERM), os.getpid()

        def leave(number: int, frame: FrameType | None) -> None:
            if members.leaving is None and not members.over and os.getpid() == process:
                self.leave("SIGTERM")
                return
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)

        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, leave)

    def note_batch(self, epoch: int, batch: int, samples: Sequence[int]) -> None:
        """This rank has been given this batch of a loader."""
        if self._audit is None:
            return
        line = {"step": self.step + 1, "view": elastic.view_of(self._group), "place": self._number, "epoch": epoch}
        try:
            self._audit.write(json.dumps(line | {"batch": batch, "samples": list(samples)}) + "\n")
        except OSError as error:
            _log.warning("rank %d writes no more lines to %s: %s", self._group.rank(), self._audit.name, error.strerror)
            with contextlib.suppress(OSError):
                self._audit.close()
            self._audit = None


__all__ = ["Change", "Job"]
