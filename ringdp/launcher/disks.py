"""Disks that cannot be written: a rank whose output goes to a file there ends at its next print, without a message."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ringdp.launcher.logs import short_path

_PROBE_BYTES = 1 << 16
_WORDS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full: this user's quota is used up",
    errno.EROFS: "is read-only",
    errno.EIO: "has errors",
}


def trouble(folder: str | Path) -> str:
    """``the disk under logs is full (No space left on device)`` where nothing more can be written; else "".

    Writes 64 KiB and removes them: a quota does not show in statvfs(3).
    """
    path = Path(folder)
    probe = path / f".probe.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _text(path, error)
    try:
        left = bytes(_PROBE_BYTES)
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:
        return _text(path, error)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return ""


def _text(path: Path, error: OSError) -> str:
    words = _WORDS.get(error.errno or 0)
    return f"the disk under {short_path(path)} {words} ({error.strerror})" if words else ""


def troubles(folders: Mapping[str, str | Path | None]) -> list[str]:
    """A sentence for each of these that cannot be written, by what is kept there; one for each disk."""
    found: dict[int, str] = {}
    for what, folder in folders.items():
        if folder is None or not os.path.isdir(folder):
            continue
        device = os.stat(folder).st_dev
        if device not in found and (why := trouble(folder)):
            found[device] = f"{why}: {what} cannot be written there"
    return list(found.values())
