"""The files of the ranks' output: one folder per run, below it torchrun's layout.

- ``<run>/launcher.log``: the log of torch's elastic agent;
- ``<run>/attempt_<n>/<local rank>/stdout.log`` and ``stderr.log``;
- ``<run>/attempt_<n>/<local rank>/error.json``, where the script uses torch's ``@record``;
- ``<run>/attempt_<n>/<local rank>/report.json``, where it uses RingDP and ends well;
- beside it ``dump_rank<r>_<n>.json``, ``stalls_rank<r>.log`` and ``process_rank<r>.json``, where it uses ring.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from ringdp.config import inheritance
from ringdp.launcher import temporary
from ringdp.launcher.views import STREAMS, Mode, Stream, Views

DEFAULT_LOG_DIR = Path("logs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankLogs:
    """The files with one rank's output. The agent sends it to the supervisor.

    Attributes:
        rank: rank in the job.
        local_rank: rank on this host.
        stdout, stderr: the log files.
        error_file: written by torch's @record when the script raises.
        report_file: written by a rank with RingDP when it ends well.
        terminals: streams that go through a pseudo-terminal, whose reader writes the log file.
        one_terminal: both go through the same one, and so into one file.
        of_user: a user's class (--logs-specs) chose the files of the streams, or none (""); the report is in ours.
    """

    rank: int
    local_rank: int
    stdout: str
    stderr: str
    error_file: str
    report_file: str = ""
    terminals: tuple[Stream, ...] = ()
    one_terminal: bool = False
    of_user: bool = False

    @classmethod
    def inside(cls, folder: Path, *, rank: int, local_rank: int, terminals: tuple[Stream, ...] = ()) -> RankLogs:
        """Those of a rank that has this folder for itself."""
        return cls(
            rank=rank,
            local_rank=local_rank,
            stdout=str(folder / "stdout.log"),
            stderr=str(folder / "stderr.log"),
            error_file=str(folder / "error.json"),
            report_file=str(folder / "report.json"),
            terminals=terminals,
        )

    def of_replacement(self, number: int) -> RankLogs:
        """Those of the process that comes in the place of this rank's for the n-th time. Makes their folder."""
        folder = Path(self.report_file).parent.with_name(f"{self.local_rank}-{number + 1}")
        folder.mkdir(exist_ok=True)
        logs = RankLogs.inside(folder, rank=self.rank, local_rank=self.local_rank)
        return dataclasses.replace(logs, stdout=self.stdout, stderr=self.stderr, of_user=True) if self.of_user else logs

    @property
    def disk(self) -> Path | None:
        """A folder on the disk to which the output goes, for messages; None where that is not known."""
        if self.of_user or not self.stdout:
            return Path(self.stdout).parent if self.stdout else None
        return Path(self.stdout).parents[2]

    def variables(self) -> dict[str, str]:
        """Tell the rank of them."""
        variables = {"TORCHELASTIC_ERROR_FILE": self.error_file, "RINGDP_REPORT_FILE": self.report_file}
        if "RINGDP_DUMP_DIR" not in os.environ and not self.of_user:
            variables["RINGDP_DUMP_DIR"] = str(Path(self.error_file).parent)
        return variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: the folder; absolute, as a script may change its directory.
        kept: False where the user asked for no logs (--log-dir /dev/null): it is removed at the end.
        notice: a sentence for the user; or empty.
    """

    path: Path
    kept: bool = True
    notice: str = ""

    @property
    def shown(self) -> str:
        """The path for messages: relative where it is below the current directory."""
        return short_path(self.path)


def make_run_folder(*, log_dir: Path | None, script: str, several_hosts: bool) -> RunFolder:
    """Make the folder of this run.

    It is ``<date>_<time>_<script>`` in ``log_dir``, or in ``logs`` without one, followed by the host's name where there
    are several, as they may share a disk.

    Raises:
        OSError: the user's ``log_dir`` cannot be written.
    """
    if str(log_dir) == os.devnull:
        return RunFolder(path=temporary.make_folder("logs"), kept=False)
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{Path(script).stem}"
    if several_hosts:
        name += f"_{socket.gethostname()}"
    if log_dir is not None:
        return RunFolder(path=_make_unique(log_dir.absolute(), name))
    try:
        return RunFolder(path=_make_unique(DEFAULT_LOG_DIR.absolute(), name))
    except OSError as error:
        path = Path(tempfile.mkdtemp(prefix="ringdp-logs-"))
        return RunFolder(path=path, notice=f"cannot write to ./{DEFAULT_LOG_DIR} ({error.strerror}), see --log-dir")


def short_path(path: str | Path) -> str:
    """Relative to the current directory where it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def remove_run_folder(folder: RunFolder) -> None:
    """Remove a folder that was not meant to be kept."""
    if not folder.kept:
        temporary.remove_folder(folder.path)


def _make_unique(parent: Path, name: str) -> Path:
    """Make ``parent/name``, or with -2, -3, … behind it where another run has it."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        return path


class _KnownLogsSpecs(LogsSpecs):
    """Knows the files of the ranks of the present attempt, and has a folder for each of them.

    Args:
        folder: the run's folder.
        started: called before the ranks of an attempt start, with the environment of one of them.
    """

    def __init__(self, folder: Path, started: Callable[[list[RankLogs], Mapping[str, str]], None]) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._started = started
        self._ranks: dict[int, RankLogs] = {}

    def logs_of(self, local_rank: int) -> RankLogs:
        """Those of the process with which the rank began."""
        return self._ranks[local_rank]

    def _make_folder(self, envs: Mapping[int, Mapping[str, str]]) -> Path:
        # A change of membership starts the ranks again under the same count; the earlier logs stay.
        count = envs[min(envs)].get("TORCHELASTIC_RESTART_COUNT", "0")
        attempt = _make_unique(self._folder, f"attempt_{count}")
        for local_rank in envs:
            (attempt / str(local_rank)).mkdir()
        return attempt

    def _begin(self, ranks: Sequence[RankLogs], envs: dict[int, dict[str, str]]) -> None:
        self._ranks = {logs.local_rank: logs for logs in ranks}
        for logs in ranks:
            environ = envs[logs.local_rank]
            whole = {**os.environ, **environ}
            environ[inheritance.MARK] = inheritance.mark(whole, pid=0, rank=logs.rank, world_size=len(envs), meet=None)
        self._started(list(ranks), envs[min(envs)])


class UsersLogsSpecs(_KnownLogsSpecs):
    """A user's (--logs-specs), of which the launcher notes the files. What that chooses to keep nowhere is not known.

    Args:
        users: the user's.
    """

    def __init__(
        self,
        users: LogsSpecs,
        *,
        folder: Path,
        started: Callable[[list[RankLogs], Mapping[str, str]], None],
    ) -> None:
        super().__init__(folder, started)
        self._users = users

    @property
    def root_log_dir(self) -> str:
        return self._users.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The user's; torch calls this before it starts the ranks."""
        dest = self._users.reify(envs)
        attempt = self._make_folder(envs)

        def known(files: Mapping[int, str], local_rank: int) -> str:
            path = files.get(local_rank) or ""
            return "" if path == os.devnull else path

        ranks = [
            RankLogs(
                rank=int(environ["RANK"]),
                local_rank=local_rank,
                stdout=known(dest.stdouts, local_rank),
                stderr=known(dest.stderrs, local_rank),
                error_file=known(dest.error_files, local_rank),
                report_file=str(attempt / str(local_rank) / "report.json"),
                of_user=True,
            )
            for local_rank, environ in sorted(envs.items())
        ]
        for logs in ranks:
            envs[logs.local_rank]["RINGDP_REPORT_FILE"] = logs.report_file
        self._begin(ranks, envs)
        return dest


class RankLogsSpecs(_KnownLogsSpecs):
    """Assigns the log files of each rank's streams, for torch's elastic agent and for the display.

    All streams go to files, which the supervisor reads: a rank never waits for a slow console, and its last output is
    kept even where the launcher is killed. The one exception is a stream that is shown as it comes on a
    terminal: that rank gets a pseudo-terminal, so that it sees a terminal as it would without a launcher.
    """

    def __init__(
        self,
        *,
        folder: Path,
        views: Views,
        terminals: Mapping[Stream, str],
        tail_for_filters: bool,
        started: Callable[[list[RankLogs], Mapping[str, str]], None],
    ) -> None:
        """
        Args:
            folder: the run's folder.
            views: the streams that the console shows.
            terminals: path of the pseudo-terminal by stream, where there is one.
            tail_for_filters: torch is to read the teed files itself, for --duplicate-stdout-filters.
            started: called before the ranks of an attempt start, with the environment of one of them.
        """
        super().__init__(folder, started)
        self._views = views
        self._terminals = terminals
        self._tail_for_filters = tail_for_filters

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt; torch calls this before it starts the ranks."""
        attempt = self._make_folder(envs)
        ranks: list[RankLogs] = []
        paths: dict[Stream, dict[int, str]] = {"stdout": {}, "stderr": {}}
        teed: dict[Stream, dict[int, str]] = {"stdout": {}, "stderr": {}}
        for local_rank, environ in sorted(envs.items()):
            rank = int(environ["RANK"])
            folder = attempt / str(local_rank)
            through_terminal: list[Stream] = []
            for stream in STREAMS:
                log = str(folder / f"{stream}.log")
                view = self._views.of(rank=rank, local_rank=local_rank, local_world_size=len(envs), stream=stream)
                if view.mode is Mode.RAW and stream in self._terminals:
                    paths[stream][local_rank] = self._terminals[stream]
                    through_terminal.append(stream)
                else:
                    paths[stream][local_rank] = log
                if self._tail_for_filters and self._views.teed(
                    local_rank=local_rank, local_world_size=len(envs), stream=stream
                ):
                    teed[stream][local_rank] = log
            one_terminal = len(through_terminal) == 2 and len(set(self._terminals.values())) == 1
            if one_terminal:
                (folder / "stderr.log").symlink_to("stdout.log")
            logs = RankLogs.inside(folder, rank=rank, local_rank=local_rank, terminals=tuple(through_terminal))
            logs = dataclasses.replace(logs, one_terminal=one_terminal)
            environ.update(logs.variables())
            ranks.append(logs)
        self._begin(ranks, envs)
        return LogsDest(
            stdouts=paths["stdout"],
            stderrs=paths["stderr"],
            tee_stdouts=teed["stdout"],
            tee_stderrs=teed["stderr"],
            error_files={logs.local_rank: logs.error_file for logs in ranks},
            filtered_stdout=str(attempt / "filtered_stdout.log"),
            filtered_stderr=str(attempt / "filtered_stderr.log"),
        )
