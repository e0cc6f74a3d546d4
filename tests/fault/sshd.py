"""An sshd on loopback, of the test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


@contextlib.contextmanager
def sshd(
    folder: Path, *, address: str = "127.0.0.1", port: int | None = None, prefix: Sequence[str] = ()
) -> Iterator[str]:
    """The ssh command that reaches it; it stays out of the way of the user's own keys and settings.

    Args:
        folder: where its keys are made.
        address, port: where it listens; without a port, a free one.
        prefix: what starts it somewhere else, another host.
    """
    binary = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if binary is None or os.geteuid() != 0:
        pytest.skip("needs openssh-server, and root to run it")
    folder.mkdir(mode=0o700, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        if not (folder / name).exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    config = folder / f"config-{address}-{port}"
    config.write_text(
        f"ListenAddress {address}\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"UsePAM no\nStrictModes no\nPidFile none\nAcceptEnv LAUNCH_TEST_MARK\n"
    )
    words = [*prefix, binary, "-D", "-e", "-f", str(config)]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    end = time.monotonic() + 10
    while "listening on" not in (line := server.stderr.readline()):
        assert line, "sshd did not start"
        assert time.monotonic() < end
    options = f"-F none -p {port} -i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    try:
        yield f"ssh -o LogLevel=ERROR -o BatchMode=yes -o SendEnv=LAUNCH_TEST_MARK {options}"
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
