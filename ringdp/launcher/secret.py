"""The job's secret: 64 hexadecimal characters in a file that only its owner can read.

Ranks learn the path from RINGDP_SECRET_FILE. The secret itself is never in an argument or in the environment,
which other users can read in /proc or which end up in logs.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ringdp.launcher import temporary


def make_secret(given: str | None = None) -> Path:
    """Write a new secret, or the one given, into a private folder (0700) of its own; the file has mode 0600.

    Returns:
        The file; ``remove_secret`` removes it with its folder.

    Raises:
        OSError: the temporary folder cannot be written.
    """
    path = temporary.make_folder("secret") / "secret"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write((given or secrets.token_hex(32)) + "\n")
    return path


def remove_secret(path: Path) -> None:
    """Remove the file and folder of ``make_secret``, if they are still there."""
    temporary.remove_folder(path.parent)
