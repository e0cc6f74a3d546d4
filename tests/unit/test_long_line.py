"""The line that far/long_line.py puts between hosts: delay, losses, a rate, a NAT; it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.far import long_line
from benchmarks.far.long_line import FarHosts, LongLine
from benchmarks.lib import hosts

pytestmark = pytest.mark.nightly

# The second host answers what comes; the first one measures. UDP: nothing is sent again.
ECHO = """
import socket, sys, time
it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
it.bind(("0.0.0.0", 7))
it.settimeout(1)
count, size = int(sys.argv[2]), int(sys.argv[3])
if sys.argv[1] == "1":
    for _ in range(count):
        try:
            data, who = it.recvfrom(2000)
            it.sendto(data, who)
        except TimeoutError:
            pass
else:
    time.sleep(0.3)
    times = []
    for _ in range(count):
        began = time.monotonic()
        it.sendto(bytes(size), ("10.77.0.2", 7))
        try:
            it.recv(2000)
            times.append(time.monotonic() - began)
        except TimeoutError:
            pass
    print(len(times), min(times, default=0))
"""
CALL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7), timeout=0.5)
except ConnectionRefusedError:
    print("reached")
except TimeoutError:
    print("nothing")
"""


@pytest.fixture(autouse=True)
def namespaces() -> Iterator[None]:
    """Skip where such hosts cannot be made, and fail a test that leaves any."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    try:
        with FarHosts(1, rate="none", line=LongLine(0.0)):
            pass
    except hosts.HostsError as error:
        pytest.skip(f"a long line cannot be made here: {error}")
    yield
    assert not list(hosts.LOCKS.glob(f"rd{os.getpid()}*"))
    forwarders = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "ringdp-long-line"], capture_output=True, check=False
    )
    assert not forwarders.stdout


def echoed(line: LongLine, rate: str, *, count: int, size: int) -> tuple[int, float]:
    """How many of the messages came back, and the shortest time that one took."""
    with FarHosts(2, rate=rate, line=line) as far:
        command = [sys.executable, "-c", ECHO]
        words = [far.command(host, [*command, str(host), str(count), str(size)]) for host in range(2)]
        other = subprocess.Popen(words[1])
        said = subprocess.run(words[0], capture_output=True, text=True, check=True, timeout=60).stdout.split()
        other.wait(60)
    return int(said[0]), float(said[1])


def test_a_message_takes_the_delay_twice_and_the_time_that_the_rate_takes() -> None:
    came, shortest_s = echoed(LongLine(0.02), "1mbit", count=3, size=1000)
    assert came == 3
    assert 0.04 + 2 * 8000 / 1e6 < shortest_s < 0.15


def test_packets_are_lost() -> None:
    came, _ = echoed(LongLine(0.0, loss_percent=50), "none", count=12, size=10)
    assert came < 12


def test_what_the_queue_has_no_room_for_is_lost() -> None:
    came, _ = echoed(LongLine(0.0, queue_s=-1.0), "1mbit", count=2, size=10)
    assert came == 0


def test_behind_nat_nobody_is_called_and_everybody_calls() -> None:
    with FarHosts(2, rate="none", line=LongLine(0.0, behind_nat=(1,))) as far:

        def calls(host: int, address: str) -> str:
            words = far.command(host, [sys.executable, "-c", CALL, address])
            return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

        assert calls(0, far.address(1)) == "nothing"
        assert calls(1, far.address(0)) == "reached"


def test_a_command_runs_on_each_host_and_fails_as_its_ranks_do() -> None:
    tool = [sys.executable, "-m", "benchmarks", "long_line", "--hosts", "2", "--per-host", "2", "--delay", "1ms", "--"]
    done = subprocess.run([*tool, "sh", "-c", "echo $RANK on $(hostname)"], capture_output=True, text=True, check=False)
    assert sorted(done.stdout.split("\n")[:-1]) == ["[0] 0 on h0", "[1] 1 on h0", "[2] 2 on h1", "[3] 3 on h1"], done
    assert subprocess.run([*tool, "false"], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--delay", "25", "--", "true"], "delay"),
        (["--rate", "fast", "--", "true"], "'fast' is not a rate such as 100mbit"),
        (["--loss", "100", "--", "true"], "from 0 to below 100"),
        (["--behind-nat", "2", "--", "true"], "there are hosts 0 to 1"),
        (["--hosts", "2"], "which command?"),
    ],
)
def test_bad_options_are_refused_in_words(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_line.parse(options)
    assert words in capsys.readouterr().err
