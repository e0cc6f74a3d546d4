"""The file with the job's secret, which RINGDP_SECRET_FILE names."""

from __future__ import annotations

import os
import re
import stat

from ringdp.errors import InvalidArgumentError, SystemResourceError

_HEX_SECRET = re.compile(rb"[0-9a-fA-F]{64}")


def read_secret(path: str) -> bytes:
    """The 32 bytes of the job's secret in the file at ``path`` (64 hexadecimal characters).

    Raises:
        SystemResourceError: the file is not there or cannot be read.
        InvalidArgumentError: it is not a regular file, others may read it, or its contents are not a secret.
    """
    make = f"make one with: (umask 077; openssl rand -hex 32 > {path})"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SystemResourceError(f"RINGDP_SECRET_FILE={path}: {error.strerror}; {make}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgumentError(f"RINGDP_SECRET_FILE={path} is not a regular file; {make}")
        if status.st_mode & 0o077:
            raise InvalidArgumentError(
                f"RINGDP_SECRET_FILE={path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may read"
                f" the secret: chmod 600 {path}, and make a new secret if this host is shared"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise InvalidArgumentError(
                f"RINGDP_SECRET_FILE={path} belongs to user {status.st_uid}, not to you (user {os.geteuid()})"
            )
        content = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if not _HEX_SECRET.fullmatch(content):
        # The content itself is never shown: it may be most of a secret.
        raise InvalidArgumentError(
            f"RINGDP_SECRET_FILE={path} holds {len(content)} characters where 64 hexadecimal ones are expected; {make}"
        )
    return bytes.fromhex(content.decode())
