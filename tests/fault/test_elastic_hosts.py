"""Elastic jobs on several hosts: one that is gone and comes back, networks that fall apart.

Hosts are network namespaces. A host that is silent is lost after RINGDP_HEAL, here one second.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault import hosts
from tests.fault.elastic_host_jobs import KEEPER, NETWORK, specs, steps
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


class Run:
    """A job on the lab's hosts that trains."""

    def __init__(self, lab: hosts.Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.server = hosts.rank_server()
        self.server.start(specs(lab, folder), folder)
        self.until(lambda: all(len(steps(folder, rank)) > 2 for rank in range(4)), "the first steps")

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 40.0) -> None:
        try:
            wait_until(condition, what, limit_s)
        except AssertionError:
            self.end()
            raise

    def middle(self, words: str) -> None:
        hosts.run("ip", "-n", self.lab.middle, *words.split())

    def cut(self, *ranks: int) -> None:
        """These hosts from the others."""
        for rank in ranks:
            self.middle(f"link set up{rank} down")
        for one, other in itertools.pairwise(ranks):
            self.middle(f"link add a{one} type veth peer name b{one}")
            self.middle(f"link set a{one} master br{one} up")
            self.middle(f"link set b{one} master br{other} up")

    def mend(self, rank: int) -> None:
        self.middle(f"link set up{rank} up")

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


def named(outcome: hosts.Outcome, *words: str) -> None:
    assert outcome.error, "it should have ended in an error"
    assert any(word in f"{outcome.error}: {outcome.text}" for word in words), f"{outcome.error}: {outcome.text}"


def test_a_host_is_gone_and_comes_back(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.cut(3)
    run.go_on(3, (0, 1, 2))
    run.mend(3)  # by now the others have gone on without it
    run.until(lambda: run.has_ended(3), "the end of rank 3", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert [outcomes[rank].error for rank in (0, 1, 2)] == ["", "", ""]
    named(outcomes[3], "ExpelledError", "store")
    assert max(size for size, _ in steps(tmp_path, 3).values()) == min(size for size, _ in steps(tmp_path, 3).values())


def test_two_and_two(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.cut(2, 3)
    run.go_on(2, (0, 1))
    run.until(lambda: run.has_ended(2) and run.has_ended(3), "the end of ranks 2 and 3", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert [outcomes[rank].error for rank in (0, 1)] == ["", ""]
    for rank in (2, 3):
        named(outcomes[rank], "store")
        assert {size for size, _ in steps(tmp_path, rank).values()} == {4}


def test_three_without_the_store_end_and_one_with_it_goes_on(lab: hosts.Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path)
    run.cut(1, 2, 3)
    run.go_on(1, (0,))
    run.until(lambda: all(run.has_ended(rank) for rank in (1, 2, 3)), "the end of the others", WITHOUT_THE_STORE_S)
    outcomes = run.end()
    assert outcomes[0].error == ""
    for rank in (1, 2, 3):
        named(outcomes[rank], "store")
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
