"""The batch sampler whose split over the ranks follows their speed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from math import fsum
from typing import Any

import torch
import torch.distributed as dist

from ringdp import values
from ringdp.data.agreement import Agreement, compare_settings
from ringdp.data.order import Epochs
from ringdp.data.plans import Drawn, Plan, Plans
from ringdp.data.settings import Limits, Settings
from ringdp.data.speed import SpeedModel
from ringdp.data.split import split
from ringdp.data.watched import Watched, WatchedRounds, WatchedSteps
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.job.byte_collectives import alone, require_member
from ringdp.job.elastic import is_elastic, places
from ringdp.text import ranks_by_number

_log = logging.getLogger("ringdp.data")
_FORMAT = 1


class BalancedSampler(torch.utils.data.Sampler[list[int]]):
    """Batches for a DataLoader's ``batch_sampler``, split over the ranks by how fast each of them is.

    The samples of each step's global batch depend on `seed` and the epoch alone, so a job sees the same batches in the
    same order on any number of ranks, and each sample once per epoch. How a global batch is split follows the times of
    the ranks' own steps, which `watch` gets from a RingDP; all ranks agree on a new split before it counts. A mean over
    unequal batches needs weights: wrap the module so that each rank's gradient counts by its samples.

    All ranks make one, with the same arguments, after `ringdp.init`. One thread draws batches, another may train.

    Args:
        dataset: with a length and an index for each sample; or the length itself.
        global_batch: samples of a step, over all ranks.
        seed: of the order of the samples.
        shuffle: False: the dataset's own order in every epoch.
        drop_last: leave out the samples that do not fill a global batch at the end of an epoch. Otherwise the last
            batch is short, and keeps limits as far as its samples allow.
        balance: ``"speed"``: by measured times; ``"equal"``; or a number for each rank, which gets that share.
        limits: how many samples a rank gets: a `ringdp.data.Limits`; by default one at least.
        cost: the work of a sample by its index, a number from 0 on, such as its length: each rank gets a share of work
            instead of samples. It must give the same on all ranks.
        group: the ranks among which batches are split; the default process group if None.

    Raises:
        InvalidArgumentError: a value that cannot be used; names the argument and the values it takes.
        MismatchError: the ranks' arguments differ, or cannot be used on another rank; names the rank and both values.
        InvalidStateError: several ranks and no process group.
    """

    @values.moved(
        "BalancedSampler", {name: f"limits=ringdp.data.Limits({name}=…)" for name in ("least", "most", "multiple")}
    )
    def __init__(
        self,
        dataset: Sized | int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        balance: str | Sequence[float] = "speed",
        limits: Limits | None = None,
        cost: Callable[[int], float] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = _group(group)
        self._elastic = self._group is not None and is_elastic(self._group)
        ranks: tuple[int, ...] = (0,)  # which the members had at the beginning

        def checked() -> Settings:
            nonlocal ranks
            ranks = (0,) if self._group is None else places(self._group)
            return Settings.checked(
                dataset,
                global_batch,
                len(ranks),
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
                balance=balance,
                limits=Limits() if limits is None else limits,
                has_cost=cost is not None,
            )

        self._settings = compare_settings(checked, self._group)
        # One of `ranks` may be lost by now, and this rank's number another one.
        self._place = 0 if self._group is None else places(self._group)[self._rank]
        self._epochs = Epochs(self._settings.batches)
        self._untrained: dict[int, list[int]] = {}  # samples of batches that lost ranks had a part in, to be dealt anew
        self._cost = cost
        self._plans = Plans(Plan(self._settings.paces, self._settings.limits, ranks))
        self._agreement = Agreement(self._settings, self._plans, self._group)
        self._speed = SpeedModel()
        self._watched: Watched | None = None
        self._lock = threading.RLock()
        # Batches are counted over all epochs: batch p of epoch e is e * len(self) + p.
        self._start = 0  # of the pass that is drawn
        self._next = 0  # the next one that the model gets
        self._committed = 0
        self._drawn_all = False
        self._trained_is_known = False
        self._drawn: dict[int, Drawn] = {}  # those that are not committed
        self._checksum = self._drawn_checksum = 0
        self._work = float(global_batch)  # of the newest batch, over all ranks
        self._repeats = False  # the forwards up to the end of this step are of the batch that was too large

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    # The DataLoader's side.

    def __len__(self) -> int:
        """Batches of a whole epoch; without those that hold again what lost ranks had of it (elastic jobs)."""
        return self._settings.batches.count

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the committed position to the end of the epoch; after a whole one, of the next."""
        with self._lock:
            self._settle()
            self._begin_pass()
            index, epoch = self._start, self.epoch
        needs_times = self._settings.by_speed and self._settings.ranks > 1
        if (needs_times or self._elastic) and self._watched is None:
            otherwise = "" if self._elastic else ", or give balance='equal'"
            raise InvalidStateError(
                f"rank {self._rank}: BalancedSampler does not know which batches are trained, and how fast: call"
                f" sampler.watch(model) with the RingDP or DiLoCo before the first batch is drawn{otherwise}"
            )
        while index < self._end(epoch):
            yield self._draw(index)
            index += 1

    def _end(self, epoch: int) -> int:
        with self._lock:
            return self._epochs.first(epoch + 1)

    def _begin_pass(self) -> None:
        ended = self._next if self._trained_is_known else self._end(self.epoch)
        continues = self._drawn_all and self._epochs.at(ended)[1] == 0 and ended > self._start
        if not continues:
            self._give_back(self._made())
            self._drawn.clear()
            self._drawn_checksum = self._checksum
        elif not self._trained_is_known:
            self._next = self._committed = ended
            self._drawn.clear()
        self._start = ended if continues else self._next
        self._drawn_all = False

    def _made(self) -> int:
        """Batches that the model's parameters have; those of a round that has not ended are not committed."""
        return self._committed if self._watched is None else self._watched.made(self._next, self._committed)

    def _give_back(self, made: int) -> None:
        """Later batches are taken again."""
        self._next = made
        if self._watched is not None:
            self._watched.give_back(made - self._committed)

    def _draw(self, index: int) -> list[int]:
        with self._lock:
            batch = self._epochs.batch(index)
        costs = None if self._cost is None else self._costs(batch)
        with self._lock:
            self._agreement.before_drawing(index)
            number, plan = self._plans.at(index)
            counts = self._split(plan, costs, len(batch))
            rank = plan.places.index(self._place)
            begin = sum(counts[:rank])
            end = begin + counts[rank]
            work = float(end - begin) if costs is None else fsum(costs[begin:end])
            drawn = Drawn.after(self._drawn_checksum, index, counts, work=work, samples=end - begin, plan=number)
            self._drawn[index], self._drawn_checksum = drawn, drawn.checksum
            self._drawn_all = index + 1 == self._end(self._epochs.at(index)[0])
            self._work = float(len(batch)) if costs is None else fsum(costs)
            return batch[begin:end]

    def _samples_of(self, gone: Collection[int], index: int) -> list[int]:
        """What these places have, or would have, of batch `index`."""
        batch, (_, plan) = self._epochs.batch(index), self._plans.at(index)
        costs = None if self._cost is None else self._costs(batch)
        counts = self._split(plan, costs, len(batch))
        ends = list(accumulate(counts))
        return [
            sample
            for place, count, end in zip(plan.places, counts, ends, strict=True)
            if place in gone
            for sample in batch[end - count : end]
        ]

    def _split(self, plan: Plan, costs: Sequence[float] | None, total: int) -> list[int]:
        """How many samples of a batch of `total` each rank of the plan gets."""
        return split(plan.paces, self._settings.batches.size, plan.limits, costs, total)

    def _costs(self, batch: Sequence[int]) -> list[float]:
        assert self._cost is not None
        costs = [float(self._cost(index)) for index in batch]
        for index, cost in zip(batch, costs, strict=True):
            if not 0 <= cost < float("inf"):
                raise InvalidArgumentError(f"BalancedSampler's cost({index}) is {cost}: it must be a number from 0 on")
        return costs

    # The training's side.

    def watch(self, model: Any, *, forwards: int = 1) -> None:
        """Split by the times of this model's steps, and count its batches as trained; all ranks call it.

        The time of a step is this rank's own, from the beginning of the forward to the last gradient of the backward
        that synchronises: its waits for other ranks do not count. Each forward that records gradients takes a
        batch; those under `no_sync` are trained when a backward synchronises. Of a DiLoCo batches are trained when the
        round of their step counts, and no times are measured.

        Args:
            model: the RingDP or DiLoCo, on the same ranks.
            forwards: how many forwards each batch takes.

        Raises:
            InvalidArgumentError: neither of them, one on other ranks, or a DiLoCo with ``balance="speed"``.
        """
        rounds = hasattr(model, "counted")
        if not rounds and not hasattr(model, "_before_forward"):
            raise InvalidArgumentError(
                f"BalancedSampler.watch needs a ringdp.RingDP or a ringdp.DiLoCo, not a {type(model).__name__}"
            )
        values.whole("BalancedSampler.watch", "forwards", forwards, 1)
        if rounds and self._settings.by_speed:
            raise InvalidArgumentError(
                "balance='speed' measures the steps of a RingDP: give balance='equal', or a number for each rank"
            )
        if self._settings.by_speed and model.device_type != "cpu":
            raise InvalidArgumentError(
                f"the model is on {model.device_type}, whose time BalancedSampler cannot measure: give balance= a"
                " number for each rank"
            )
        group = model.process_group
        same = (group.size(), group.rank()) == (self._settings.ranks, self._rank)
        if not (group is self._group if self._elastic else same):
            raise InvalidArgumentError(
                f"the model averages over {group.size()} ranks, of which this is number {group.rank()}, and the sampler"
                f" splits batches over {self._settings.ranks}, of which it is number {self._rank}: give both the same"
                " process group (BalancedSampler(group=…))"
            )
        with self._lock:
            if self._watched is not None:
                self._watched.remove()
            kind: type[WatchedRounds | WatchedSteps] = WatchedRounds if rounds else WatchedSteps
            self._watched = kind(model, self._before_forward, forwards)
            self._trained_is_known = True
        unequal = not rounds and self._settings.ranks > 1 and getattr(model, "_weight", None) is None
        if self._rank == 0 and unequal:
            _log.warning(
                "RingDP counts all ranks the same and their batches are unequal: make it with weight='samples', or"
                " weigh the ranks' losses by hand"
            )

    def described(self) -> list[str]:
        """The arguments that decide which samples a batch has: "name: value"."""
        return [f"{name}: {value}" for name, value in self._settings.saved().items()]

    def unwatch(self) -> None:
        """Follow the steps of the watched model no longer."""
        with self._lock:
            self._settle()
            if self._watched is not None:
                self._watched.remove()
            self._watched = None

    def end_pass(self) -> None:
        """What is drawn and not trained is for no forward any more: those that follow are of other loaders' batches."""
        with self._lock:
            self._settle()
            for index in [index for index in self._drawn if index >= self._next]:
                del self._drawn[index]

    def out_of_memory(self) -> None:
        """Report that the current batch did not fit into this rank's memory: call it where the error is caught.

        From the next split on that the ranks agree on, within about 30 steps, this rank gets at most half as many
        samples as this batch has for it. Forwards up to the backward that synchronises are of the same batch: run it
        in parts, all but the last one under `no_sync`, since the other ranks wait for this step. Of unequal parts only
        ``RingDP(weight="samples")`` makes the right mean.

        Raises:
            InvalidStateError: the sampler watches no model, or that has not been given a batch.
        """
        with self._lock:
            watched = self._watched
            drawn = self._drawn.get(self._next - 1)
            if watched is None or drawn is None or not watched.in_step:
                raise InvalidStateError(
                    f"rank {self._rank}: BalancedSampler.out_of_memory is called where an error of the watched model's"
                    " forward or backward is caught, and no batch is under way"
                )
            self._repeats = True
            watched.repeat_batch()
            multiple = self._settings.limits.multiple
            half = max(drawn.samples // 2 // multiple * multiple, multiple)
            self._agreement.take_at_most(half)
            _log.warning(
                "rank %d ran out of memory with %d samples of batch %d: it gets at most %d once the ranks have agreed",
                self._rank,
                drawn.samples,
                self._next - 1,
                half,
            )

    def commit(self, batches: int = 1) -> None:
        """Count `batches` more as trained. For a model that is not watched; `watch` does it by itself.

        Raises:
            InvalidArgumentError: more than were drawn.
        """
        with self._lock:
            if not 0 < batches <= len(self._drawn):
                raise InvalidArgumentError(f"{batches} batches cannot be trained of {len(self._drawn)} that were drawn")
            self._trained_is_known = True
            self._next += batches
            self._commit(self._next)

    def _before_forward(self) -> None:
        """In each forward of the watched model that records gradients."""
        with self._lock:
            watched = self._watched
            assert watched is not None
            self._settle()
            if not self._repeats:
                watched.forward_begins()
                if watched.begins_batch and self._next in self._drawn:
                    self._next += 1
                drawn = self._drawn.get(self._next - 1)
                if drawn is not None and drawn.samples == 0:
                    watched.count_nothing()
            if self._elastic:
                self._follow_members(watched.members())
            self._agreement.step(watched.steps, self._committed, self._checksum, self._speed, self._work)

    def _settle(self) -> None:
        """Take over the results of backwards since the last call."""
        watched = self._watched
        if watched is None or not watched.step_ended(self._repeats):
            return
        trained = watched.trained(self._next)
        drawn = self._drawn.get(self._next - 1)
        seconds = None if self._repeats else watched.seconds()
        if self._repeats:
            watched.batch_ends()
            self._repeats = False
        if drawn is not None and seconds is not None:
            if drawn.plan != watched.plan:
                self._speed.split_changed()
                watched.plan = drawn.plan
            self._speed.add(drawn.work, seconds)
        self._commit(trained)

    def _commit(self, end: int) -> None:
        """Batches up to that one are trained."""
        if self._elastic and self._watched is not None and (gone := self._gone(self._watched.members())):
            for index in range(self._committed, end):
                self._untrained[index] = self._samples_of(gone, index)
        for index in range(self._committed, end):
            drawn = self._drawn.pop(index, None)
            self._checksum = self._checksum if drawn is None else drawn.checksum
        self._committed = max(end, self._committed)

    # In elastic jobs. What lost ranks had of a batch that was drawn comes in batches behind the others of its epoch.

    def _gone(self, members: Collection[int] | None) -> set[int]:
        """Places that the newest plan has, and that had no part in the last step."""
        return set() if members is None else set(self._plans.newest.places) - set(members)

    def _follow_members(self, members: Collection[int] | None) -> None:
        """All ranks call it at the same place, with the members that have made the last step."""
        gone = self._gone(members)
        if not gone:
            return
        drawn = max([self._committed, self._next, *(index + 1 for index in self._drawn)])
        start = self._agreement.follow(gone, drawn)
        for index in range(self._committed, start):
            self._untrained[index] = self._samples_of(gone, index)
        for epoch in sorted({self._epochs.at(index)[0] for index in self._untrained}):
            self._deal_anew(epoch, start, gone)
        self._untrained.clear()

    def _deal_anew(self, epoch: int, start: int, gone: Collection[int]) -> None:
        """What is untrained of this epoch; `start`: the first batch that no rank has drawn."""
        batches = [index for index in self._untrained if self._epochs.at(index)[0] == epoch]
        samples = [sample for index in batches for sample in self._untrained[index]]
        first, end = self._epochs.first(epoch), self._epochs.first(epoch + 1)
        if start < end:
            self._epochs.leave_over(epoch, samples)
        if samples and self._rank == 0:
            _log.warning(
                "epoch %d: %d samples of batches %d to %d, which went to %s, %s",
                epoch,
                len(samples),
                batches[0] - first,
                batches[-1] - first,
                ranks_by_number(gone),
                "come again at the end of the epoch" if start < end else "are in no step: no batch was left to draw",
            )

    # The position.

    @property
    def epoch(self) -> int:
        """The epoch whose batches are drawn, or would be."""
        with self._lock:
            return self._epochs.at(self._start)[0]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many samples of a full batch each rank gets by the newest split; with `cost` only roughly."""
        plan = self._plans.newest
        return tuple(self._split(plan, None, self._settings.batches.size))

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next: from its beginning, or, where it is the present one and not done, as `__iter__`."""
        values.whole("BalancedSampler.set_epoch", "epoch", epoch, 0)
        with self._lock:
            self._settle()
            if epoch != self.epoch or self._drawn_all:
                self._go_to(epoch, 0, [])

    def state_dict(self) -> dict[str, Any]:
        """The position of training: the same on all ranks; it loads at any number of ranks.

        Batches that a DataLoader's workers have drawn, and no backward has used, are drawn again.
        """
        with self._lock:
            self._settle()
            epoch, position = self._epochs.at(self._made())
            left_over = [*self._epochs.left_over(epoch)]
            for index, samples in self._untrained.items():
                left_over += samples if self._epochs.at(index)[0] == epoch else []
            return {
                "version": _FORMAT,
                **self._settings.saved(),
                "epoch": epoch,
                "position": position,
                "left_over": left_over,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`; all ranks call it, before they draw batches.

        Raises:
            InvalidArgumentError: it is of another order of samples (seed, length, global batch); names the difference.
        """
        position = self._settings.position_in(state, _FORMAT)
        with self._lock:
            self._go_to(*position)

    def _go_to(self, epoch: int, position: int, left_over: list[int]) -> None:
        self._epochs.begin(epoch, left_over)
        self._untrained.clear()
        if self._elastic:  # no plan with lost ranks counts any more
            self._plans.forget()
        self._start = self._committed = self._epochs.first(epoch) + position
        self._give_back(self._committed)
        self._drawn.clear()
        self._drawn_checksum = self._checksum
        self._drawn_all = False


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """None in a process that no launcher started and that has no process group: a world of one."""
    if group is None and alone("BalancedSampler"):
        return None
    return require_member(group, "ringdp.data.BalancedSampler")
