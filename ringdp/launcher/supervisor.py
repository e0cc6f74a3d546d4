"""The process the user starts: it forks the agent, shows the ranks' output, handles signals, and cleans up.

It does little on purpose: when Ctrl-C comes torch's agent may be importing, waiting in C++ for other hosts, or starting
ranks; this process is never busy, so it can end everything in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ringdp import _early, stories
from ringdp.launcher import agent, disks, failure, messages, processes, secret, summary, tether, verdicts
from ringdp.launcher.arguments import Arguments, Placement, join_running, parse
from ringdp.launcher.connection import Connection
from ringdp.launcher.console import Console
from ringdp.launcher.display import Display
from ringdp.launcher.logs import RankLogs, RunFolder, make_run_folder, remove_run_folder
from ringdp.launcher.many_hosts import ManyHosts
from ringdp.launcher.passing import PassedOn
from ringdp.launcher.tether import MARK, End, Tether

POLL_S = 0.05
"""Seconds between two reads of the logs; a read costs microseconds."""

NO_RANKS_GRACE_S = 0.3
"""Seconds the agent has to end after a stop signal while no rank has been started."""

VERDICTS = 3
"""Failures before the last one that the summary names."""

LEFTOVERS_S = 2.0
"""Seconds that children of failed ranks have to end."""


def launch(argv: list[str], *, given_secret: str | None = None, tied: Tether | None = None) -> int:
    """Run a job from its command line; see ``ringdp.launcher.__main__.main``.

    Args:
        argv: the command line.
        given_secret: the job's, in hexadecimal digits, where another launcher has started this one.
        tied: joins this one to that.
    """
    try:
        arguments = join_running(parse(argv, on_a_node=tied is not None))
    except ValueError as error:
        Console().lines("stderr", [f"ringrun: {error}"])
        return 2
    if arguments.placement is not None:
        return _on_many_hosts(arguments, arguments.placement)
    try:
        folder = make_run_folder(
            log_dir=Path(os.devnull) if arguments.torchrun.logs_specs else arguments.log_dir,
            script=arguments.torchrun.training_script,
            several_hosts=arguments.several_hosts,
        )
    except OSError as error:
        Console().lines("stderr", [f"ringrun: cannot make the folder for the logs: {error}; see --log-dir"])
        return 1
    supervisor = Supervisor(arguments, folder, given_secret=given_secret, tied=tied)
    try:
        return supervisor.run()
    finally:
        supervisor.remove_files()


def _on_many_hosts(arguments: Arguments, placement: Placement) -> int:
    given = arguments.secret_file
    job_secret = given.read_text().strip() if given is not None else secrets.token_hex(32)
    try:
        return ManyHosts(placement, secret=job_secret, grace_s=arguments.grace_s).run()
    except ValueError as error:  # -x names a variable that is not set
        Console().lines("stderr", [f"ringrun: {error}"])
        return 2


class Supervisor:
    """One run. Used by the main thread alone; signal handlers run between its instructions."""

    def __init__(
        self, arguments: Arguments, folder: RunFolder, *, given_secret: str | None = None, tied: Tether | None = None
    ) -> None:
        self._given_secret, self._tether = given_secret, tied
        self._connection = Connection.of_this_process() if tied is None else None
        self._arguments = arguments
        self._folder = folder
        self._console = Console()
        self._display = Display(self._console, arguments.views)
        self._own_secret: Path | None = None
        self._agent_pid = 0
        self._agent_status: int | None = None
        self._stop_signal: int | None = None
        self._stop_time = 0.0
        self._not_ours = frozenset(processes.descendants(os.getpid()))
        self._wake_read, self._wake_write = os.pipe()
        self._start_time = time.monotonic()
        self._oom_kills = stories.oom_kills()
        self._passed_on = PassedOn()
        self._started: messages.Started | None = None
        self._failed: messages.Failed | None = None
        self._lost: dict[int, str] = {}  # ranks without which the others have gone on, and how they ended
        self._verdicts: deque[str] = deque(maxlen=VERDICTS)  # why the ranks were started again
        self._broken: messages.Broken | None = None
        self._failed_elsewhere: messages.FailedElsewhere | None = None

    def run(self) -> int:
        """Start the agent and stay until the job has ended and its processes are gone; returns the exit code."""
        processes.become_subreaper()
        secret_file = self._arguments.secret_file
        self._handle_signals()
        if secret_file is None and (self._given_secret is not None or not self._arguments.several_hosts):
            secret_file = self._own_secret = secret.make_secret(self._given_secret)
        status_read, status_write = os.pipe()
        leash_read, leash_write = os.pipe()
        orders = agent.Orders(
            arguments=self._arguments,
            folder=self._folder.path,
            secret_file=secret_file,
            own_secret=self._own_secret is not None,
            terminals=self._display.open_terminals(),
            status_fd=status_write,
            leash_fd=leash_read,
        )
        self._fork(orders, close_in_agent=(status_read, leash_write))
        os.close(status_write)
        os.close(leash_read)
        os.set_blocking(status_read, False)
        self._watch(messages.Inbox(status_read))
        self._end_leftovers()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._display.finish()
        return self._conclude()

    def remove_files(self) -> None:
        """Remove the secret, and the logs where none were wanted."""
        if self._own_secret is not None:
            secret.remove_secret(self._own_secret)
        remove_run_folder(self._folder)

    # Starting

    def _handle_signals(self) -> None:
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _only_wake)
        signal.signal(signal.SIGWINCH, self._on_resize)
        signal.signal(signal.SIGALRM, self._on_grace_over)
        for for_ranks in _early.RANK_SIGNALS:
            signal.signal(for_ranks, self._on_pass)
        for name in {"SIGINT", "SIGTERM", *self._arguments.signals}:
            number = getattr(signal, name, None)
            if number is None or (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN):
                continue  # nohup ignores SIGHUP
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, self._on_stop)
        _early.release()

    def _fork(self, orders: agent.Orders, *, close_in_agent: tuple[int, ...]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that came between the fork and the reset of the handlers would be lost on the agent.
        every = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with warnings.catch_warnings():
            # Python 3.12 warns as numpy's thread pool exists; OpenBLAS looks after itself in a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, every)
            for descriptor in (self._wake_read, self._wake_write, *close_in_agent):
                os.close(descriptor)
            agent.run(orders)
        self._agent_pid = pid
        signal.pthread_sigmask(signal.SIG_SETMASK, every)

    # Running

    def _watch(self, inbox: messages.Inbox) -> None:
        """Until the agent has ended."""
        while self._agent_status is None:
            self._wait()
            self._agent_status = processes.reap().get(self._agent_pid)
            for message in inbox.read():
                self._take(message)
            self._display.show()
            if self._passed_on.under_way and self._stop_signal is None:
                self._console.lines("stderr", [f"ringrun: {line}" for line in self._passed_on.deliver()])
            if self._stop_signal is not None and self._grace_left() <= 0:
                processes.kill_all(self._survivors)

    def _wait(self) -> None:
        poll = select.poll()
        tethers = [] if self._tether is None or self._tether.lost else [self._tether.descriptor]
        for descriptor in (self._wake_read, *self._display.descriptors, *tethers):
            poll.register(descriptor, select.POLLIN)
        poll.poll(POLL_S * 1000)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 512):
                pass
        if self._tether is not None and (number := self._tether.read()) is not None:
            self._on_stop(number, None)
        while self._tether is not None and self._tether.passed_on:
            self._passed_on.note(self._tether.passed_on.pop(0))
        if self._tether is not None and self._tether.beat_due(self._console.wrote_s):
            self._console.lines("stderr", [MARK + "{}"])
        if self._connection is not None and self._stop_signal is None and self._connection.lost:
            self._on_stop(signal.SIGHUP, None)

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.Failed):
            self._failed = message
        elif isinstance(message, messages.Broken):
            self._broken = message
        elif isinstance(message, messages.FailedElsewhere):
            self._failed_elsewhere = message
        elif isinstance(message, messages.Waiting):
            if self._tether is not None and message.said_elsewhere:
                return  # the user's launcher shows it for all hosts
            self._console.lines("stderr", [f"ringrun: {line}" for line in message.lines])
        elif isinstance(message, messages.Restarting):
            self._note_restart(message)
        elif isinstance(message, messages.Running):
            self._passed_on.started(dict(message.pids))
        elif isinstance(message, messages.Signalled):
            self._passed_on.all_got(message.number)
        elif isinstance(message, messages.Lost):
            self._note_loss(message)
        elif isinstance(message, messages.Replaced):
            self._note_replacement(message.logs)
        else:
            self._started = message
            args = self._arguments.torchrun
            args.elastic, args.max_restarts = message.elastic, message.max_restarts
            self._lost.clear()
            self._passed_on.starting()
            self._console.lines("stderr", self._greeting(message))
            self._display.start_attempt(message, elastic=self._arguments.torchrun.elastic)

    def _note_restart(self, message: messages.Restarting) -> None:
        verdict = summary.restarting(
            self._examine(message.failures),
            host=socket.gethostname(),
            attempt=self._started.attempt if self._started else 0,
            logs_kept=self._folder.kept,
        )
        self._verdicts.append(verdict)
        self._console.lines("stderr", [f"ringrun: {verdict}"])

    def _note_loss(self, message: messages.Lost) -> None:
        host = socket.gethostname()
        for report in self._examine(message.failures):
            self._lost[report.failure.rank] = report.in_short
            self._console.lines("stderr", [summary.lost(report, host=host, logs_kept=self._folder.kept)])

    def _note_replacement(self, logs: RankLogs) -> None:
        if self._started is not None:
            ranks = tuple(logs if one.rank == logs.rank else one for one in self._started.ranks)
            self._started = dataclasses.replace(self._started, ranks=ranks)
            self._display.replaced(logs, len(ranks))
            self._lost[logs.rank] = f"{self._lost.get(logs.rank, 'died')}, replaced"
        where = f", its log in {Path(logs.stdout).parent}" if self._folder.kept else ""
        self._console.lines("stderr", [f"ringrun: another process takes the place of rank {logs.rank}{where}"])

    def _examine(self, failures: tuple[messages.RankFailure, ...]) -> list[failure.FailureReport]:
        reports = failure.examine(
            failures,
            self._started.ranks if self._started else (),
            killed_by=stories.out_of_memory(self._oom_kills, stories.oom_kills()),
        )
        verdicts.leave(reports, socket.gethostname())
        return reports

    def _greeting(self, started: messages.Started) -> list[str]:
        host = socket.gethostname()
        ranks = [rank.rank for rank in started.ranks]
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        if started.attempt:
            most = self._arguments.torchrun.max_restarts
            return [f"ringrun: starting again: {span} of {started.world_size}, restart {started.attempt} of {most}"]
        threads = f", {started.threads} thread{'' if started.threads == '1' else 's'} each" if started.threads else ""
        logs = f", logs in {self._folder.shown}" if self._folder.kept else ""
        notice = [f"ringrun: {self._folder.notice}"] if self._folder.notice else []
        return [*notice, f"ringrun: {span} of {started.world_size} on {host}{threads}{logs}"]

    # Stopping

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_signal is None:
            self._stop_signal, self._stop_time = number, now
            # Should a write to the console block, the alarm still ends everything.
            signal.setitimer(signal.ITIMER_REAL, self._arguments.grace_s + 1.0)
            if self._agent_pid and self._agent_status is None:
                processes.send([self._agent_pid], number)
            self._display.stopping()
        elif now - self._stop_time > processes.SAME_PRESS_S:
            self._end_at_once()

    def _on_pass(self, number: int, frame: FrameType | None) -> None:
        self._passed_on.note(number)

    def _on_grace_over(self, number: int, frame: FrameType | None) -> None:
        self._end_at_once()

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        self._display.resize()

    def _end_at_once(self) -> NoReturn:
        number = self._stop_signal or signal.SIGTERM
        processes.kill_all(self._survivors)
        self.remove_files()
        if select.select([], [2], [], 0)[1]:  # the console may be what holds this process up
            os.write(2, f"ringrun: stopped by {signal.Signals(number).name}: all processes were killed\n".encode())
        os._exit(128 + number)

    def _grace_left(self) -> float:
        grace_s = self._arguments.grace_s
        if self._started is None:
            # There is no rank yet that could save anything; the agent may be waiting in C++, where it does not handle
            # signals.
            grace_s = min(grace_s, NO_RANKS_GRACE_S)
        return self._stop_time + grace_s - time.monotonic()

    def _survivors(self) -> list[int]:
        ended = processes.reap()
        if self._agent_pid in ended:
            self._agent_status = ended[self._agent_pid]
        return processes.descendants(os.getpid(), without=self._not_ours)

    def _end_leftovers(self) -> None:
        """Kill, after a stop or a failure, children of ranks, and ranks that an interrupted agent does not know.

        After a good end they are left alone: processes that a script has detached go on, as under torchrun.
        """
        if self._stop_signal is None and self._agent_status == 0:
            return
        end = time.monotonic() + LEFTOVERS_S
        signalled: set[int] = set()
        while survivors := self._survivors():
            if self._stop_signal is not None:
                end = time.monotonic() + self._grace_left()
            if time.monotonic() >= end:
                processes.kill_all(self._survivors)
                return
            processes.send(set(survivors) - signalled, signal.SIGTERM)
            signalled.update(survivors)
            self._wait()
            self._display.show()

    # Ending

    def _conclude(self) -> int:
        seconds = time.monotonic() - self._start_time
        host = socket.gethostname()
        folder = self._folder.shown if self._folder.kept else None
        if self._stop_signal is not None:
            name = signal.Signals(self._stop_signal).name
            logs = f"; logs in {folder}" if folder else ""
            after = summary.duration(seconds)
            self._log_end([f"ringrun: stopped by {name} after {after}{logs}"])
            if self._connection is not None and self._connection.lost and self._folder.kept:
                self._leave_word(f"ringrun: the ssh connection was lost after {after}, so everything was ended\n")
            if self._stop_signal == signal.SIGINT:
                self.remove_files()
            return processes.die_of(self._stop_signal)
        if self._agent_status == 0:
            restarted = self._started is not None and self._started.attempt > 0
            by_rank = self._steps_by_rank()
            steps = self._steps(by_rank)
            self._lost |= self._left_early(by_rank, steps)
            words = summary.finished(seconds, steps, logs=folder or "", restarted=restarted, lost=self._describe_lost())
            self._log_end([words, *(f"ringrun: {sentence}" for sentence in self._full_disks())], steps=steps)
            return 0
        first: failure.FailureReport | None = None
        if self._failed is not None and self._failed.failures:
            reports = self._examine(self._failed.failures)
            first = reports[0]
            lines = summary.failed(
                reports,
                host=host,
                folder=folder,
                seconds=seconds,
                restarts=self._started.attempt if self._started else 0,
                earlier=self._verdicts,
                several_hosts=self._arguments.several_hosts,
                disks=[one for one in self._full_disks() if not first.disk or not one.startswith(first.disk)],
            )
        elif self._failed_elsewhere is not None:
            lines = summary.failed_elsewhere(self._failed_elsewhere.words, seconds=seconds, folder=folder)
        else:
            log = self._folder.path / "launcher.log"
            lines = summary.broken(
                self._broken.error if self._broken else self._agent_end(),
                host=host,
                log=str(log) if folder and log.exists() and log.stat().st_size else None,
            )
            lines += [f"  {sentence}" for sentence in self._full_disks()]
        self._log_end(lines, first)
        return 1

    def _full_disks(self) -> list[str]:
        """Of the run's folders: a sentence for each that cannot be written."""
        kept = {"logs": self._folder.path, "metrics": self._arguments.torchrun.metrics_dir}
        return disks.troubles(kept | {"dumps": os.environ.get("RINGDP_DUMP_DIR") or None})

    def _steps_by_rank(self) -> dict[int, int | None]:
        """The reports of this host's ranks by rank; None where a rank wrote none."""
        return {rank.rank: summary.steps_of(rank.report_file) for rank in self._started.ranks} if self._started else {}

    def _steps(self, by_rank: Mapping[int, int | None]) -> int | None:
        """The steps of the first rank with a report; in an elastic job, which may have lost it, the most steps."""
        known = [steps for steps in by_rank.values() if steps is not None]
        return (max(known) if self._arguments.torchrun.elastic else known[0]) if known else None

    def _left_early(self, by_rank: Mapping[int, int | None], steps: int | None) -> dict[int, str]:
        """Ranks that have ended well and without which the others of an elastic job have gone on, and how."""
        if steps is None or not self._arguments.torchrun.elastic:
            return {}
        return {
            rank: f"exit code 0{'' if its is None else f' after {its} step' + 's' * (its != 1)}"
            for rank, its in by_rank.items()
            if rank not in self._lost and (its is None or its < steps)
        }

    def _describe_lost(self) -> tuple[str, ...]:
        return tuple(f"rank {rank} ({how})" for rank, how in self._lost.items())

    def _log_end(
        self, lines: list[str], first: failure.FailureReport | None = None, *, steps: int | None = None
    ) -> None:
        """Write the last lines for the user, or send them to the launcher that the user started."""
        if self._tether is None:
            self._console.lines("stderr", lines)
            return
        end = End(
            lines=tuple(lines),
            logs=self._folder.shown if self._folder.kept else "",
            blame=None if first is None else int(first.blame),
            when_s=0.0 if first is None else first.when_s,
            steps=steps,
            lost=self._describe_lost(),
        )
        self._console.lines("stderr", [MARK + tether.line(end).decode().rstrip("\n")])

    def _leave_word(self, text: str) -> None:
        """Write a line into the run's folder, for a user whom the console no longer reaches."""
        with contextlib.suppress(OSError), open(self._folder.path / "launcher.log", "a") as file:
            file.write(text)

    def _agent_end(self) -> str:
        code = os.waitstatus_to_exitcode(self._agent_status or 0)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the launcher's own agent (pid {self._agent_pid}) {how}, so the ranks were ended"


def _only_wake(number: int, frame: FrameType | None) -> None:
    """Does nothing: the wake-up descriptor does the work, and is written only for signals with a handler."""
