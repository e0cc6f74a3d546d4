"""Rounds that end without late ranks: the result is that of the reference algorithm, given who was in which round."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ringdp
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError, PeerLostError
from ringdp.rounds import DiLoCo, LocalSGD
from ringdp.rounds.quorum import RECENT, Change, Coming, Part, Presence, Quorum
from tests.fault.elastic_jobs import joined
from tests.helpers import logged
from tests.train import rounds_reference as reference
from tests.train.harness import on_ranks, require_same_bits, run_outcomes, run_ranks
from tests.train.rounds_reference import MOMENTUM, loss_of, sgd

ROUNDS, EVERY = 14, 6
TOLERANCE = 1e-8  # sums in another order, over 80 steps: up to 6e-10 in 150 draws


@dataclasses.dataclass(frozen=True)
class Event:
    """A rank's parameters became the global ones of `round`, behind its `step`; `counts`: its change is in them."""

    step: int
    round: int
    counts: bool


def samples_of(step: int) -> float:
    return 1.0 + step % 3


def wait_for_turns(rounds: DiLoCo, turns: int) -> None:
    assert rounds._attendance is not None
    until = rounds._attendance.seen + turns
    while turns and rounds._attendance.meetings.turn < until:
        time.sleep(0.01)


def trained(
    late: dict[int, list[tuple[int, int]]],
    weighs: bool,
    seed: int,
    dies: tuple[int, int] | None = None,
    folder: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Each rank makes steps of random times until so many rounds are over; `late`: by rank, the steps before which it
    stands still until so many turns have gone by; `dies`: a rank, and the step before which it is killed, having left
    its story in `folder`."""
    me = dist.get_rank()
    module, draw = reference.model(), random.Random(100 * seed + me)
    optimizer = sgd(list(module.parameters()))
    rounds = DiLoCo(module, optimizer, **{"every": EVERY, "outer": MOMENTUM, "quorum": 0.5, "grace": 0.05, **options})
    events: list[Event] = []
    with logged("ringdp.rounds") as lines:
        while rounds.round < ROUNDS:
            step = rounds.step + 1
            time.sleep(draw.uniform(0.0, 0.004))
            wait_for_turns(rounds, dict(late.get(me, [])).get(step, 0))
            if dies == (me, step):
                Path(folder, "story").write_bytes(pickle.dumps({"events": events, "steps": step - 1}))
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(module, me, step).backward()
            if weighs:
                rounds.did(samples_of(step))
            before = rounds.round
            optimizer.step()
            if rounds.round != before:
                counts = rounds.counted[0] == step
                events.append(Event(step, before + 1 if counts else rounds.round, counts))
                if counts and rounds.round > before + 1:  # others ended the next one, too, before it took the result
                    events.append(Event(step, rounds.round, False))
        rounds.finish()
    found = [p.detach().clone() for p in module.parameters()]
    return {"events": events, "steps": rounds.step, "found": found, "lines": list(lines), "stats": rounds.stats()}


class Worker:
    """One rank, in the reference."""

    def __init__(self, rank: int, told: dict[str, Any], weighs: bool) -> None:
        self.rank, self.weighs = rank, weighs
        self.events: list[Event] = list(told["events"])
        self.steps: int = told["steps"]
        self.module = reference.model()
        self.optimizer = sgd(list(self.module.parameters()))
        self.step, self.base_turn, self.began = 0, 0, 0
        self.base = self.parameters()
        self.pending: list[Tensor] | None = None
        self.owed = 0.0

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]

    def train(self, until: int) -> tuple[list[Tensor], float]:
        """The weighted sum of its changes that no round has, and their weight."""
        weight = 0.0
        while self.step < until:
            self.step += 1
            self.optimizer.zero_grad()
            loss_of(self.module, self.rank, self.step).backward()
            self.optimizer.step()
            weight += samples_of(self.step) if self.weighs else 1.0
        changes = [weight * (b - p) for b, p in zip(self.base, self.parameters(), strict=True)]
        if self.pending is not None:
            changes = [a + b for a, b in zip(changes, self.pending, strict=True)]
        return changes, weight + self.owed

    def take(self, total: list[Tensor], turn: int, pending: list[Tensor] | None = None, owed: float = 0.0) -> None:
        for p, value in zip(self.module.parameters(), total, strict=True):
            p.data = value.clone()
        self.base, self.base_turn = [one.clone() for one in total], turn
        self.pending, self.owed = pending, owed
        if pending is None:
            self.began = turn


def replayed(told: list[dict[str, Any]], weighs: bool) -> list[Tensor]:
    """The global parameters at the end; a rank without "found" is not there then."""
    workers = [Worker(rank, one, weighs) for rank, one in enumerate(told)]
    totals = [workers[0].parameters()]
    momenta = [torch.zeros_like(p) for p in totals[0]]

    def mean(brought: list[tuple[list[Tensor], float]]) -> None:
        weight = sum(one for _, one in brought)
        new = []
        for i, total in enumerate(totals[-1]):
            if weight == 0:
                new.append(total)
                continue
            change = torch.stack([changes[i] for changes, _ in brought]).sum(0) / weight
            momenta[i] = MOMENTUM["momentum"] * momenta[i] + change
            new.append(total - MOMENTUM["lr"] * (change + MOMENTUM["momentum"] * momenta[i]))
        totals.append(new)

    for turn in range(ROUNDS):
        came = []
        for one in workers:
            while one.events and not one.events[0].counts and one.events[0].round <= turn:
                event = one.events.pop(0)
                changes, weight = one.train(event.step)
                recent = weight > 0 and event.round - one.began <= RECENT
                one.take(totals[event.round], event.round, changes if recent else None, weight if recent else 0.0)
            if one.events and one.events[0].counts and one.events[0].round == turn + 1:
                assert one.base_turn == turn
                came.append((one, one.train(one.events.pop(0).step)))
        mean([brought for _, brought in came])
        for one, _ in came:
            one.take(totals[-1], turn + 1)
    for one in workers:
        for event in one.events:  # it found the last rounds over
            changes, weight = one.train(event.step)
            recent = weight > 0 and event.round - one.began <= RECENT
            one.take(totals[event.round], event.round, changes if recent else None, weight if recent else 0.0)
    mean([one.train(one.steps) for one, its in zip(workers, told, strict=True) if "found" in its])
    return totals[-1]


LATE: list[dict[int, list[tuple[int, int]]]] = [
    {},
    {1: [(9, 2)], 2: [(20, 1), (21, 1)]},
    {0: [(15, 1)], 3: [(2, 3), (30, 1)]},
    {2: [(13, RECENT + 2)]},
]


@pytest.mark.parametrize("weighs", [False, True], ids=["steps", "samples"])
@pytest.mark.parametrize("seed", range(len(LATE)))
def test_the_result_is_the_algorithms(seed: int, weighs: bool) -> None:
    told = run_ranks(trained, LATE[seed], weighs, seed, world_size=4, backend="ring")
    expected = replayed(told, weighs)
    for one in told:
        for mine, first, wanted in zip(one["found"], told[0]["found"], expected, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, wanted, rtol=0, atol=TOLERANCE)
    for rank in LATE[seed]:
        assert any(not event.counts for event in told[rank]["events"]), "it was never late"
        assert any("this rank" in line for line in told[rank]["lines"])
    text = "\n".join(told[0]["lines"])
    assert not LATE[seed] or "is over without rank" in text  # on a busy machine others may be late, too
    if seed == 3:
        assert any("is too old and counts nowhere" in line for line in told[2]["lines"])


@pytest.mark.parametrize("compression", [None, "int4", "sparse2"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_all_ranks_have_the_same_bits(compression: str | None, fragments: int) -> None:
    """Whatever codes the changes, in fragments, too."""
    options: dict[str, Any] = {"compression": compression, "fragments": fragments, "quorum": 0.3}
    told = run_ranks(trained, {1: [(9, 1)], 2: [(20, 2)]}, False, 7, world_size=3, backend="ring", **options)
    for one in told:
        assert all(torch.equal(a, b) for a, b in zip(one["found"], told[0]["found"], strict=True))
        assert all(bool(value.isfinite().all()) for value in one["found"])


def test_local_sgd_and_one_rank_alone() -> None:
    [one] = run_ranks(trained, {}, False, 1, world_size=1, backend="ring")
    expected = replayed([one], False)
    for mine, wanted in zip(one["found"], expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=TOLERANCE)


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 30)), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
    st.floats(0.0, 20.0),
)
def test_when_a_turn_is_over(ranks: list[tuple[bool, float]], share: float, grace_s: float) -> None:
    quorum = Quorum(share, grace_s)
    present = [Presence(Coming.TURN, s) if there else Presence(Coming.NOT) for there, s in ranks]
    count = sum(there for there, _ in ranks)
    enough = count >= share * len(ranks) - 1e-9
    assert quorum.is_there(present) == (count >= 1 and enough)
    over = quorum.is_over(present)
    if over:
        assert enough
        assert count == len(ranks) or sum(there and s >= grace_s for there, s in ranks) >= share * len(ranks) - 1e-9
    later = [dataclasses.replace(one, waited_s=one.waited_s + grace_s) for one in present]
    assert quorum.is_over(later) == quorum.is_there(present)
    finishing = [dataclasses.replace(one, coming=Coming.FINISH) if one.coming else one for one in present]
    assert quorum.is_over(finishing) == (count == len(ranks)), "all are waited for at the end"


def test_a_share_of_ranks_is_not_rounded_up() -> None:
    present = [Presence(Coming.TURN)] * 7 + [Presence(Coming.NOT)] * 18
    assert 0.28 * 25 > 7
    assert Quorum(0.28, 0.0).is_over(present)
    assert not Quorum(1e-12, 0.0).is_there([Presence(Coming.NOT)])


@on_ranks(2)
def test_no_turn_is_missed_that_ends_while_its_result_is_taken() -> None:
    """Every turn of a fragment that this rank has seen has given it the fragment's parameters."""
    module, optimizer, rounds = built(every=3, fragments=3, quorum=0.5, grace=0.0)
    attendance = rounds._attendance
    assert attendance is not None
    meetings, original, passed = attendance.meetings, attendance.meetings.bring, []

    def bring(part: Part) -> bool:
        counts = original(part)
        end = time.monotonic() + 0.3
        while dist.get_rank() == 0 and meetings.turn <= part.turn + 1 and time.monotonic() < end:
            time.sleep(0.001)
        passed.append(counts and part.coming is Coming.TURN and meetings.turn > part.turn + 1)
        return counts

    meetings.bring = bring  # type: ignore[method-assign]
    while rounds.round < 8:
        steps(module, optimizer, rounds.step + 1, rounds.step + 1)
        for number in range(3):
            turns = range(number, attendance.seen, 3)
            assert not turns or attendance._began[number] > turns[-1]
    assert dist.get_rank() == 1 or any(passed)
    rounds.finish()
    require_same_bits([p.detach() for p in module.parameters()])


@on_ranks(1)
def test_what_is_not_finite_leaves_other_changes_alone() -> None:
    module, _, rounds = built(fragments=2)
    attendance, fragments = rounds._attendance, rounds._fragments
    assert attendance is not None
    change = torch.ones_like(fragments[0].total)
    attendance.left_out(0, Change(change, 3.0))
    attendance.left_out(0, Change(torch.zeros_like(change), 0.0, not_finite=0))
    assert attendance.brings(0, torch.zeros_like(change), 1.0).weight == 4.0, "the first one still waits"
    fragments[1].total.add_(1.0)  # its turn is over, without this rank
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(float("nan"))
        assert rounds._change(attendance, 0).not_finite == 0
        assert attendance.change(1)[1] == 0.0, "what others have done is not this rank's change"


@on_ranks(1)
def test_an_interrupt_takes_back_what_was_brought() -> None:
    module, optimizer, rounds = built(every=2)
    assert rounds._attendance is not None
    meetings = rounds._attendance.meetings

    def interrupted() -> None:
        if meetings._part is not None:
            raise KeyboardInterrupt

    meetings.require_well = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        steps(module, optimizer, 1, 2)
    assert meetings._part is None
    del meetings.require_well
    rounds.finish()


@on_ranks(1)
def test_the_end_of_a_forked_process_does_not_wait_for_a_thread_that_is_not_there() -> None:
    _, _, rounds = built()
    assert rounds._attendance is not None
    ends = threading.Thread(target=rounds._attendance.meetings.end, daemon=True)
    with rounds._attendance.meetings.lock:  # as the thread had it at the fork
        ends.start()
        ends.join(5.0)
        assert not ends.is_alive()


# States.


def built(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    module = reference.model()
    optimizer = sgd(list(module.parameters()))
    return module, optimizer, DiLoCo(module, optimizer, **{"every": 4, "quorum": 1.0, **options})


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(module, dist.get_rank(), step).backward()
        optimizer.step()


@pytest.mark.parametrize("compression", [None, "int4"])
@on_ranks(2)
def test_a_state_goes_on_to_the_bit(compression: str | None) -> None:
    module, optimizer, rounds = built(compression=compression)
    steps(module, optimizer, 1, 6)
    with pytest.raises(InvalidStateError, match="has to come after finish"):
        rounds.state_dict()
    rounds.finish()
    saved, inner = rounds.state_dict(), copy.deepcopy(optimizer.state_dict())
    steps(module, optimizer, 7, 17)
    rounds.finish()
    again, other, its = built(compression=compression)
    its.load_state_dict(saved)
    other.load_state_dict(inner)
    steps(again, other, 7, 17)
    its.finish()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    plain = reference.model()
    with pytest.raises(InvalidArgumentError, match="saved with a quorum"):
        DiLoCo(plain, sgd(list(plain.parameters())), every=4, compression=compression).load_state_dict(saved)
    assert its.round == rounds.round == 3


def at_once(folder: str) -> dict[str, Any]:
    """What a rank alone says of a consolidated state of three."""
    module, optimizer, rounds = built(compression="int4", clip=4.0)
    file = Path(folder, "state")
    if dist.get_world_size() == 3:
        steps(module, optimizer, 1, 6 + dist.get_rank())
        while rounds.round < 3:
            steps(module, optimizer, rounds.step + 1, rounds.step + 1)
        rounds.finish()
        saved = rounds.state_dict(consolidated=True)
        if dist.get_rank() == 0:
            torch.save(saved, file)
    else:
        rounds.load_state_dict(torch.load(file))
    found = {"round": rounds.round, "parameters": [p.detach().clone() for p in module.parameters()]}
    while rounds.round < 5:
        steps(module, optimizer, rounds.step + 1, rounds.step + 1)
    rounds.finish()
    require_same_bits([p.detach() for p in module.parameters()])
    return found


def test_a_consolidated_state_goes_on_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    first = run_ranks(at_once, str(tmp_path), world_size=3, backend="ring")[0]
    for count in (1, 2):
        for one in run_ranks(at_once, str(tmp_path), world_size=count, backend="ring"):
            assert one["round"] == first["round"] == 3
            assert all(torch.equal(a, b) for a, b in zip(one["parameters"], first["parameters"], strict=True))


# Mistakes and deaths.


@on_ranks(2)
def test_a_rank_without_steps_finishes_with_the_others() -> None:
    module, optimizer, rounds = built(every=100)
    module.register_buffer("seen", torch.full((1,), float(dist.get_rank())))
    if dist.get_rank() == 0:
        steps(module, optimizer, 1, 3)
    rounds.finish()
    assert module.get_buffer("seen").item() == 0.5
    require_same_bits([p.detach() for p in module.parameters()])
    assert not [one for one in threading.enumerate() if one.name == "ringdp rounds"]
    rounds.detach()
    with pytest.raises(InvalidStateError, match="after detach"):
        rounds.finish()


def two_in_an_elastic_job(folder: str) -> None:
    with joined(folder, elastic=True):
        module, optimizer, rounds = built(every=3)
        other, its_optimizer, others = built(every=3)
        steps(module, optimizer, 1, 4)
        with pytest.raises(InvalidStateError, match="another one with quorum= is under way"):
            steps(other, its_optimizer, 1, 1)
        with pytest.raises(InvalidStateError, match="has to come after finish"):
            rounds.detach()
        rounds.finish()
        rounds.detach()
        steps(other, its_optimizer, 2, 4)
        others.finish()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2.0


def test_in_an_elastic_job_one_meets_at_a_time_and_to_the_end(tmp_path: Path) -> None:
    run_ranks(two_in_an_elastic_job, str(tmp_path), world_size=2, backend=None, timeout_s=40.0)


def one_finishes() -> None:
    module, optimizer, rounds = built(every=3)
    steps(module, optimizer, 1, 4)
    if dist.get_rank() == 0:
        rounds.finish()
    else:
        steps(module, optimizer, 5, 9)


def test_finish_on_some_ranks_is_an_error_on_all() -> None:
    for error in (one.error for one in run_outcomes(one_finishes, world_size=3, backend="ring", timeout_s=40.0)):
        assert isinstance(error, MismatchError), error
        assert "rank 0 calls finish() and rank 1 trains on" in str(error)


def one_dies(sleeps_s: float) -> float:
    """Of a job that is not elastic; the others are told within seconds, wherever they are."""
    module, optimizer, rounds = built(every=5, quorum=0.5, grace=0.1)
    steps(module, optimizer, 1, 7)
    if dist.get_rank() == 1:
        time.sleep(sleeps_s)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()

    def train() -> None:
        while time.monotonic() - began < 20.0:
            steps(module, optimizer, 8, 9)
            time.sleep(0.01)

    with pytest.raises(PeerLostError) as caught:
        train()
    assert caught.value.peer == 1
    rounds.detach()
    return time.monotonic() - began


@pytest.mark.parametrize("sleeps_s", [0.0, 0.7])
def test_a_rank_that_dies_is_named(sleeps_s: float) -> None:
    outcomes = run_outcomes(one_dies, sleeps_s, world_size=3, backend="ring", timeout_s=40.0)
    for rank in (0, 2):
        assert outcomes[rank].text is None, outcomes[rank].text
        assert outcomes[rank].value < sleeps_s + 2.0


def trained_in_an_elastic_job(folder: str, *args: Any, **options: Any) -> dict[str, Any]:
    with joined(folder, elastic=True):
        return trained(*args, **options)


@pytest.mark.parametrize("turns", [0, 2])
def test_in_an_elastic_job_a_rank_that_dies_is_late_for_ever(turns: int, tmp_path: Path) -> None:
    """Killed in its training, or after a while in which the others had left it out."""
    args = (str(tmp_path), {1: [(15, turns)], 2: [(30, 1)]}, True, 11, (1, 15), str(tmp_path))
    outcomes = run_outcomes(
        trained_in_an_elastic_job, *args, world_size=4, backend=None, others_stay=True, timeout_s=60.0
    )
    told = [one.value for one in outcomes]
    assert [one.text is None for one in outcomes] == [True, False, True, True], [one.text for one in outcomes]
    told[1] = pickle.loads((tmp_path / "story").read_bytes())
    expected = replayed(told, True)
    for rank in (0, 2, 3):
        for mine, wanted in zip(told[rank]["found"], expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=TOLERANCE)


@on_ranks(1)
def test_arguments() -> None:
    module = reference.model()
    optimizer = sgd(list(module.parameters()))
    for wrong in ({"quorum": 0}, {"quorum": 1.1}, {"quorum": True}, {"quorum": 0.5, "grace": -1}, {"grace": "long"}):
        with pytest.raises(InvalidArgumentError):
            DiLoCo(module, optimizer, **wrong)
    for pair, words in (
        ({"unequal": True}, "each says in its own way"),
        ({"fragments": ringdp.Fragments(1, delay=2)}, "nobody goes on before a mean"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            DiLoCo(module, optimizer, quorum=0.5, **pair)
    with pytest.raises(InvalidArgumentError, match="average_momenta"):
        LocalSGD(module, optimizer, quorum=0.5, average_momenta=True)
