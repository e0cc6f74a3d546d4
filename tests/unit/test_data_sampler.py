"""BalancedSampler on ranks that are objects of one process, with clocks that are made up: the laws of its batches."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from ringdp.data import BalancedSampler, Limits, agreement, sampler, watched
from ringdp.data.order import GlobalBatches
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.job import agreement as job_agreement

Times = Callable[[int, int, float], float]  # rank, step and samples to seconds


class Gather:
    """In the place of BackgroundGather: what ranks of this process give under one name."""

    given: ClassVar[dict[str, list[bytes]]] = {}

    def __init__(self, data: bytes, group: Any, name: str) -> None:
        self._all = self.given.setdefault(name, [b""] * group.size())
        self._all[group.rank()] = data

    def wait(self) -> list[bytes]:
        assert all(self._all), "a rank waits for one that has not told its pace yet"
        return self._all


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: size
        self._device_types = [torch.device("cpu")]


class Model:
    """What `watch` needs of a RingDP; `step` is a step of it."""

    device_type = "cpu"
    clock_ns = 0  # of the rank that is in a forward

    def __init__(self, group: Group) -> None:
        self.process_group, self.reducer, self.report = group, self, self
        self._before_forward: list[Callable[[], None]] = []
        self.now_ns = 1
        self._times = {"finished_ns": 0, "computed_ns": 0}
        self._repeat_batch = lambda: None

    def times(self) -> dict[str, int]:
        return self._times

    def forward(self) -> None:
        Model.clock_ns = self.now_ns
        for listener in self._before_forward:
            listener()

    def backward(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self._times = {"computed_ns": self.now_ns, "finished_ns": self.now_ns + 1}
        self.now_ns += 2


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gather, "given", {})
        patch.setattr(agreement, "BackgroundGather", Gather)
        patch.setattr(agreement, "group_for_background", lambda group, purpose: group)
        patch.setattr(job_agreement, "all_gather_where_different", lambda *_, **__: None)
        patch.setattr(job_agreement, "named", lambda name: contextlib.nullcontext())
        patch.setattr(job_agreement, "report_refusal", lambda *_: None)
        patch.setattr(sampler, "_group", lambda group: group)
        patch.setattr(watched, "monotonic_ns", lambda: Model.clock_ns)
        yield


@dataclass
class Rank:
    """A rank whose DataLoader has drawn `ahead` batches more than the model has got."""

    model: Model
    sampler: BalancedSampler
    ahead: int
    queue: deque[list[int]] = field(default_factory=deque)
    source: Iterator[list[int]] = field(default_factory=lambda: iter(()))

    def draw(self) -> None:
        self.queue.extend(batch for batch in [next(self.source, None)] if batch is not None)

    def begin(self) -> None:
        self.queue.clear()
        self.source = iter(self.sampler)
        for _ in range(self.ahead):
            self.draw()


def make(n: int, length: int, size: int, ahead: list[int], **options: Any) -> list[Rank]:
    ranks = []
    for rank in range(n):
        group = Group(rank, n)
        model = Model(group)
        made = BalancedSampler(length, size, group=group, **options)  # type: ignore[arg-type]
        made.watch(model)
        ranks.append(Rank(model, made, ahead[rank]))
    return ranks


def train(ranks: list[Rank], times: Times, steps: int, at: int = 0) -> list[list[list[int]]]:
    """The ranks' batches of each step; fewer where the epoch ends."""
    taken = []
    for step in range(at, at + steps):
        for rank in ranks:
            rank.draw()
        if not ranks[0].queue:
            break
        batches = [rank.queue.popleft() for rank in ranks]
        for rank in ranks:
            rank.model.forward()
        for number, (rank, batch) in enumerate(zip(ranks, batches, strict=True)):
            rank.model.backward(times(number, step, len(batch)))
        taken.append(batches)
    return taken


def joined(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    length=st.integers(40, 1500),
    seed=st.integers(0, 3),
    drop_last=st.booleans(),
    with_cost=st.booleans(),
)
def test_ranks_speeds_and_restarts_never_change_a_global_batch(
    data: st.DataObject, length: int, seed: int, drop_last: bool, with_cost: bool
) -> None:
    size = data.draw(st.sampled_from([8, 12, 20]))
    whole = GlobalBatches(length, size, seed, True, drop_last)
    cost = (lambda index: 1.0 + index % 7) if with_cost else None
    state: dict[str, Any] | None = None
    expected = [whole.batch(whole.order(epoch), p) for epoch in range(3) for p in range(whole.count)]
    position = 0
    for _ in range(data.draw(st.integers(1, 4))):  # lives of the job, each with other ranks
        n = data.draw(st.integers(1, 4))
        if whole.last_size < n:
            continue
        speeds = data.draw(st.lists(st.floats(0.2, 5), min_size=n, max_size=n))
        jump = data.draw(st.integers(0, 200))
        with one_process():
            ahead = data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
            ranks = make(n, length, size, ahead, seed=seed, drop_last=drop_last, cost=cost)
            if state is not None:
                for rank in ranks:
                    rank.sampler.load_state_dict(state)

            def times(rank: int, step: int, samples: float, speeds: list[float] = speeds, jump: int = jump) -> float:
                return speeds[rank] * (2.0 if step > jump and rank == 0 else 1.0) * (3 + samples)

            steps, done = data.draw(st.integers(0, 150)), 0
            while done < steps and position < len(expected):
                for rank in ranks:
                    rank.begin()
                taken = train(ranks, times, steps - done, done)
                for batches in taken:
                    assert joined(batches) == expected[position]
                    position += 1
                done += len(taken)
            states = [rank.sampler.state_dict() for rank in ranks]
            assert all(one == states[0] for one in states)
            state = states[0]
            assert state["epoch"] * whole.count + state["position"] == position


def test_an_epoch_has_each_sample_once_and_epochs_differ() -> None:
    with one_process():
        ranks = make(3, 103, 10, [0, 2, 5])
        epochs = []
        for _ in range(3):
            for rank in ranks:
                rank.begin()
            epochs.append([index for step in train(ranks, lambda r, s, b: r + 1.0, 99) for index in joined(step)])
        assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]


def changes(counts: list[tuple[int, ...]]) -> int:
    return sum(a != b for a, b in pairwise(counts))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("n", [2, 4])
def test_noise_of_a_fifth_changes_the_split_once_in_500_steps_at_most(n: int, seed: int) -> None:
    rng = random.Random(seed)
    with one_process():
        ranks = make(n, 10**6, 128, [4] * n)
        for rank in ranks:
            rank.begin()
        taken = train(ranks, lambda r, s, b: (5 + b) * rng.uniform(0.8, 1.2), 500)
        assert changes([tuple(map(len, step)) for step in taken]) <= 1


@pytest.mark.parametrize("when", range(300, 321, 3))
@pytest.mark.parametrize(("n", "noise"), [(2, 0.05), (4, 0.05), (2, 0.2)])
def test_a_rank_whose_speed_halves_is_followed_within_60_steps(n: int, noise: float, when: int) -> None:
    rng = random.Random(when)
    with one_process():
        ranks = make(n, 10**6, 128, [8] * n)
        for rank in ranks:
            rank.begin()

        def times(rank: int, step: int, samples: float) -> float:
            slow = 2.0 if rank == 0 and step >= when else 1.0
            return slow * samples * rng.uniform(1 - noise, 1 + noise)

        taken = train(ranks, times, when + 60)
        parts = [len(batch) for batch in taken[-1]]
        ideal = 128 / (2 * n - 1)
        assert abs(parts[0] - ideal) <= (0.1 if noise < 0.1 else 0.35) * ideal
        assert all(abs(part - 2 * ideal) <= (0.1 if noise < 0.1 else 0.35) * 2 * ideal for part in parts[1:])


def test_a_rank_with_half_the_speed_gets_half_the_samples_and_overhead_is_learnt() -> None:
    with one_process():
        ranks = make(2, 10**6, 128, [3, 3])
        for rank in ranks:
            rank.begin()
        taken = train(ranks, lambda r, s, b: (40 + b) * (1.0 + r), 400)
        # (128 + 80) / 1.5 = 138.7 seconds for both: 98.7 and 29.3 samples.
        assert [len(batch) for batch in taken[-1]] == [99, 29]
        assert ranks[0].sampler.counts == (99, 29)


def test_limits_and_multiples_hold_while_speeds_change() -> None:
    with one_process():
        ranks = make(2, 10**6, 128, [3, 0], limits=Limits([24, 8], [104, 72], 8))
        for rank in ranks:
            rank.begin()
        taken = train(ranks, lambda r, s, b: b * (1.0 if (s < 200) == (r == 0) else 9.0), 400)
        seen = {tuple(map(len, step)) for step in taken}
        assert {(104, 24), (56, 72)} <= seen
        assert all(24 <= a <= 104 and 8 <= b <= 72 and a % 8 == 0 == b % 8 for a, b in seen)


def twice(call: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        call()
        call()

    return both


def run_out_of_memory(ranks: list[Rank], guilty: int, most: int, steps: int) -> list[list[list[int]]]:
    """Train; a batch of more than `most` samples takes the guilty rank two forwards more."""
    taken = []
    for _ in range(steps):
        for rank in ranks:
            rank.draw()
        batches = [rank.queue.popleft() for rank in ranks]
        for number, (rank, batch) in enumerate(zip(ranks, batches, strict=True)):
            rank.model.forward()
            if number == guilty and len(batch) > most:
                rank.sampler.out_of_memory()
                rank.model.forward()
                rank.sampler.out_of_memory()  # the half did not fit either: it is the same batch
                rank.model.forward()
        for rank in ranks:
            rank.model.backward(1.0)
        taken.append(batches)
    return taken


@pytest.mark.parametrize(
    "options", [{}, {"balance": "equal"}, {"cost": lambda index: 1.0 + index % 3}], ids=["by speed", "equal", "by cost"]
)
@pytest.mark.parametrize("forwards", [1, 2])
def test_a_rank_that_ran_out_of_memory_gets_half_from_then_on(options: dict[str, Any], forwards: int) -> None:
    with one_process():
        ranks = make(3, 48 * 80, 48, [5, 0, 2], limits=Limits(multiple=2), **options)
        if forwards == 2:
            for rank in ranks:
                rank.sampler.watch(rank.model, forwards=2)
                rank.model.forward = twice(rank.model.forward)  # type: ignore[method-assign]
        for rank in ranks:
            rank.begin()
        before = train(ranks, lambda r, s, b: 1.0, 12)
        taken = run_out_of_memory(ranks, 1, 10, 68)
        counts = [tuple(map(len, step)) for step in taken]
        assert counts[0][1] > 10
        late = [step for step, (_, mine, _) in enumerate(counts) if mine > 10]
        assert max(late) <= 36, (
            counts
        )  # within 20 steps it is told, and counts from the first batch that nobody has drawn
        assert counts[-1][1] <= max(count[1] for count in counts[:30]) // 2
        order = GlobalBatches(48 * 80, 48)
        wanted = [order.batch(order.order(0), position) for position in range(80)]
        assert [joined(step) for step in before + taken] == wanted
        assert {rank.sampler.state_dict()["position"] for rank in ranks} == {0}
        assert {rank.sampler.state_dict()["epoch"] for rank in ranks} == {1}


def test_ranks_that_cannot_take_a_batch_any_more_all_say_so() -> None:
    with one_process():
        ranks = make(2, 48 * 80, 48, [0, 0], limits=Limits(most=24))
        for rank in ranks:
            rank.begin()
        words = r"since rank 1 ran out of memory 2 ranks with most=\[24, 12\].*take 36 samples, and global_batch=48"
        with pytest.raises(InvalidStateError, match=words):
            run_out_of_memory(ranks, 1, 12, 40)


def test_out_of_memory_is_of_a_batch_under_way() -> None:
    with one_process():
        ranks = make(2, 480, 48, [0, 0])
        with pytest.raises(InvalidStateError, match="no batch is under way"):
            ranks[0].sampler.out_of_memory()
        for rank in ranks:
            rank.begin()
        train(ranks, lambda r, s, b: 1.0, 2)
        with pytest.raises(InvalidStateError, match="no batch is under way"):
            ranks[0].sampler.out_of_memory()


def test_a_broken_off_epoch_goes_on_where_training_was() -> None:
    with one_process():
        ranks = make(2, 400, 10, [6, 1])
        for rank in ranks:
            rank.begin()
        first = train(ranks, lambda r, s, b: 1.0, 15)
        for rank in ranks:
            rank.begin()
        rest = train(ranks, lambda r, s, b: 1.0, 99)
        assert sorted(joined(joined(step) for step in first + rest)) == list(range(400))  # type: ignore[arg-type]


def test_set_epoch_of_the_present_one_keeps_the_position_and_another_one_begins() -> None:
    with one_process():
        ranks = make(1, 40, 10, [0])
        one = ranks[0].sampler
        one.load_state_dict(one.state_dict() | {"epoch": 2, "position": 3})
        one.set_epoch(2)
        assert (one.epoch, len(list(one))) == (2, 1)
        one.set_epoch(3)
        assert len(list(one)) == 4
        assert one.epoch == 3


def test_batches_under_no_sync_are_trained_when_a_backward_synchronises() -> None:
    with one_process():
        rank = make(1, 100, 10, [2])[0]
        rank.begin()
        for _ in range(3):
            rank.draw()
            rank.queue.popleft()
            rank.model.forward()
        assert rank.sampler.state_dict()["position"] == 0
        rank.model.backward(1.0)
        assert rank.sampler.state_dict()["position"] == 3


def test_two_forwards_of_a_batch_count_as_one() -> None:
    with one_process():
        rank = make(1, 100, 10, [2])[0]
        rank.sampler.watch(rank.model, forwards=2)
        assert len(rank.model._before_forward) == 1
        rank.begin()
        for _ in range(4):
            rank.model.forward()
            rank.model.backward(1.0)
        assert rank.sampler.state_dict()["position"] == 2


def test_without_a_model_batches_are_committed_by_hand() -> None:
    one = BalancedSampler(25, 10, balance="equal")
    drawn = iter(one)
    next(drawn), next(drawn)
    with pytest.raises(InvalidArgumentError, match="3 batches cannot be trained of 2"):
        one.commit(3)
    one.commit()
    assert one.state_dict()["position"] == 1
    again = BalancedSampler(25, 10, balance="equal")
    again.load_state_dict(one.state_dict())
    assert [len(batch) for batch in again] == [10, 5]
    assert again.epoch == 0
    assert [len(batch) for batch in again] == [10, 10, 5]
    assert again.epoch == 1


def test_ranks_that_split_by_other_costs_are_told() -> None:
    with one_process():
        ranks = make(2, 10**5, 64, [2, 2])
        ranks[0].sampler._cost = lambda index: 1.0 + index % 2
        ranks[1].sampler._cost = lambda index: 1.0 + index % 3
        for rank in ranks:
            rank.begin()
        with pytest.raises(MismatchError, match="rank 1 has split the 10 batches up to step 10 otherwise than rank 0"):
            train(ranks, lambda r, s, b: 1.0, 40)


def test_ranks_that_went_on_from_other_positions_are_told() -> None:
    with one_process():
        ranks = make(2, 10**5, 64, [0, 0])
        state = ranks[0].sampler.state_dict()
        ranks[1].sampler.load_state_dict(state | {"position": 7})
        for rank in ranks:
            rank.begin()
        with pytest.raises(MismatchError, match="rank 1 has trained 17 batches in 10 steps, and rank 0 10 in 10"):
            train(ranks, lambda r, s, b: 1.0, 40)


def test_a_rank_that_is_not_watched_is_told_before_its_first_batch() -> None:
    with one_process():
        made = BalancedSampler(100, 10, group=Group(1, 2))  # type: ignore[arg-type]
        with pytest.raises(InvalidStateError, match=r"rank 1: .* sampler\.watch\(model\)"):
            next(iter(made))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((Stream(), 10), {}, "an IterableDataset does not have"),
        ((object(), 10), {}, "a dataset with a length"),
        ((100, 0), {}, "global_batch must be a whole number from 1 on, not 0"),
        ((100, 10.0), {}, "global_batch must be a whole number"),
        ((0, 10), {}, "dataset's length"),
        ((5, 10), {"drop_last": True}, "5 samples do not fill one global batch of 10"),
        ((101, 10), {}, "the last batch of an epoch has 1 samples for 4 ranks: give drop_last=True"),
        ((100, 10), {"limits": Limits(3)}, "4 ranks with least=3 .* need 12 samples, and global_batch=10"),
        ((100, 10), {"limits": Limits(most=2)}, "4 ranks with most=2 .* take 8 samples, and global_batch=10"),
        ((100, 10), {"limits": Limits(most=[2, 2, 2, 3])}, r"most=\[2, 2, 2, 3\] .* take 9"),
        ((100, 10), {"limits": Limits([1, 2])}, "one for each of the 4 ranks"),
        ((100, 10), {"limits": Limits(multiple=3)}, "global_batch=10 is not a multiple of multiple=3"),
        ((100, 16), {"limits": Limits(5, 7, 4)}, "no multiple of 4 lies between least=5 and most=7"),
        ((100, 10), {"balance": "fast"}, "'speed', 'equal', or a number above 0 for each of the 4 ranks, not 'fast'"),
        ((100, 10), {"balance": [1, 2, 3]}, "a number above 0 for each of the 4 ranks"),
        ((100, 10), {"balance": [1, 2, 3, float("nan")]}, "a number above 0"),
        ((100, 10), {"balance": [1, 2, 3, 0]}, "a number above 0"),
        ((100, 10), {"limits": 3}, "limits must be a ringdp.data.Limits, not 3"),
        ((100, 10), {"seed": "x"}, "seed must be a whole number"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: Any, options: dict[str, Any], words: str) -> None:
    with one_process(), pytest.raises(InvalidArgumentError, match=words):
        BalancedSampler(*arguments, group=Group(0, 4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"least": -1}, "least must be a whole number from 0 on, not -1"),
        ({"least": "all"}, "least must be a number, or one for each rank"),
        ({"most": [4, 0]}, "most must be a whole number from 1 on, not 0"),
        ({"multiple": 0}, "multiple must be a whole number from 1 on"),
    ],
)
def test_limits_that_cannot_be_used_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Limits: {words}"):
        Limits(**given)


@pytest.mark.parametrize("name", ["least", "most", "multiple"])
def test_an_argument_that_it_had_names_its_place(name: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument '{name}': limits=ringdp.data.Limits\({name}=…\) has it"):
        BalancedSampler(100, 10, **{name: 2})  # type: ignore[arg-type]


def test_an_empty_batch_comes_only_to_who_allows_it() -> None:
    with one_process():
        made = [BalancedSampler(9, 8, group=Group(r, 2), limits=Limits(0), balance="equal") for r in range(2)]  # type: ignore[arg-type]
        assert [[len(batch) for batch in one] for one in made] == [[4, 1], [4, 0]]


def test_weights_are_shares() -> None:
    with one_process():
        made = BalancedSampler(100, 10, group=Group(0, 2), balance=[4, 1])  # type: ignore[arg-type]
        assert made.counts == (8, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "saved with seed=1, and here it is 0"),
        ({"length": 99}, "saved with length=99"),
        ({"global_batch": 5}, "saved with global_batch=5"),
        ({"version": 2}, "version 2"),
        ({"position": 11}, "batch 11 of epoch 0"),
        ({"position": None}, "not a BalancedSampler's state"),
    ],
)
def test_a_state_of_another_order_is_refused(change: dict[str, Any], words: str) -> None:
    one = BalancedSampler(100, 10)
    with pytest.raises(InvalidArgumentError, match=words):
        one.load_state_dict(one.state_dict() | change)
    with pytest.raises(InvalidArgumentError, match="not a BalancedSampler's state"):
        one.load_state_dict({})


@pytest.mark.parametrize("cost", [lambda index: -1.0, lambda index: float("nan")])
def test_a_cost_that_is_not_a_number_from_0_on_is_refused(cost: Callable[[int], float]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cost\(\d+\) is"):
        next(iter(BalancedSampler(100, 10, cost=cost)))


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 3}])
def test_data_loaders_of_all_kinds_draw_from_it(options: dict[str, Any]) -> None:
    dataset = torch.arange(53)
    one = BalancedSampler(dataset, 10)
    loader: Any = DataLoader(dataset, batch_sampler=one, num_workers=2 if options else 0, **options)  # type: ignore[arg-type]
    epochs = [torch.cat(list(loader)) for _ in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(53)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert len(loader) == 6


def test_only_a_ringdp_can_be_watched() -> None:
    with pytest.raises(InvalidArgumentError, match=r"needs a ringdp\.RingDP or a ringdp\.DiLoCo, not a Linear"):
        BalancedSampler(10, 5).watch(torch.nn.Linear(1, 1))
