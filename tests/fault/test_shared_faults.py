"""Ranks of one host that share memory, and die, stop, or meet a limit: who hears of it, and what is left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.core_ranks import World
from tests.fault.hosts import Outcome, RankServer, RankSpec
from tests.fault.launch_jobs import wait_until
from tests.fault.memory_group import MemoryGroup
from tests.fault.rank_jobs import Story, expect_peer_lost
from tests.train import harness

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")

HANG_S = 40.0
MIB = 1 << 20


class Play:
    """One job: ranks that call a function of tests/fault/shared_jobs.py. No rank outlives the `with`."""

    def __init__(self, server: RankServer, folder: Path, world: int, function: str, *arguments: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.world = folder, world
        self._server = server
        self._job = {"JOB_FOLDER": str(folder), "JOB": json.dumps([function, arguments]), "WORLD_SIZE": str(world)}

    def start(self, variables: Mapping[str, str], per_rank: Mapping[int, Mapping[str, str]]) -> None:
        specs = []
        for rank in range(self.world):
            own = {**self._job, "RANK": str(rank), **variables, **per_rank.get(rank, {})}
            specs.append(RankSpec(rank, self.world, variables=own, body="tests.fault.shared_jobs:play"))
        self._server.start(specs, self.folder)
        for rank in range(self.world):
            wait_until((self.folder / f"pid-{rank}").exists, f"rank {rank} to begin")

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def finish(self) -> list[Outcome]:
        """What became of the ranks; one that hangs is killed, and fails the test."""
        running = [self.pid(rank) for rank in range(self.world)]
        end = time.monotonic() + HANG_S
        late: list[int] = []
        while running and not late:
            running = [pid for pid in running if Path(f"/proc/{pid}").exists()]
            late = running if time.monotonic() > end else []
            time.sleep(0.01)
        for pid in late:
            os.kill(pid, signal.SIGKILL)
        outcomes = self._server.finish()
        assert not late, f"processes {late} hung: {outcomes}"
        return outcomes

    def story(self, rank: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / f"story-{rank}").read_text())
        told["story"] = Story(**told["story"])
        told["story"].later = [tuple(it) for it in told["story"].later]
        return told


def play(
    server: RankServer,
    folder: Path,
    world: int,
    function: str,
    *arguments: Any,
    variables: Mapping[str, str] | None = None,
    victim: int | None = None,
    **per_rank: Mapping[int, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Run a job to its end; the stories of all ranks but the victim's, which was killed."""
    it = Play(server, folder, world, function, *arguments)
    it.start(variables or {}, per_rank.get("per_rank", {}))
    for rank, outcome in enumerate(it.finish()):
        assert (outcome.error, outcome.text) == (("died", "code -9") if rank == victim else ("", "")), (rank, outcome)
    return [it.story(rank) for rank in range(world) if rank != victim]


def expect_shared(told: Mapping[str, Any], world: int, wanted: str = "shm") -> None:
    assert list(told["transports"].values()) == [wanted] * (world - 1), told["transports"]


# Killed.


def kill_somewhere(server: RankServer, folder: Path, seed: int, transport: str = "shm") -> None:
    choice = random.Random(seed)
    world = choice.choice((2, 2, 3, 4))
    elements = choice.choice((1000, 100_000, 4_000_000))
    victim, count = choice.randrange(world), choice.randrange(1, max(12 * elements, 2_000_000))
    child = choice.random() < 0.3
    print(f"seed {seed}: rank {victim} of {world} dies after {count} bytes of all-reduces of float32[{elements}]")
    stories = play(
        server, folder, world, "killed_at", victim, elements, count, child, victim=victim,
        variables={"RINGDP_TRANSPORT": transport},
    )  # fmt: skip
    for told in stories:
        expect_shared(told, world, transport)
        expect_peer_lost(told["story"], folder, victim, "all_reduce #")
        assert told["children"] == []
    if child:
        expect_child_has_nothing(folder, victim)


def expect_child_has_nothing(folder: Path, victim: int) -> None:
    """And it still lived when the others had heard of its parent's death."""
    child = json.loads((folder / f"child-{victim}").read_text())
    os.kill(child["pid"], signal.SIGKILL)
    assert child["left"] == []


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_point(server: RankServer, seed: int, tmp_path: Path) -> None:
    kill_somewhere(server, tmp_path, seed)


@pytest.mark.parametrize("seed", (100,))
def test_killed_at_any_point_of_the_same_over_tcp(server: RankServer, seed: int, tmp_path: Path) -> None:
    kill_somewhere(server, tmp_path, seed, "tcp")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_many_points(server: RankServer, tmp_path: Path) -> None:
    for seed in range(1000, 1150):
        kill_somewhere(server, tmp_path / str(seed), seed)


def test_a_child_that_outlives_its_rank_holds_nothing(server: RankServer, tmp_path: Path) -> None:
    """Neither the memory nor what tells the others that its parent is gone."""
    stories = play(server, tmp_path, 3, "killed_at", 1, 1_000_000, 2_000_000, True, victim=1)
    expect_child_has_nothing(tmp_path, 1)
    for told in stories:
        expect_peer_lost(told["story"], tmp_path, 1, "all_reduce #")


# Stopped.


@pytest.mark.parametrize(
    ("world", "victim", "elements"),
    ((2, 0, 1000), pytest.param(3, 1, 500_000, marks=pytest.mark.slow), (3, 2, 4_000_000)),
)
def test_stopped_at_any_point(server: RankServer, world: int, victim: int, elements: int, tmp_path: Path) -> None:
    """A notice names it after the period that was asked for, nobody else is named, and it goes on where it was."""
    it = Play(server, tmp_path, world, "stopped_at", victim, elements, random.randrange(1, 12 * elements))
    it.start({"RINGDP_STALL_NOTICE": "0.5", "RINGDP_TRANSPORT": "shm"}, {})
    others = [rank for rank in range(world) if rank != victim]
    try:
        wait_until((tmp_path / f"stopping-{victim}").exists, "the victim's stop")
        stopped = time.monotonic()
        for rank in others:
            wait_until((tmp_path / f"noticed-{rank}").exists, f"a notice on rank {rank}", 10.0)
        noticed_s = time.monotonic() - stopped
        assert Path(f"/proc/{it.pid(victim)}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    finally:
        os.kill(it.pid(victim), signal.SIGCONT)
        outcomes = it.finish()
    assert [outcome.text for outcome in outcomes] == [""] * world
    assert 0.4 < noticed_s < 3.0
    for rank in range(world):
        told = it.story(rank)
        expect_shared(told, world)
        assert told["wrong"] == 0
        assert told["story"].leftovers == []
        for line in told["notices"] if rank != victim else []:
            about = line.partition("\nfor ")[2]
            assert line.startswith(f"rank {rank} (host "), line
            assert about.startswith(f"rank {victim} (host "), line
            assert "its process does not" in about or "its process answers" in about
            assert not any(f"rank {other} (" in about for other in others), line


# Limits: another way, with one line that says why, or an error in words. Never a death, never a hang.


def limit(
    server: RankServer, folder: Path, who: Sequence[int], what: str, argument: Any, *, world: int = 2, **variables: str
) -> list[dict[str, Any]]:
    return play(server, folder, world, "limited", who, what, argument, variables=variables)


def expect_tcp_with_a_reason(stories: Sequence[Mapping[str, Any]], refused: Sequence[int], *words: str) -> None:
    """Between ranks of which one is refused; all others share memory. A line on each side says why, nobody else."""
    world = len(stories)
    for rank, told in enumerate(stories):
        assert told["story"].error == "", told["story"].text
        assert told["value"] == sum(range(1, world + 1))
        assert told["story"].leftovers == []
        over_tcp = [peer for peer in range(world) if peer != rank and (rank in refused or peer in refused)]
        wanted = {str(peer): "tcp" if peer in over_tcp else "shm" for peer in range(world) if peer != rank}
        assert told["transports"] == wanted
        assert len(told["lines"]) == (1 if over_tcp else 0), told["lines"]
        for line in told["lines"]:
            assert "TCP" in line
            for word in (*words, *(str(peer) for peer in over_tcp)):
                assert word in line, line


@pytest.mark.parametrize(
    ("filter_", "words"),
    (
        (["memfd_create", errno.EPERM], ("memfd_create", "Operation not permitted", "seccomp")),
        (["memfd_create", errno.ENOSYS], ("memfd_create", "not implemented", "seccomp")),
        (["fallocate", errno.ENOSPC], ("No space left",)),
        (["fallocate", errno.ENOMEM], ("Cannot allocate memory",)),
        (["fcntl", errno.EPERM, 1, 1033], ("Operation not permitted",)),  # F_ADD_SEALS
        (["socket", errno.EACCES, 0, 1], ("Permission denied",)),  # AF_UNIX
    ),
    ids=lambda it: f"{it[0]}-{errno.errorcode[it[1]]}" if isinstance(it, list) else "",
)
def test_what_a_filter_refuses_goes_over_tcp(
    server: RankServer, filter_: list[Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    expect_tcp_with_a_reason(limit(server, tmp_path, [0], "system call", filter_), [0], *words)


def test_only_pairs_with_a_rank_that_is_refused_go_over_tcp(server: RankServer, tmp_path: Path) -> None:
    stories = limit(server, tmp_path, [0], "system call", ["memfd_create", errno.EPERM], world=3)
    expect_tcp_with_a_reason(stories, [0], "memfd_create")


def test_a_refusal_is_an_error_where_shared_memory_is_demanded(server: RankServer, tmp_path: Path) -> None:
    filter_ = ["memfd_create", errno.EPERM]
    for told in limit(server, tmp_path, [0], "system call", filter_, world=3, RINGDP_TRANSPORT="shm"):
        assert told["story"].error == "HandshakeError", told
        assert "memfd_create" in told["story"].text
        assert "RINGDP_TRANSPORT" in told["story"].text
        assert told["story"].leftovers == []
        assert told["story"].at < 10.0


def test_a_limit_on_file_sizes(server: RankServer, tmp_path: Path) -> None:
    expect_tcp_with_a_reason(limit(server, tmp_path, [0], "file size", 64 * 1024), [0], "ulimit -f")


def test_a_limit_on_locked_memory_changes_nothing(server: RankServer, tmp_path: Path) -> None:
    for told in limit(server, tmp_path, [0, 1], "locked memory", 0):
        expect_shared(told, 2)
        assert told["value"] == 3.0
        assert told["lines"] == []


def expect_words(told: Mapping[str, Any], *, world: int) -> None:
    """It either went well or failed in words."""
    story = told["story"]
    if not story.error:
        assert told["value"] == sum(range(1, world + 1))
        assert len(told["lines"]) == ("tcp" in told["transports"].values()), told
    else:
        assert len(story.text) > 20 or story.error == "MemoryError", story
        assert story.at < 20.0, story
    assert story.leftovers == [], told


@pytest.mark.parametrize("who", ([0], [1]))
@pytest.mark.parametrize("more", (2, 6, 8, 10, 12, 16))
def test_few_descriptors(server: RankServer, who: list[int], more: int, tmp_path: Path) -> None:
    for told in limit(server, tmp_path, who, "descriptors", more):
        expect_words(told, world=2)


@pytest.mark.parametrize("who", ([0], [1]))
@pytest.mark.parametrize("more", (1, 5, 9, 17, 28, 48))
def test_little_address_space(server: RankServer, who: list[int], more: int, tmp_path: Path) -> None:
    for told in limit(server, tmp_path, who, "address space", more * MIB):
        expect_words(told, world=2)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[str]:
    group = MemoryGroup(limit_bytes)
    if (reason := group.why_not) is not None:
        pytest.skip(reason)
    try:
        yield str(group.path)
    finally:
        group.remove()


def test_little_memory_in_the_control_group(server: RankServer, tmp_path: Path) -> None:
    with memory_group(40 * MIB) as path:
        stories = limit(server, tmp_path, [0, 1, 2], "memory group", path, world=3)
    expect_tcp_with_a_reason(stories, [0, 1, 2], "control group")


def test_enough_memory_in_the_control_group(server: RankServer, tmp_path: Path) -> None:
    with memory_group(400 * MIB) as path:
        for told in limit(server, tmp_path, [0, 1, 2], "memory group", path, world=3):
            expect_shared(told, 3)
            assert told["lines"] == []


# Leaving.


def test_ranks_that_leave_together_do_not_wait_for_each_other() -> None:
    """Who has gone reads no more goodbyes."""
    took = []
    for _ in range(10):
        ranks = World(3, transport="shm")
        start = time.monotonic()
        ranks.close()
        took.append(time.monotonic() - start)
    assert sorted(took)[len(took) // 2] < 0.5, took


# Over both transports at once.

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def bits(server: RankServer, folder: Path, transport: str, seed: int, count: int) -> list[bytes]:
    """What reductions at random come to on two hosts of two ranks, in digests of 12 bytes, by rank."""
    hosts = {rank: {"RINGDP_HOST_ID": name} for rank, name in HOSTS.items()}
    stories = play(
        server, folder, 4, "reduce_at_random", seed, count, variables={"RINGDP_TRANSPORT": transport}, per_rank=hosts
    )
    for rank, told in enumerate(stories):
        inside = "shm" if transport == "auto" else "tcp"
        wanted = {str(r): inside if HOSTS[r] == HOSTS[rank] else "tcp" for r in HOSTS if r != rank}
        assert told["transports"] == wanted
        assert told["story"].leftovers == []
    return [(folder / f"bits-{rank}").read_bytes() for rank in HOSTS]


def expect_same_bits(server: RankServer, folder: Path, seed: int, count: int) -> None:
    mixed = bits(server, folder / "mixed", "auto", seed, count)
    plain = bits(server, folder / "tcp", "tcp", seed, count)
    names = (folder / "mixed" / "bits-0.names").read_text().split("\n")
    assert len(names) == count
    for number, name in enumerate(names):
        place = slice(12 * number, 12 * number + 12)
        assert len({each[place] for each in mixed}) == 1, f"seed {seed}, {name}: ranks differ"
        assert mixed[0][place] == plain[0][place], f"seed {seed}, {name}: not the same as over TCP"


def test_mixed_transports_give_the_bits_of_tcp(server: RankServer, tmp_path: Path) -> None:
    expect_same_bits(server, tmp_path, seed=1, count=500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mixed_transports_give_the_bits_of_tcp_many_times(server: RankServer, tmp_path: Path) -> None:
    for seed in range(2, 12):
        (tmp_path / str(seed)).mkdir()
        expect_same_bits(server, tmp_path / str(seed), seed, 1000)
