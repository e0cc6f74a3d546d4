"""Elastic jobs on several hosts: one that is gone and comes back, networks that fall apart.

Hosts are network namespaces. A broken connection is lost after RINGDP_HEAL, here one second, a silent host after four.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault import hosts
from tests.fault.elastic_host_jobs import ADDRESS, HEAL_S, KEEPER, NETWORK, PORT, specs, steps
from tests.fault.launch_jobs import wait_until
from tests.train.harness import ring_is_built

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built"),
    pytest.mark.skipif(hosts.why_not() is not None, reason=hosts.why_not() or ""),
    pytest.mark.timeout(120),
]
WITHOUT_THE_STORE_S = 16
"""RINGDP_HEAL, then 8 s without an answer of the store's host, and a loaded machine."""


@pytest.fixture
def lab() -> Iterator[hosts.Lab]:
    with hosts.Lab(4) as it:
        it.switch(NETWORK)
        yield it


@pytest.fixture
def two_hosts() -> Iterator[hosts.Lab]:
    """For ranks 0 and 1 on the first one, 2 and 3 on the other."""
    with hosts.Lab(2) as it:
        it.switch(NETWORK)
        yield it


class Run:
    """A job of four ranks on the lab's hosts that trains."""

    def __init__(self, lab: hosts.Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.server = hosts.rank_server()
        self.server.start(specs(lab, folder, 4 // len(lab.spaces)), folder)
        self.until(lambda: all(len(steps(folder, rank)) > 2 for rank in range(4)), "the first steps")

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 40.0) -> None:
        try:
            wait_until(condition, what, limit_s)
        except AssertionError:
            self.end()
            raise

    def middle(self, words: str) -> None:
        hosts.run("ip", "-n", self.lab.middle, *words.split())

    def cut(self, *cut_off: int) -> None:
        """These hosts from the others."""
        for host in cut_off:
            self.middle(f"link set up{host} down")
        for one, other in itertools.pairwise(cut_off):
            self.middle(f"link add a{one} type veth peer name b{one}")
            self.middle(f"link set a{one} master br{one} up")
            self.middle(f"link set b{one} master br{other} up")

    def mend(self, host: int) -> None:
        self.middle(f"link set up{host} up")

    def cut_between(self, one: int, other: int) -> None:
        """These two hosts from each other, and from no third one: each drops what comes from the other."""
        for host, source in ((one, other), (other, one)):
            self.lab.ip(host, "rule add pref 100 lookup local")
            self.lab.ip(host, "rule del pref 0")
            self.lab.ip(host, f"rule add pref 10 iif eth0 from {NETWORK.format(source + 1).split('/')[0]} blackhole")

    def begin_repair(self, dead: int, stopped: int) -> None:
        """It stays under way until `stopped` goes on: that rank lives, and has not said where it stands."""
        self.kill(stopped, signal.SIGSTOP)
        self.kill(dead)
        said = [self.folder / f"1-state-{rank}" for rank in range(4) if rank not in (dead, stopped)]
        self.until(lambda: all(path.exists() for path in said), "what the others say of where they stand")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        name = "store-pid" if rank == KEEPER else f"pid-{rank}"
        os.kill(int((self.folder / name).read_text()), number)

    def go_on(self, size: int, ranks: tuple[int, ...]) -> None:
        """They make steps, so many of them."""
        self.until(
            lambda: all([it[0] for it in steps(self.folder, rank).values()].count(size) > 3 for rank in ranks),
            f"steps of {size} by {ranks}",
        )

    def has_ended(self, rank: int) -> bool:
        return (self.folder / f"outcome-{rank}").exists()

    def end(self) -> dict[int, hosts.Outcome]:
        (self.folder / "stop").touch()
        living = [rank for rank in range(4) if not self.has_ended(rank)]
        end = time.monotonic() + 20
        while not all(self.has_ended(rank) or not self._lives(rank) for rank in living) and time.monotonic() < end:
            time.sleep(0.02)
        (self.folder / "over").touch()
        outcomes = self.server.finish()
        self.check_one_history()
        return dict(enumerate(outcomes[1:]))

    def _lives(self, rank: int) -> bool:
        try:
            state = Path(f"/proc/{(self.folder / f'pid-{rank}').read_text()}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] != "Z"

    def check_one_history(self) -> None:
        """No step has counted for two ranks with different results, whatever became of the ranks."""
        seen: dict[int, str] = {}
        for rank in range(4):
            for number, (_, text) in steps(self.folder, rank).items():
                assert seen.setdefault(number, text) == text, f"step {number} of rank {rank}"


def says_that_it_is_out(outcome: hosts.Outcome, rank: int, others: str) -> None:
    """A rank without which the others go on, and which has heard of it."""
    assert outcome.error == "ExpelledError", f"{outcome.error}: {outcome.text}"
    assert f"{others} of the job could not reach rank {rank} and have gone on without it, as view " in outcome.text
    assert "this process has to end, because its state is older than theirs now" in outcome.text
    assert "look at the network of its host" in outcome.text


def says_that_it_cannot_know(outcome: hosts.Outcome, rank: int, others: str) -> None:
    """A rank that reaches neither these others (a pattern; ranks that have ended are lost, too) nor the store."""
    assert outcome.error == "HandshakeError", f"{outcome.error}: {outcome.text}"
    store = rf"the launcher's store at {re.escape(ADDRESS)}:{PORT}, which the launcher on that host keeps, by which"
    assert re.search(rf"rank {rank} has lost {others} and cannot reach {store}", outcome.text), outcome.text
    assert "cannot know whether the others have gone on without it" in outcome.text
    assert (
        "if the launcher still runs, the ranks that reach its store go on, and this one only has to end" in outcome.text
    )
    assert "from its last checkpoint" in outcome.text


def test_a_host_is_gone_and_comes_back(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.cut(3)
    run.go_on(3, (0, 1, 2))
    run.mend(3)  # by now the others have gone on without it
    run.until(lambda: run.has_ended(3), "the end of rank 3", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert [outcomes[rank].error for rank in (0, 1, 2)] == ["", "", ""]
    if outcomes[3].error == "ExpelledError":  # its access to the store was still under way
        says_that_it_is_out(outcomes[3], 3, "ranks 0-2")
    else:
        says_that_it_cannot_know(outcomes[3], 3, "ranks 0-2")
    assert max(size for size, _ in steps(tmp_path, 3).values()) == min(size for size, _ in steps(tmp_path, 3).values())


def check_two_and_two(run: Run) -> None:
    """Ranks 2 and 3 do not reach the store."""
    run.go_on(2, (0, 1))
    run.until(lambda: run.has_ended(2) and run.has_ended(3), "the end of ranks 2 and 3", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert [outcomes[rank].error for rank in (0, 1)] == ["", ""]
    for rank in (2, 3):
        says_that_it_cannot_know(outcomes[rank], rank, "ranks 0.*")
        assert {size for size, _ in steps(run.folder, rank).values()} == {4}


def test_two_and_two(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.cut(2, 3)
    check_two_and_two(run)


def test_three_without_the_store_end_and_one_with_it_goes_on(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.cut(1, 2, 3)
    run.go_on(1, (0,))
    run.until(lambda: all(run.has_ended(rank) for rank in (1, 2, 3)), "the end of the others", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert outcomes[0].error == ""
    for rank in (1, 2, 3):
        says_that_it_cannot_know(outcomes[rank], rank, "ranks? 0.*")
        assert {size for size, _ in steps(tmp_path, rank).values()} == {4}


def test_killed_and_stopped_on_another_host(lab: hosts.Lab, tmp_path: Path) -> None:
    """A process that is dead is proven so by its host; one that is stopped is waited for."""
    run = Run(lab, tmp_path)
    run.kill(2, signal.SIGSTOP)
    time.sleep(2.5)  # longer than RINGDP_HEAL
    assert not any(run.has_ended(rank) for rank in range(4))
    run.kill(2, signal.SIGCONT)
    run.kill(0)
    run.go_on(3, (1, 2, 3))
    outcomes = run.end()
    assert outcomes[0].error == "died"
    assert [outcomes[rank].error for rank in (1, 2, 3)] == ["", "", ""]


def test_a_link_is_gone_for_a_moment_during_a_repair(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.begin_repair(dead=3, stopped=1)
    run.cut(2)
    time.sleep(0.4 * HEAL_S)
    run.mend(2)
    run.kill(1, signal.SIGCONT)
    run.go_on(3, (0, 1, 2))
    outcomes = run.end()
    assert [outcomes[rank].error for rank in range(4)] == ["", "", "", "died"]


def check_cut_off_during_a_repair(run: Run, host: int) -> None:
    """Of this host rank 2 lives."""
    run.begin_repair(dead=3, stopped=1)
    run.cut(host)
    run.kill(1, signal.SIGCONT)
    run.go_on(2, (0, 1))
    run.until(lambda: run.has_ended(2), "the end of rank 2", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert [outcomes[rank].error for rank in (0, 1, 3)] == ["", "", "died"]
    says_that_it_cannot_know(outcomes[2], 2, "ranks 0, 1 and 3")
    assert {size for size, _ in steps(run.folder, 2).values()} == {4}


def test_a_host_is_cut_off_during_a_repair(lab: hosts.Lab, tmp_path: Path) -> None:
    check_cut_off_during_a_repair(Run(lab, tmp_path), host=2)


def test_two_that_do_not_reach_each_other_during_a_repair(lab: hosts.Lab, tmp_path: Path) -> None:
    """Both reach the store, so the one that is left out hears of it."""
    run = Run(lab, tmp_path)
    run.begin_repair(dead=3, stopped=1)
    run.cut_between(1, 2)
    run.kill(1, signal.SIGCONT)
    run.go_on(2, (0, 1))
    run.until(lambda: run.has_ended(2), "the end of rank 2", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert [outcomes[rank].error for rank in (0, 1, 3)] == ["", "", "died"]
    says_that_it_is_out(outcomes[2], 2, "ranks 0 and 1")


def test_the_store_is_gone_and_then_a_rank(lab: hosts.Lab, tmp_path: Path) -> None:
    """Steps need no store. With a loss all ranks end, and say why."""
    run = Run(lab, tmp_path)
    run.kill(KEEPER)
    before = len(steps(tmp_path, 0))
    run.until(lambda: len(steps(tmp_path, 0)) > before + 3, "steps without the store")
    run.kill(3)
    run.until(lambda: all(run.has_ended(rank) for rank in (0, 1, 2)), "the end of the others", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    for rank in (0, 1, 2):
        says_that_it_cannot_know(outcomes[rank], rank, r"rank(s .*)? 3")
        assert {size for size, _ in steps(tmp_path, rank).values()} == {4}


@pytest.mark.parametrize("killed", [(2, 3), (0, 1), (1, 2)], ids=["a host's", "the store's host's", "one on each"])
def test_ranks_of_hosts_with_two_are_killed(two_hosts: hosts.Lab, tmp_path: Path, killed: tuple[int, int]) -> None:
    run = Run(two_hosts, tmp_path)
    left = tuple(rank for rank in range(4) if rank not in killed)
    for rank in killed:
        run.kill(rank)
    run.go_on(2, left)
    run.kill(left[1])
    run.go_on(1, left[:1])
    outcomes = run.end()
    assert [outcomes[rank].error for rank in range(4)] == ["" if rank == left[0] else "died" for rank in range(4)]


def test_a_host_with_two_ranks_is_cut_off(two_hosts: hosts.Lab, tmp_path: Path) -> None:
    """They reach each other still, and must not go on as a job of two."""
    run = Run(two_hosts, tmp_path)
    run.cut(1)
    check_two_and_two(run)


def test_a_host_is_cut_off_while_its_other_rank_is_left_out(two_hosts: hosts.Lab, tmp_path: Path) -> None:
    check_cut_off_during_a_repair(Run(two_hosts, tmp_path), host=1)
