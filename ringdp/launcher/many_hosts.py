"""``ringrun -H node1:4,node2:4 train.py``: a launcher on each host, over ssh, and one console for all of them.

Each host's launcher is `node`, connected with this one by the protocol of `tether`. Nothing is started before all hosts
have answered and agree. The secret and the variables travel inside the connection, never in a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ringdp import _early
from ringdp.launcher import advice, processes, reach, tether
from ringdp.launcher.arguments import Placement
from ringdp.launcher.connection import Connection
from ringdp.launcher.console import Console
from ringdp.launcher.failure import Blame
from ringdp.launcher.filters import Splitter
from ringdp.launcher.host_list import Host
from ringdp.launcher.summary import MAX_LINES, duration, finished
from ringdp.launcher.tether import MARK, Ask, End, Hello, Orders, Reached
from ringdp.launcher.views import Stream

SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
ANSWER_S = 60.0
"""Seconds a host has to answer; importing torch from a slow disk takes most of them."""

NOTICE_S, NOTICE_AGAIN_S = 8.0, 10.0
"""Seconds until the first line about hosts that have not answered, and between two lines."""

AFTER_FAILURE_S = 5.0
"""Seconds that the other hosts have to notice that one has failed, before they are stopped."""

PASSED_ON = re.compile(r"(RINGDP|NCCL|GLOO|TORCH|PYTORCH|TORCHELASTIC|OMP|MKL|PET)_\w+")
"""Variables that go to all hosts, besides those named by -x."""

OF_THIS_HOST = {"RINGDP_SECRET_FILE", "RINGDP_ADVERTISE", "RINGDP_HOST_ID", "RINGDP_REPORT_FILE"}
"""Variables that are not passed on: paths and addresses. The hosts of PET_ variables are in the command line that each
gets."""

_SHOWN_AS_IT_IS = re.compile(r"ringrun: |\[rank \d+\] |\[\w+\d+\]:")
_ANSWERS = 5  # lines of a host that could not answer
_NAMES = 8  # of hosts that have not answered
_FOLDERS = 4  # of hosts whose logs the last line names


class _Node:
    """The launcher of one host, and the process that is connected with it."""

    def __init__(self, host: Host, number: int, command: Sequence[str]) -> None:
        self.host, self.number = host, number
        self.hello: Hello | None = None
        self.end: End | None = None
        self.reached: Reached | None = None
        self.last_beat_s = time.monotonic()
        self.said: deque[str] = deque(maxlen=_ANSWERS)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams: dict[int, tuple[Stream, Splitter]] = {
            self.process.stdout.fileno(): ("stdout", Splitter()),
            self.process.stderr.fileno(): ("stderr", Splitter()),
        }

    def write(self, content: Any) -> None:
        """Lines are small: the pipe has room unless the connection has been stuck for long."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self.process.stdin.fileno(), False)
            self.process.stdin.write(tether.line(content))
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """End the connection itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return not self.streams and self.process.poll() is not None


class ManyHosts:
    """One run. Used by the main thread alone."""

    def __init__(self, placement: Placement, *, secret: str, grace_s: float) -> None:
        """
        Args:
            placement: the hosts and the programs.
            secret: the job's, in hexadecimal digits.
            grace_s: seconds that ranks have to end after a stop signal.
        """
        self._placement, self._secret, self._grace_s = placement, secret, grace_s
        self._console = Console()
        self._nodes: list[_Node] = []
        self._stop_signal: int | None = None
        self._stop_time = 0.0
        self._signals = 0
        self._passed_on: list[int] = []  # signals for the ranks of all hosts
        self._wake_read, self._wake_write = os.pipe()
        self._connection = Connection.of_this_process()

    def run(self) -> int:
        """Start the launchers and stay until all have ended; returns the exit code."""
        begin = time.monotonic()
        self._handle_signals()
        if self._placement.notice:
            self._say([self._placement.notice])
        try:
            self._nodes = [
                _Node(host, number, self._command(host)) for number, host in enumerate(self._placement.hosts)
            ]
        except OSError as error:
            return self._fail(
                [f"cannot start {self._placement.ssh or SSH.split()[0]}: {error.strerror or error}; see --ssh"]
            )
        try:
            if problems := self._ask():
                return self._fail(problems)
            apart = False
            if self._stop_signal is None and (problems := self._try_meeting()):
                if not self._placement.looks_at_hosts:
                    return self._fail(problems)
                self._say([*problems, "each host is looked at by itself:"])
                apart = True
            if self._stop_signal is None:
                self._order(apart=apart)
                self._watch()
            return max(self._conclude(time.monotonic() - begin), int(apart))
        finally:
            self._end_connections()

    # Starting

    def _command(self, host: Host) -> list[str]:
        """The process that runs the launcher on a host."""
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        words = ["env", f"PYTHONPATH={os.pathsep.join(path)}", sys.executable, "-m", "ringdp.launcher.node"]
        there = f"exec {shlex.join(words)}"
        if self._placement.ssh is None:
            return ["sh", "-c", there] if is_here(host.name) else [*shlex.split(SSH), host.name, there]
        template = shlex.split(self._placement.ssh)
        if any("{host}" in word for word in template):
            return [*(word.replace("{host}", host.name) for word in template), there]
        return [*template, host.name, there]

    def _ask(self) -> list[str]:
        """Ask all hosts at the same time whether they can take part; the problems of those that cannot."""
        for node in self._nodes:
            node.write(Ask(folder=str(Path.cwd()), script=self._placement.script))
        begin = time.monotonic()
        notice_s = NOTICE_S
        while (waited_s := time.monotonic() - begin) < ANSWER_S and self._stop_signal is None:
            missing = [node.host.name for node in self._nodes if node.hello is None and not node.ended]
            if not missing:
                break
            if waited_s > notice_s:
                notice_s = waited_s + NOTICE_AGAIN_S
                names = ", ".join([*missing[:_NAMES], *["…"] * (len(missing) > _NAMES)])
                self._say([f"waiting for an answer of {names}, since {waited_s:.0f} s of at most {ANSWER_S:.0f} s"])
            self._pump(0.2)
        if self._stop_signal is not None:
            return []
        return [problem for node in self._nodes if (problem := self._problem(node))]

    def _problem(self, node: _Node) -> str | None:
        name, hello, first = node.host.name, node.hello, self._nodes[0].hello
        if hello is None:
            if not node.ended:
                return f"{name} did not answer within {ANSWER_S:.0f} s"
            words = "; ".join(node.said) or f"exit code {node.process.returncode}"
            return f"{name}: {advice.of_connection(name, words.rstrip('.'), node.process.returncode)}"
        if hello.problem is not None:
            return f"{name}: {hello.problem}"
        if first is None or first.problem is not None:
            return None
        others = [
            f"{what} {version or 'missing'}, {self._nodes[0].host.name} has {first.versions.get(what)}"
            for what, version in hello.versions.items()
            if version != first.versions.get(what)
        ]
        return f"{name} has {'; '.join(others)}: they must be the same" if others else None

    def _meeting(self) -> tuple[str, int]:
        """The address and the port at which the hosts meet."""
        hellos = [node.hello for node in self._nodes if node.hello is not None]
        return self._placement.address or meeting_address(hellos), self._placement.port or hellos[0].port

    def _try_meeting(self) -> list[str]:
        """Whether all hosts reach the first one where the job is to meet; the problems of those that do not."""
        first, *others = self._nodes
        if not others:
            return []
        address, port = self._meeting()
        first.write({"listen": port})
        self._pump_until_answered([first])
        for node in others:
            node.write({"reach": [address, port]})
        self._pump_until_answered(others)
        unreached = [(node, node.reached.why) for node in others if node.reached is not None and node.reached.why]
        problems = [reach.sentence(node.host.name, first.host.name, address, port, why) for node, why in unreached]
        shown = [*problems[:_NAMES], *[f"and {len(problems) - _NAMES} more hosts"] * (len(problems) > _NAMES)]
        return [*shown, f"    {reach.remedy(first.host.name, port)}"] if problems else []

    def _pump_until_answered(self, nodes: Sequence[_Node]) -> None:
        end = time.monotonic() + reach.TRY_S + 2.0
        while self._stop_signal is None and time.monotonic() < end:
            if all(node.reached is not None or node.ended for node in nodes):
                return
            self._pump(0.2)

    def _order(self, *, apart: bool) -> None:
        """Have the launchers start the ranks. `apart`: as a job of each host."""
        placement = self._placement
        address, port = self._meeting()
        environ = variables(os.environ, placement.variables)
        for node in self._nodes:
            own = [] if node.host.slots is None else ["--nproc-per-node", str(node.host.slots)]
            if apart and node.hello is not None:
                address, port = "127.0.0.1", node.hello.port
            elif len(self._nodes) > 1:
                own += ["--nnodes", str(len(self._nodes)), "--node-rank", str(node.number)]
            if len(self._nodes) > 1:
                own += ["--master-addr", address, "--master-port", str(port)]
            arguments = [*placement.flags, *own, *placement.program]
            node.last_beat_s = time.monotonic()
            node.write(Orders(arguments=arguments, environ=environ, secret=self._secret))
        if len(self._nodes) > 1 and not apart:
            names = ", ".join(f"{it.name}:{it.slots}" if it.slots else it.name for it in placement.hosts)
            self._say([f"starting on {len(self._nodes)} hosts ({names}), which meet at {address} port {port}"])

    # Running

    def _watch(self) -> None:
        """Run until all launchers have ended."""
        beat, failed_s, stopped_s = 0.0, None, None
        while not all(node.ended for node in self._nodes):
            self._pump(0.5)
            now = time.monotonic()
            alive = [node for node in self._nodes if not node.ended]
            if now - beat > tether.BEAT_S:
                beat = now
                for node in alive:
                    node.write({})
            while self._passed_on:
                number = self._passed_on.pop(0)
                for node in alive:
                    node.write({"pass_on": number})
            for node in alive:
                if now - node.last_beat_s > tether.SILENCE_S:
                    node.kill()
            failed = [node for node in self._nodes if node.ended and node.process.returncode != 0]
            failed_s = now if failed and failed_s is None else failed_s
            if self._goes_on(failed, alive):
                failed_s = None
            if failed_s is not None and self._stop_signal is None and now - failed_s > AFTER_FAILURE_S:
                self._stop(signal.SIGTERM, alive)
                failed_s, stopped_s = now + 1e9, now
            if self._stop_signal is not None and stopped_s is None:
                stopped_s = now
                self._stop(self._stop_signal, alive)
            if self._signals > 1 or (stopped_s is not None and now - stopped_s > self._grace_s + 5):
                return

    def _goes_on(self, failed: Sequence[_Node], others: Sequence[_Node]) -> bool:
        """Whether an elastic job goes on without lost hosts, whose launchers have sent no `End`."""
        return self._placement.elastic and bool(others) and all(node.end is None for node in failed)

    def _stop(self, number: int, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            node.write({"signal": int(number)})

    def _pump(self, wait_s: float) -> None:
        """Read new messages of the hosts."""
        if self._connection is not None and self._stop_signal is None and self._connection.lost:
            self._on_stop(signal.SIGHUP, None)
        poll = select.poll()
        owners = {descriptor: node for node in self._nodes for descriptor in node.streams}
        for descriptor in (self._wake_read, *owners):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(wait_s * 1000):
            if descriptor == self._wake_read:
                os.read(descriptor, 512)
                continue
            node = owners[descriptor]
            stream, splitter = node.streams[descriptor]
            data = os.read(descriptor, 65536)
            node.last_beat_s = time.monotonic()
            lines = splitter.feed(data) if data else splitter.finish()
            if not data:
                del node.streams[descriptor]
            for line in lines:
                self._take(node, stream, line)

    def _take(self, node: _Node, stream: Stream, line: str) -> None:
        if line.startswith(MARK):
            content = json.loads(line[len(MARK) :])
            if not content:
                return  # it is there
            if node.hello is None:
                node.hello = Hello(**content)
            elif "why" in content:
                node.reached = Reached(**content)
            else:
                node.end = End(**{**content, "lines": tuple(content["lines"]), "lost": tuple(content["lost"])})
        elif node.hello is None:
            node.said.append(line.strip())
        elif (stream == "stdout" and node.number == 0) or _SHOWN_AS_IT_IS.match(line):
            self._console.lines(stream, [line])
        else:
            self._console.lines(stream, [f"[{node.host.name}] {line}"])

    # Stopping and ending

    def _handle_signals(self) -> None:
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_stop)
        for number in _early.RANK_SIGNALS:
            signal.signal(number, lambda number, _: self._passed_on.append(number))
        _early.release()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_signal is None or now - self._stop_time > processes.SAME_PRESS_S:
            self._signals += 1
        if self._stop_signal is None:
            self._stop_signal, self._stop_time = number, now

    def _end_connections(self) -> None:
        """Close the input of a host's launcher, which then ends its processes."""
        for node in self._nodes:
            node.close()
            if node.hello is None and not node.ended:  # nothing runs there: ssh is still logging in
                node.kill()
        limit = time.monotonic() + self._grace_s + 3
        for node in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, limit - time.monotonic()))
            if node.process.poll() is None:
                node.kill()
                node.process.wait()

    def _conclude(self, seconds: float) -> int:
        if self._stop_signal is not None:
            name = signal.Signals(self._stop_signal).name
            self._say([f"stopped by {name} after {duration(seconds)} on all {len(self._nodes)} hosts"])
            self._end_connections()  # the next line may be the last of this process
            return processes.die_of(self._stop_signal)
        failed = [node for node in self._nodes if not node.ended or node.process.returncode != 0]
        if not failed or self._goes_on(failed, [node for node in self._nodes if node not in failed]):
            folders = [f"{node.end.logs} on {node.host.name}" for node in self._nodes if node.end and node.end.logs]
            logs = ", ".join([*folders[:_FOLDERS], *["…"] * (len(folders) > _FOLDERS)])
            steps = next((node.end.steps for node in self._nodes if node.end and node.end.steps is not None), None)
            where = f" on {len(self._nodes)} hosts"
            lost = [name for node in self._nodes if node.end for name in node.end.lost]
            lost += [f"host {node.host.name} ({_short(node)})" for node in failed]
            self._console.lines("stderr", [finished(seconds, steps, where=where, logs=logs, lost=lost)])
            return 0
        first, *others = sorted(failed, key=_order_of_blame)
        lines = list(first.end.lines) if first.end else [f"FAILED: {self._lost_text(first)}"]
        others_lines = [f"  also: host {node.host.name}: {_short(node)}" for node in others]
        room = MAX_LINES - len(lines)
        if len(others_lines) > room:
            others_lines = [*others_lines[: room - 1], f"  and {len(others) - room + 1} more hosts"]
        self._console.lines("stderr", [*lines, *others_lines])
        return 1

    def _lost_text(self, node: _Node) -> str:
        code = node.process.returncode
        if code == 255 or code is None or code < 0:
            return f"the connection to {node.host.name} was lost; its processes end by themselves"
        return f"the launcher on {node.host.name} ended with exit code {code} without a message"

    def _fail(self, problems: Sequence[str]) -> int:
        self._say([f"FAILED: {problems[0]}", *(f"    {problem}" for problem in problems[1:])])
        self._say(["nothing was started"])
        return 1

    def _say(self, lines: Sequence[str]) -> None:
        self._console.lines("stderr", [line if line.startswith("    ") else f"ringrun: {line}" for line in lines])


def is_here(name: str) -> bool:
    """Whether a name means this host, by its own name or an address of loopback."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    return name.startswith("127.") or name == "::1"


def meeting_address(hellos: Sequence[Hello]) -> str:
    """The address at which all hosts reach the first one: the one at which ssh reached it, or from which others were
    reached."""
    first = hellos[0]
    if len(hellos) == 1:
        return "127.0.0.1"
    away = [hello for hello in hellos[1:] if hello.seen and hello.seen not in ("127.0.0.1", "::1")]
    if first.address and first.address not in ("127.0.0.1", "::1"):
        return first.address
    if not first.address and away:  # the first one is this host
        return away[0].seen
    return "127.0.0.1" if all(hello.host == first.host for hello in hellos) else first.host


def variables(environ: Mapping[str, str], chosen: Sequence[str]) -> dict[str, str]:
    """Variables that are added to the environment of the ranks on all hosts.

    Raises:
        ValueError: -x names a variable that is not set.
    """
    found = {name: value for name, value in environ.items() if PASSED_ON.fullmatch(name) and name not in OF_THIS_HOST}
    return found | dict(_chosen(environ, chosen))


def _chosen(environ: Mapping[str, str], chosen: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in chosen:
        name, equals, value = text.partition("=")
        if not equals and name not in environ:
            raise ValueError(f"-x {name}: there is no such variable here; -x {name}=VALUE sets one")
        yield name, value if equals else environ[name]


def _order_of_blame(node: _Node) -> tuple[int, float]:
    if node.end is None or node.end.blame is None:
        return (Blame.CAUSE_STOPPED, 0.0) if node.end is None else (len(Blame), 0.0)
    return node.end.blame, node.end.when_s


def _short(node: _Node) -> str:
    if node.end is None:
        return "the connection was lost"
    return node.end.lines[0].partition(": ")[2] if node.end.lines else "ended"
