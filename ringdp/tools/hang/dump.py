"""``python -m ringdp dump``: has running ranks write their last operations and their stacks."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ringdp.tools.hang.dump_files import read_note

THREAD = "ringdp-dump"
"""The thread of a process that writes dumps (csrc/engine/diagnosis.cpp)."""

_SIGNAL_BELOW_LAST = 6  # csrc/base/signal_bell.cpp
_DESCRIPTION = """\
Let running ranks write their last operations and their stacks, beside their logs.

  python -m ringdp dump logs/2026-11-24_10-12-00_train      all ranks of that run on this host
  python -m ringdp dump 4711 4712                           these processes
  kill -USR1 4711                                           the same, where the script has no handler of its own

The ranks go on. On several hosts call it on each. Then: python -m ringdp explain DIR
"""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "dump",
        help="let running ranks write their operations and stacks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="+", metavar="PID|DIR", help="processes, or folders of runs")
    parser.add_argument("--wait", type=float, default=3.0, metavar="S", help="seconds to wait for the files (3)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Signal the processes and wait for their files; 1 where one did not write."""
    code = 0
    for target in args.targets:
        for pid, folder in _processes(target):
            files = _files_of(pid, folder) if folder else ""
            before = _times(folder, files) if folder else {}
            problem = ask(pid)
            if problem is None and folder is not None and not _appears(folder, files, before, args.wait):
                problem = (
                    f"process {pid} has written no new file ({files}) in {folder} within {args.wait:g} s: is it"
                    " stopped, or the folder full or not writable?"
                )
            if problem is not None:
                code = 1
                sys.stderr.write(f"python -m ringdp dump: {problem}\n")
            elif folder is not None:
                sys.stdout.write(f"pid {pid}: {_newest(folder, files)}\n")
            else:
                sys.stdout.write(f"pid {pid}: asked; the file lies in its RINGDP_DUMP_DIR\n")
        if not _processes(target):
            code = 1
            sys.stderr.write(f"python -m ringdp dump: {_why_none(target)}\n")
    return code


def ask(pid: int) -> str | None:
    """Ask a process for a dump; the reason for which it was not asked, or None. The signal would kill a process without
    a handler."""
    try:
        names = {Path(f"/proc/{pid}/task/{task}/comm").read_text().strip() for task in os.listdir(f"/proc/{pid}/task")}
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"no process {pid} on {socket.gethostname()}"
    number = signal.SIGRTMAX - _SIGNAL_BELOW_LAST
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    if THREAD not in names or not caught >> (number - 1) & 1:
        return (
            f"process {pid} writes no dumps: it is not a rank of ringdp, or was started without ringrun and"
            " without RINGDP_DUMP_DIR"
        )
    try:
        os.kill(pid, number)
    except OSError as error:
        return f"process {pid} cannot be asked: {error.strerror}"
    return None


def _processes(target: str) -> list[tuple[int, Path | None]]:
    """(pid, folder of its dumps) of a pid, or of the living ranks of this host whose notes lie below a folder."""
    if target.isdigit():
        return [(int(target), _folder_of(int(target)))]
    found: list[tuple[int, Path | None]] = []
    for note in sorted(Path(target).rglob("process_rank*.json")):
        pid, host = read_note(note) or (0, "")
        here = host == socket.gethostname() and Path(f"/proc/{pid}").exists()
        if here and _folder_of(pid) in (None, note.parent.resolve()):
            found.append((pid, note.parent))
    return found


def _folder_of(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if item.startswith(b"RINGDP_DUMP_DIR="):
                return Path(os.fsdecode(item.partition(b"=")[2])).resolve()
    return None


def _why_none(target: str) -> str:
    notes = list(Path(target).rglob("process_rank*.json"))
    if not notes:
        return f"{target} is neither a pid nor a folder with notes of ranks (process_rank*.json)"
    hosts = {host for _, host in filter(None, map(read_note, notes))}
    here = socket.gethostname()
    if here in hosts:
        return f"the ranks of {target} on {here} have ended: python -m ringdp explain {target} says how"
    return f"the ranks of {target} run on {', '.join(sorted(hosts))}, not on {here}: call this there"


def _files_of(pid: int, folder: Path) -> str:
    """A pattern: several ranks may write into one folder."""
    for note in folder.glob("process_rank*.json"):
        if (who := read_note(note)) is not None and who[0] == pid:
            return f"dump_{note.stem.removeprefix('process_')}_*.json"
    return "dump_rank*.json"


def _newest(folder: Path, files: str) -> Path:
    return max(folder.glob(files), key=lambda path: path.stat().st_mtime_ns)


def _times(folder: Path, files: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob(files) if path.exists()}


def _appears(folder: Path, files: str, before: dict[Path, int], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        now = _times(folder, files)
        if now and now != before:
            time.sleep(0.7)  # it is written again with the stacks
            return True
        time.sleep(0.02)
    return False
