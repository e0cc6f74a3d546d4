"""Private folders of a launcher (0700) in the system's temporary folder. Those of launchers that were killed are
removed by the user's next launcher.

A lock on a file in the folder says that its launcher lives, also to those in other containers that have this folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "ringdp-"
_LOCK = "launcher-lives"
_held: dict[Path, int] = {}  # the descriptors that have the locks


def make_folder(purpose: str) -> Path:
    """``ringdp-<purpose>-…``, until `remove_folder`, or until this process has ended and another launcher begins.

    Raises:
        OSError: the temporary folder cannot be written.
    """
    _remove_those_of_the_dead()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
    made = path / f"{_LOCK}.new"
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: it stays if this process is killed
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(path / _LOCK)  # locked before others look at it
    _held[path] = descriptor
    return path


def remove_folder(path: Path) -> None:
    """Remove a folder of `make_folder`, if it is still there."""
    shutil.rmtree(path, ignore_errors=True)
    if (descriptor := _held.pop(path, None)) is not None:
        os.close(descriptor)


def _remove_those_of_the_dead() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of another user, of one that lives, or removed meanwhile
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.lstat(lock.parent).st_uid == os.getuid():
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
