"""The child of the supervisor that runs torch's elastic agent, which starts the ranks and watches them."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import elastic_launch

from ringdp import _early
from ringdp.config import threads
from ringdp.launcher import advice, door, elastic, failure, messages, metrics, processes, secret
from ringdp.launcher.arguments import Arguments, ranks_variables
from ringdp.launcher.logs import RankLogs, RankLogsSpecs, UsersLogsSpecs
from ringdp.launcher.notice import Notice
from ringdp.launcher.other_nodes import OtherNodeFailed
from ringdp.launcher.replacements import Replacements
from ringdp.launcher.stopped import StoppedRanks
from ringdp.launcher.views import Stream
from ringdp.launcher.waiting import Waiting

_RUN_PATH = """\
import sys
sys.path[:] = {path!r}
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import run_script_path
record(run_script_path)(*sys.argv[1:])
"""
"""The program of an elastic job's ranks with --run-path: processes, not functions, so that each can end by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """The supervisor's orders to the agent.

    Attributes:
        arguments: the command line.
        folder: the run's folder.
        secret_file: the job's secret; None lets rank 0 make one and publish it in the store.
        own_secret: the secret was made for this run, and goes with it.
        terminals: path of the pseudo-terminal by stream, where there is one.
        status_fd: the pipe for messages.
        leash_fd: reads the end of file when the supervisor has died.
    """

    arguments: Arguments
    folder: Path
    secret_file: Path | None
    own_secret: bool
    terminals: Mapping[Stream, str]
    status_fd: int
    leash_fd: int


def run(orders: Orders) -> NoReturn:
    """Start the ranks, wait for them, report to the supervisor, and end this process. Called right after the fork."""
    code = 1
    waiting = passage = None
    try:
        notify_nodes = _begin(orders)
        passage = door.enter(orders.arguments, lambda line: _say(orders, [line]))
        if passage is not None:
            orders = dataclasses.replace(orders, arguments=passage.arguments)
            os.environ.update(passage.environ)
        if orders.arguments.meeting is not None:
            waiting = Waiting(orders.arguments.meeting, lambda lines: _say(orders, lines))
        code = _run(orders, waiting, notify_nodes, passage)
    except (SignalException, KeyboardInterrupt):
        code = 128 + signal.SIGTERM
    except door.RefusedError as error:
        messages.post(orders.status_fd, messages.Broken(error=str(error)))
    except BaseException as error:
        # Among them SystemExit: nothing may unwind into the supervisor's frames, which this process shares.
        logging.getLogger("ringdp.launch").error("%s", traceback.format_exc())
        messages.post(orders.status_fd, messages.Broken(error=advice.explain(error, orders.arguments, waiting)))
    finally:
        try:
            if passage is not None:
                passage.way.close()
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what --run-path leaves
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # a signal may come now
            os._exit(code)


def _say(orders: Orders, lines: Sequence[str]) -> None:
    messages.post(orders.status_fd, messages.Waiting(lines=tuple(lines)))


def _begin(orders: Orders) -> list[Callable[[str], None]]:
    """This process is the agent. Returns a list for functions that report its end to other nodes."""
    # A group of its own: the terminal's Ctrl-C reaches the supervisor alone, which passes it on once.
    os.setpgid(0, 0)
    processes.become_subreaper()
    if orders.secret_file is not None:
        os.environ["RINGDP_SECRET_FILE"] = str(orders.secret_file)
    if orders.arguments.torchrun.tls:
        os.environ["RINGDP_TLS"] = "1"
    notify_nodes: list[Callable[[str], None]] = []  # once there is an agent
    threading.Thread(target=_watch_leash, args=(orders, notify_nodes), name="leash", daemon=True).start()
    return notify_nodes


def _run(
    orders: Orders,
    waiting: Waiting | None,
    notify_nodes: list[Callable[[str], None]],
    passage: door.Passage | None,
) -> int:
    for number in _early.RANK_SIGNALS:
        # Slurm may send them to all processes of a step. A handler, as what is ignored would be ignored by the ranks.
        signal.signal(number, lambda number, _: messages.post(orders.status_fd, messages.Signalled(number=number)))
    args = orders.arguments.torchrun
    if args.logs_specs is None:
        _divert_output(orders.folder, silent=bool(args.duplicate_stdout_filters or args.duplicate_stderr_filters))
    local_world_size = torchrun.determine_local_world_size(args.nproc_per_node)
    args.nproc_per_node = str(local_world_size)
    alone = local_world_size == 1 and not orders.arguments.several_hosts
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(threads.threads_per_rank(threads.usable_cores(), local_world_size, alone=alone))
    )
    metrics.begin(args, orders.folder)
    of_this_attempt: list[RankLogs] = []
    log_dir, args.log_dir = args.log_dir, args.log_dir if args.logs_specs else str(orders.folder)
    config, entrypoint, entrypoint_args = torchrun.config_from_args(args)
    args.log_dir = log_dir
    if args.run_path and args.elastic:
        program = _RUN_PATH.format(path=sys.path).replace("$", "$$")  # torch replaces ${local_rank}
        entrypoint, entrypoint_args = sys.executable, ["-u", "-c", program, *entrypoint_args]

    def started_all(ranks: list[RankLogs], environ: Mapping[str, str]) -> None:
        of_this_attempt[:] = ranks
        message = messages.Started(
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            world_size=int(environ["WORLD_SIZE"]),
            threads=os.environ.get("OMP_NUM_THREADS"),
            ranks=tuple(ranks),
            elastic=args.elastic,
            max_restarts=args.max_restarts,
        )
        messages.post(orders.status_fd, message)
        if passage is not None:
            passage.begun()
        if waiting is not None:
            waiting.end()

    logs_specs: RankLogsSpecs | UsersLogsSpecs
    if args.logs_specs is not None and config.logs_specs is not None:
        logs_specs = UsersLogsSpecs(config.logs_specs, folder=orders.folder, started=started_all)
    else:
        logs_specs = RankLogsSpecs(
            folder=orders.folder,
            views=orders.arguments.views,
            # A function (--run-path) redirects its streams itself, into something that must be able to seek.
            terminals=orders.terminals if isinstance(entrypoint, str) else {},
            tail_for_filters=bool(args.duplicate_stdout_filters or args.duplicate_stderr_filters),
            started=started_all,
        )
    config.logs_specs = logs_specs

    def meeting(handler: RendezvousHandler) -> None:
        if passage is not None:
            passage.meeting(handler)
        if waiting is not None:
            waiting.note_handler(handler)

    stopped = StoppedRanks(args.evict_after) if args.elastic else None

    def restarting(failures: Mapping[int, ProcessFailure]) -> None:
        messages.post(orders.status_fd, messages.Restarting(failures=_rank_failures(failures, stopped)))
        if waiting is not None and not args.elastic:  # whose launchers agree without another rendezvous
            waiting.begin()

    def lost(failures: Mapping[int, ProcessFailure]) -> None:
        messages.post(orders.status_fd, messages.Lost(failures=_rank_failures(failures, stopped)))

    def say(line: str) -> None:
        _say(orders, [line])

    def replacing(most: int) -> elastic.Replacing:
        def started(logs: RankLogs) -> None:
            of_this_attempt[:] = [logs if one.rank == logs.rank else one for one in of_this_attempt]
            messages.post(orders.status_fd, messages.Replaced(logs=logs))

        def none(rank: int, why: str) -> None:
            say(f"rank {rank}: {why}")

        return elastic.Replacing(replacements=Replacements(most, logs_specs.logs_of), started=started, none=none)

    def again(words: str, ended_well: bool) -> None:
        line = f"{words}: the ranks there are started again, and with them those here"
        say(f"{line}, which had ended well" if ended_well else line)
        if waiting is not None and not args.elastic:
            waiting.begin()

    host = socket.gethostname()
    elsewhere = elastic.Elsewhere(
        say=lambda lines, said: messages.post(
            orders.status_fd, messages.Waiting(lines=tuple(lines), said_elsewhere=said)
        ),
        again=again,
        rank_failed=lambda failures: _first_failure(_rank_failures(failures, stopped), of_this_attempt, host),
        launcher_failed=lambda error: f"the launcher on host {host} {_end_of_launcher(error)}",
    )
    if args.elastic:
        os.environ["RINGDP_ELASTIC"] = "1"
        os.environ.update(ranks_variables(args))
    if args.join is not None:
        os.environ["RINGDP_JOIN"] = args.join + (f"/{args.join_id}" if args.join_id else "")
    gone = elastic.report_to(
        meeting=meeting,
        restarting=restarting,
        running=lambda pids: messages.post(orders.status_fd, messages.Running(pids=tuple(pids.items()))),
        elsewhere=elsewhere,
        lost=lost if args.elastic else None,
        stopped=stopped,
        notice=None if args.notice_cmd is None else Notice(args.notice_cmd, say),
        replacing=None if not args.max_replacements else replacing(args.max_replacements),
    )
    notify_nodes.append(gone)
    if waiting is not None:
        waiting.begin()

    @record  # copies the first failure's error file where a scheduler wants it, as torchrun does
    def launch() -> None:
        elastic_launch(config=config, entrypoint=entrypoint)(*entrypoint_args)

    try:
        launch()
    except ChildFailedError as error:
        messages.post(orders.status_fd, messages.Failed(failures=_rank_failures(error.failures, stopped)))
        return 1
    except OtherNodeFailed as error:
        messages.post(orders.status_fd, messages.FailedElsewhere(words=str(error)))
        return 1
    return 0


def _first_failure(failures: tuple[messages.RankFailure, ...], ranks: list[RankLogs], host: str) -> str:
    """The rank to blame, for the users of other nodes."""
    first = failure.examine(failures, tuple(ranks))[0]
    return first.verdict(host)


def _end_of_launcher(error: BaseException) -> str:
    if isinstance(error, SignalException):
        return f"was stopped by {signal.Signals(error.sigval).name}"
    return "was stopped" if isinstance(error, KeyboardInterrupt) else f"failed: {type(error).__name__}: {error}"


def _rank_failures(
    failures: Mapping[int, ProcessFailure], stopped: StoppedRanks | None
) -> tuple[messages.RankFailure, ...]:
    return tuple(
        messages.RankFailure(
            rank=rank,
            local_rank=failed.local_rank,
            pid=failed.pid,
            exit_code=failed.exitcode,
            observed_s=float(failed.timestamp),
            cause="" if stopped is None else stopped.why(failed.pid),
        )
        for rank, failed in failures.items()
    )


def _divert_output(folder: Path, *, silent: bool) -> None:
    """Send the log of torch's agent to launcher.log: on a failure that is pages, which the supervisor sums up in
    fifteen lines.

    Args:
        folder: the run's folder.
        silent: torch also copies the ranks' output to our stdout and stderr; drop that, the supervisor shows it.
    """
    log = folder / "launcher.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    if silent:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of this process
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    root = logging.getLogger()
    for other in root.handlers[:]:
        root.removeHandler(other)
    root.addHandler(handler)


def _watch_leash(orders: Orders, notify_nodes: list[Callable[[str], None]]) -> None:
    """Wait until the supervisor is gone without having ended us (SIGKILL), then end everything.

    Args:
        orders: of this agent.
        notify_nodes: functions that report to the other nodes why this one ends.
    """
    while os.read(orders.leash_fd, 1):
        pass
    for notify in notify_nodes:  # before the agent sees that its ranks have ended
        notify(f"the launcher on host {socket.gethostname()} was killed")
    processes.kill_all(lambda: processes.descendants(os.getpid()))
    if orders.own_secret and orders.secret_file is not None:
        secret.remove_secret(orders.secret_file)
    os._exit(1)
