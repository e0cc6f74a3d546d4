"""Ranks come to a running job and leave it: the bits of scripted jobs, each sample once, and no newcomer that fails
holds the others up."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringdp import Fragments
from ringdp.errors import HandshakeError
from ringdp.job import elastic
from tests.fault import elastic_join_jobs as jobs
from tests.fault.elastic_join_jobs import Jobs
from tests.train.harness import ring_is_built, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Jobs]]:
    all_made: list[Jobs] = []

    def make(**options: Any) -> Jobs:
        folder = tmp_path / str(len(all_made))
        folder.mkdir()
        all_made.append(Jobs(folder, **{"step_s": 0.02, **options}))
        return all_made[-1]

    yield make
    for one in all_made:
        one.close()


def run_scripted(job: Jobs, **options: Any) -> None:
    """From each change on, jobs without elasticity of the same ranks make the same steps: to the bit."""
    batches = job.batches()
    [end] = {it["print"] for it in job.events("end")}
    prints = {(it["step"], it["now"]): it["print"] for it in job.events("change")}
    before: str | None = None
    segments = [(places, list(them)) for places, them in groupby(batches.items(), key=lambda it: tuple(it[1]))]
    for number, (places, them) in enumerate(segments):
        steps = [[samples[place] for place in places] for _, samples in them]
        [found] = set(run_ranks(jobs.scripted, before, steps, options, world_size=len(places), backend="ring"))
        last = them[-1][0]
        following = None if number + 1 == len(segments) else len(segments[number + 1][0])
        assert found == (end if following is None else prints[last, following]), f"up to step {last}"
        before = str(job.folder / f"state_{last}_{following}")


def one_comes_and_one_leaves(job: Jobs) -> None:
    """Two ranks, three, then two without the first one, to the end."""
    job.start(2)
    first = job.pids()[0]
    job.until_step(3)
    job.join()
    job.until_ranks(3)
    job.leave(first)
    job.until_ranks(2)
    assert len(job.wait()) == 2
    job.check_replicas()


def test_ranks_come_and_leave_and_each_step_is_that_of_a_scripted_job(made: Callable[..., Jobs]) -> None:
    job = made()
    job.start(2)
    first = job.pids()[0]
    job.until_step(3)
    job.join()
    job.until_ranks(3)
    job.leave(first)  # rank 0
    job.until_ranks(2)
    job.join()
    second = job.join()
    job.until_ranks(4)
    job.leave(second)
    job.until_ranks(3)
    ends = job.wait()
    assert len(ends) == 3
    job.check_replicas()
    job.check_each_sample_once()
    run_scripted(job)
    joined = [it for it in job.events("change") if it["joined"]]
    assert all(it["seconds"] < 2.0 for it in joined), joined
    assert len(joined) == sum(it["now"] for it in {it["step"]: it for it in joined}.values()), "newcomers are told, too"


def test_a_job_of_one_rank_gets_others_and_becomes_one_again(made: Callable[..., Jobs]) -> None:
    job = made()
    job.start(1)
    [first] = job.pids()
    job.until_step(2)
    job.join()
    job.until_ranks(2)
    job.leave(first)
    job.until_ranks(1)
    assert len(job.wait()) == 1
    job.check_replicas()
    job.check_each_sample_once()
    run_scripted(job)


@pytest.mark.parametrize(
    "rounds",
    [{"every": 3}, {"every": 4, "fragments": Fragments(2, delay=1), "compression": "int4"}],
    ids=str,
)
def test_ranks_come_and_leave_where_rounds_end(made: Callable[..., Jobs], rounds: dict[str, Any]) -> None:
    options: dict[str, Any] = {"rounds": rounds}
    job = made(**options)
    one_comes_and_one_leaves(job)
    job.check_each_sample_once()
    assert all(it["step"] % rounds["every"] == 0 for it in job.events("change"))
    run_scripted(job, **options)


QUORUM: dict[str, Any] = {"every": 4, "quorum": 0.5, "grace": 0.3}


@pytest.mark.parametrize(
    "rounds", [QUORUM, QUORUM | {"fragments": 2, "compression": "int4"}, QUORUM | {"compression": "sparse2"}], ids=str
)
def test_ranks_come_die_and_leave_where_turns_end(made: Callable[..., Jobs], rounds: dict[str, Any]) -> None:
    """With a quorum: ranks are at steps of their own, and have the same global parameters after each turn."""
    job = made(rounds=rounds)
    job.start(3)
    first, victim = job.pids()[:2]
    job.until_step(2)
    newcomer = job.join()
    job.until_ranks(4)
    job.kill(victim)
    job.until_ranks(3)
    job.leave(first)
    job.until_ranks(2)
    last = job.join()
    job.until(lambda: job.events("turn", last))  # a rank that is late may begin steps with the one that has left
    ends = job.wait(dead={victim: -9})
    assert {it["ranks"] for it in ends} == {3}
    assert newcomer in {it["pid"] for it in ends}
    job.check_replicas()
    took_part = {it["turn"] for it in job.events("turn", newcomer)}
    assert len(took_part) > 3
    changes = job.events("change", newcomer)
    assert [bool(it["joined"]) for it in changes] == [True, False, False, True]
    assert [it["lost"] for it in changes] == [[], [1], [], []]
    assert [it["left"] for it in changes] == [[], [], [0], []]


def test_a_rank_that_closes_the_job_takes_part_in_the_turns_that_others_end(made: Callable[..., Jobs]) -> None:
    job = made(rounds=QUORUM, closes_first=True)
    job.start(3)
    job.until_step(2)
    assert len(job.wait()) == 3
    job.check_replicas()


def test_a_newcomer_comes_while_a_rank_is_late(made: Callable[..., Jobs]) -> None:
    """The lowest rank stands still in its training: another one gives the newcomer its optimizer's state."""
    job = made(rounds=QUORUM, still={"rank": 0, "step": 3, "until": "go_on"})
    job.start(3)
    first = job.pids()[0]
    job.until(lambda: job.events("still"))
    newcomer = job.join()
    job.until_ranks(4)
    job.until(lambda: len(job.events("turn", newcomer)) > 3)
    assert not [it for it in job.events("change", first) if it["joined"]]
    (job.folder / "go_on").touch()
    job.until(lambda: [it for it in job.events("change", first) if it["joined"]])
    assert len(job.wait()) == 4
    job.check_replicas()


def test_what_codes_owe_stays_when_ranks_of_rounds_come_and_leave(made: Callable[..., Jobs]) -> None:
    """Also what the rank that leaves owes, to the mean of those that stay."""
    job = made(rounds={"every": 3, "compression": "int4"}, owed=True)
    job.start(2)
    first = job.pids()[0]
    job.until_step(7)
    job.join()
    job.until_ranks(3)
    job.until_step(max(it["step"] for it in job.events("begins")) + 6)
    job.leave(first)
    job.until_ranks(2)
    job.wait()
    before = {it["step"]: it["owed"] for it in job.events("owed")}
    changes = {(it["step"], it["now"]): it["owed"] for it in job.events("change")}
    assert {now for _, now in changes} == {2, 3}
    for (step, _), owed in changes.items():
        assert abs(owed) > 1e-6
        assert owed == pytest.approx(before[step], rel=1e-4)


def test_samples_of_a_rank_that_dies_within_a_round_come_again(made: Callable[..., Jobs]) -> None:
    """What it had of steps whose round does not have them."""
    job = made(rounds={"every": 2}, step_s=0.25)
    job.start(3)
    victim = job.pids()[1]
    job.until_step(3)
    job.kill(victim)
    job.until_ranks(2)
    job.join()
    job.until_ranks(3)
    job.wait(dead={victim: -9})
    job.check_replicas()
    [place] = {it["lost"][0] for it in job.events("change") if it["lost"]}
    batches = job.batches()
    last = max(step for step, by_place in batches.items() if place in by_place)
    assert last in (3, 4)
    epochs = max(it["epoch"] for it in job.events("epoch")) + 1
    counts = Counter(
        sample
        for step, by_place in batches.items()
        for its_place, samples in by_place.items()
        if its_place != place or step <= 2
        for sample in samples
    )
    assert counts == dict.fromkeys(range(jobs.SAMPLES), epochs)
    assert any("come again at the end of the epoch" in it["text"] for it in job.events("log"))


@pytest.mark.parametrize(
    "options",
    [
        {"ringdp": {"compression": "int8"}},
        {"ringdp": {"compression": "topk"}},
        {"ringdp": {"compression": "powersgd"}},
        {"accumulate": 2},
        pytest.param({"loader": {"num_workers": 2}}, marks=pytest.mark.slow),  # processes for each pass
        {"loader": {"balance": "speed"}},
        {"ringdp": {"guard": 5}},
        {"validate": True},
    ],
    ids=str,
)
def test_a_newcomer_fits_into_what_the_job_uses(made: Callable[..., Jobs], options: dict[str, Any]) -> None:
    job = made(**options)
    one_comes_and_one_leaves(job)
    if "validate" in options:
        assert {it["validated"] * it["ranks"] for it in job.events("epoch")} == {jobs.SAMPLES}
    elif "accumulate" not in options:
        job.check_each_sample_once()


def test_nobody_comes_while_an_operation_of_the_script_is_under_way(made: Callable[..., Jobs]) -> None:
    """It belongs to the present members: with others its answer would never come."""
    job = made(message=(2, 60))
    job.start(2)
    job.join()
    job.until_ranks(3)
    job.wait()
    [step] = {it["step"] for it in job.events("change") if it["joined"]}
    assert [it["step"] for it in job.events("message")] == [60]
    assert 60 <= step < 70
    job.check_replicas()


def test_a_killed_rank_is_replaced(made: Callable[..., Jobs]) -> None:
    job = made()
    job.start(3)
    victim = job.pids()[0]
    job.until_step(4)
    job.kill(victim)
    job.until_ranks(2)
    job.join()
    job.until_ranks(3)
    ends = job.wait(dead={victim: -9})
    assert [it["ranks"] for it in ends] == [3, 3, 3]
    job.check_replicas()


# Newcomers that are not let in, or fail.


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"net": (25,)}, {}, "its model has 0.weight (25, 8) of torch.float32, the job's has 0.weight (24, 8)"),
        ({"ringdp": {"compression": "int8"}}, {}, "it has compression "),
        ({"loader": {"seed": 1}}, {}, "its Job has loader with seed: 1, the job's has loader with seed: 0"),
        ({}, {"RINGDP_SECRET_FILE": "other"}, "its secret is not the job's"),
    ],
    ids=["model", "compression", "seed", "secret"],
)
def test_another_program_is_refused_with_both_values(
    made: Callable[..., Jobs], tmp_path: Path, options: dict[str, Any], environ: dict[str, str], words: str
) -> None:
    if environ:
        other = tmp_path / "other"
        other.write_text("cd" * 32)
        other.chmod(0o600)
        environ = {"RINGDP_SECRET_FILE": str(other)}
    job = made()
    job.start(2)
    job.until_step(2)
    pid = job.join(environ=environ, **options)
    assert job.code(pid) == 1
    job.wait(dead={pid: 1})
    [error] = job.events("error", pid)
    assert error["type"] == "MismatchError"
    assert words in error["text"]
    told = [it["text"] for it in job.events("log") if "cannot join" in it["text"]]
    assert len(told) == 1
    assert words in told[0]
    job.check_each_sample_once()


def test_a_newcomer_that_waits_can_be_stopped(made: Callable[..., Jobs]) -> None:
    job = made(job={"max_ranks": 2})
    job.start(2)
    job.until_step(2)
    pid = job.join()
    job.until(lambda: job.store.check(["ringdp/elastic/0/ticket/1"]))  # the number of tickets is there before
    time.sleep(0.2)  # it waits
    began = time.monotonic()
    job.kill(pid, signal.SIGTERM)
    assert job.code(pid) == 0
    assert time.monotonic() - began < 3.0
    job.until_step(max(it["step"] for it in job.events("begins")) + 10)
    assert [it["ranks"] for it in job.wait()] == [2, 2]
    assert not [it["text"] for it in job.events("log") if "newcomer" in it["text"] or "join" in it["text"]]
    assert not job.events("change")


def test_nonsense_in_the_store_and_a_full_disk_hold_nobody_up(made: Callable[..., Jobs]) -> None:
    job = made(audit="/dev/full")
    job.start(2)
    job.until_step(2)
    for key, value in {
        "ticket/1": "x" * 10**6,
        "ticket/2": "[1]",
        "world/7": '{"number": "x"}',
        "worlds/latest": "7",
    }.items():
        job.store.set(f"ringdp/elastic/0/{key}", value)
    job.store.add("ringdp/elastic/0/tickets", 2)
    job.until(lambda: sum("cannot be read" in it["text"] for it in job.events("log")) == 2)
    job.store.add("ringdp/elastic/0/tickets", 10**6)  # which nobody has handed in
    later = job.join()
    job.until(lambda: job.events("begins", later))
    assert [it["ranks"] for it in job.wait()] == [3, 3, 3]
    texts = [it["text"] for it in job.events("log")]
    assert texts.count("a newcomer cannot join: its ticket cannot be read") == 2
    assert len([it for it in texts if "writes no more lines to /dev/full: No space left" in it]) == 3


def die_after_handing_in() -> None:
    from ringdp.elastic.board import Board

    hand_in = Board.hand_in

    def then_die(self: Board, ticket: Any) -> int:
        hand_in(self, ticket)
        os._exit(7)

    Board.hand_in = then_die  # type: ignore[method-assign]


def die_before_meeting() -> None:
    from ringdp.elastic.board import Met

    Met.__init__ = lambda *_: os._exit(7)  # type: ignore[method-assign]


def die_after_meeting() -> None:
    from ringdp.elastic.board import Met

    Met.prepare = lambda *_: os._exit(7)  # type: ignore[method-assign]


def die_when_entering() -> None:
    from ringdp import _C

    _C.enter_world = lambda *_: os._exit(7)


def die_in_the_transfer() -> None:
    from ringdp.elastic import transfer

    transfer._place_for = lambda *_: os._exit(7)


def die_before_the_first_step() -> None:
    from ringdp.elastic.members import Members

    Members._begin_again = lambda *_, **__: os._exit(7)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "before",
    [
        die_after_handing_in,
        die_before_meeting,
        die_after_meeting,
        die_when_entering,
        die_in_the_transfer,
        die_before_the_first_step,
    ],
)
@pytest.mark.parametrize("options", [{}, {"rounds": QUORUM}], ids=["steps", "turns"])
def test_a_newcomer_that_dies_holds_nobody_up(
    made: Callable[..., Jobs], before: Callable[[], None], options: dict[str, Any]
) -> None:
    job = made(**options)
    job.start(2)
    job.until_step(2)
    pid = job.join(before)
    assert job.code(pid) == 7
    later = job.join()
    job.until(lambda: job.events("begins", later))
    ends = job.wait(dead={pid: 7})
    assert [it["ranks"] for it in ends] == [3, 3, 3]
    job.check_replicas()


def stop_before_meeting() -> None:
    from ringdp.elastic.board import Met

    meet = Met.__init__

    def stop_first(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        meet(*given)

    Met.__init__ = stop_first  # type: ignore[method-assign, assignment]


def stop_after_meeting() -> None:
    from ringdp.elastic.board import Met

    prepare = Met.prepare

    def then_prepare(self: Met, group: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        prepare(self, group)

    Met.prepare = then_prepare  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("before", [stop_before_meeting, stop_after_meeting])
def test_a_newcomer_that_is_stopped_holds_nobody_up_and_joins_later(
    made: Callable[..., Jobs], before: Callable[[], None]
) -> None:
    job = made()
    job.start(2)
    job.until_step(2)
    pid = job.join(before)
    job.until(lambda: "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    step = max(it["step"] for it in job.events("begins"))
    time.sleep(3.0)  # longer than a newcomer may show no life
    job.until_step(step + 40)
    job.kill(pid, signal.SIGCONT)
    job.until_ranks(3)
    assert max(it["seconds"] for it in job.events("change")) < 2.0
    job.wait()
    job.check_replicas()


def stop_in_the_transfer() -> None:
    from ringdp.elastic import transfer

    place = transfer._place_for

    def stop_first(*given: Any) -> Any:
        transfer._place_for = place
        os.kill(os.getpid(), signal.SIGSTOP)
        return place(*given)

    transfer._place_for = stop_first  # type: ignore[assignment]


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
def test_one_that_is_stopped_in_the_transfer_with_all_of_its_host_is_left_out(
    made: Callable[..., Jobs], others: int
) -> None:
    """No launcher kills it. The others go on without it, and it ends when it runs again."""
    job = made()
    job.start(2)
    first = job.pids()[0]
    job.until_step(2)
    pid = job.join(stop_in_the_transfer)
    for _ in range(others):
        job.join()
    job.until(lambda: any(it["lost"] for it in job.events("change")))
    job.until_ranks(2 + others)
    job.kill(pid, signal.SIGCONT)
    assert job.code(pid) == 1
    job.wait(dead={pid: 1})
    [error] = job.events("error", pid)
    assert error["type"] == "ExpelledError", error
    [seconds] = {it["seconds"] for it in job.events("change", first) if it["lost"]}
    assert 4.5 < seconds < 8.0
    job.check_replicas()


@pytest.mark.parametrize("options", [{}, {"rounds": QUORUM}], ids=["steps", "turns"])
def test_a_member_that_dies_while_a_newcomer_enters(made: Callable[..., Jobs], options: dict[str, Any]) -> None:
    """The leader, as soon as it has told the newcomer."""
    job = made(**options)
    job.start(3)
    leader = job.pids()[0]
    job.until_step(2)
    job.join()
    job.until(lambda: job.store.check(["ringdp/elastic/0/world/1/entry"]) or job.store.check(["ringdp/elastic/0/over"]))
    job.kill(leader)
    ends = job.wait(dead={leader: -9})
    assert [it["ranks"] for it in ends] == [3, 3, 3]
    job.check_replicas()


@pytest.mark.parametrize("by", ["arguments", "environment", "arguments, turns"])
def test_the_others_wait_below_the_least_number(made: Callable[..., Jobs], by: str) -> None:
    options = {"rounds": QUORUM} if "turns" in by else {}
    job = made(**options, **({"job": {"min_ranks": 2, "max_ranks": 2}} if by != "environment" else {}))
    if by == "environment":
        job.environ |= {"RINGDP_MIN_RANKS": "2", "RINGDP_MAX_RANKS": "2"}
    job.start(2)
    first = job.pids()[0]
    job.until_step(3)
    job.leave(first)
    job.until(lambda: any("left (a file says so); 1 of 2" in it["text"] for it in job.events("log")))
    steps = len(job.events("begins"))
    job.join()
    too_many = job.join()
    ends = job.wait()
    assert len(ends) == 2
    assert all(it["ranks"] == 2 for it in job.events("begins")[steps:])
    assert any("ended before this process could join" in it["text"] for it in job.events("log", too_many)) or any(
        "ended before this process could join" in it["text"] for it in job.events("log")
    )
    if options:
        job.check_replicas()
    else:
        job.check_each_sample_once()
        run_scripted(job)


def test_a_newcomer_learns_at_once_that_the_job_has_ended() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    origin = elastic.Origin(store, 0, 1, outside=True)
    origin.keys()
    del server
    began = time.monotonic()
    with pytest.raises(HandshakeError, match="the job ended before this process could join it"):
        origin.keys()
    assert time.monotonic() - began < 10.0


# For hours.


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("least", "most"), [(3, 4), (4, 8)])
def test_two_hundred_come_and_leave_and_nothing_is_left_of_them(
    made: Callable[..., Jobs], least: int, most: int
) -> None:
    job = made(step_s=0.005, net=(24, "LayerNorm"))  # a rank may have a single sample
    job.start(least)
    chance = random.Random(3)
    members = job.pids()
    first = members[0]
    while len(changes := job.events("change", first)) < 200:
        if len(members) == least or (len(members) < most and chance.random() < 0.5):
            newcomer = job.join()
            job.until(functools.partial(job.events, "begins", newcomer))
            members.append(newcomer)
        else:
            leaver = chance.choice(members[1:])
            job.leave(leaver)
            assert job.code(leaver) == 0
            members.remove(leaver)
    job.wait()
    job.check_replicas()
    job.check_each_sample_once()
    assert all(len(it["joined"]) + len(it["left"]) == 1 for it in changes)
    for what in ("descriptors", "threads", "mappings"):
        for ranks in range(least, most + 1):
            found = [it[what] for it in changes if it["now"] == ranks]
            assert max(found[-10:]) <= max(found[:10]) + 1, (what, ranks, found)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_kills_comings_and_leavings_at_random(made: Callable[..., Jobs], seed: int) -> None:
    """Whatever dies, and wherever: the others have the same bits, and the job goes on."""
    kinds: list[dict[str, Any]] = [{}, {"ringdp": {"compression": "topk"}}, {"accumulate": 2}]
    job = made(step_s=0.01, net=(24, "LayerNorm"), **kinds[seed % 3])  # a rank may have a single sample
    job.start(3)
    chance = random.Random(seed)
    job.until_step(2)
    dead: dict[int, int] = {}
    leaving: set[int] = set()
    for _ in range(25):
        members = [pid for pid in job.pids() if pid not in leaving and job.events("begins", pid)]
        what = chance.choice(["join", "join", "leave", "kill", "kill a newcomer"])
        if what == "join" and len(job.pids()) < 6:
            job.join()
        elif what == "leave" and len(members) > 2:
            leaving.add(leaver := chance.choice(members))
            job.leave(leaver)
        elif what == "kill" and len(members) > 2:
            victim = chance.choice(members)
            job.kill(victim)
            dead[victim] = -9
        elif what == "kill a newcomer" and len(job.pids()) > len(members) + len(leaving):
            victim = chance.choice([pid for pid in job.pids() if pid not in members and pid not in leaving])
            job.kill(victim)
            dead[victim] = -9
        time.sleep(chance.choice([0.05, 0.3, 1.0]))
    step = max(it["step"] for it in job.events("begins"))
    job.until_step(step + 12)
    for process in job.processes:
        if dead.get(int(process.pid)) is not None and process.exitcode == 0:
            dead[int(process.pid)] = 0  # it had left before
    job.wait(dead=dead)
    job.check_replicas()
