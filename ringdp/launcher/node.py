"""The launcher on one host of several, started by another launcher over ssh: ``python -m ringdp.launcher.node``."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from typing import Any, NoReturn

from ringdp.launcher import reach
from ringdp.launcher.tether import MARK, Ask, Hello, Orders, Reached, Tether, line


def main() -> int:
    """Answer, wait for orders, carry them out; returns the exit code."""
    commands = _take_stdin()
    ask, rest = _read(commands, b"")
    if ask is None:
        return 1
    answer = hello(Ask(**ask))
    _say(answer)
    if answer.problem is not None:
        return 1
    content, rest = _read(commands, rest)
    listener = None
    while content is not None and "arguments" not in content:
        if "listen" in content:
            listener = reach.listen(content["listen"])
            _say(Reached(why=""))
        else:
            _say(Reached(why=reach.why_not(*content["reach"])))
        content, rest = _read(commands, rest)
    if listener is not None:
        listener.close()
    if content is None:  # another host cannot take part
        return 0
    orders = Orders(**content)
    os.environ.update(orders.environ)
    os.set_blocking(commands, False)
    from ringdp.launcher import supervisor

    return supervisor.launch(orders.arguments, given_secret=orders.secret, tied=Tether(commands, rest))


def hello(ask: Ask) -> Hello:
    """Whether this host can take part."""
    problem = None
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    try:
        os.chdir(ask.folder)
    except OSError as error:
        problem = f"the folder {ask.folder}: {error.strerror}"
    if problem is None and ask.script is not None and not os.path.exists(ask.script):
        problem = f"the script {ask.script} is not there (in {ask.folder})"
    try:
        import torch

        import ringdp

        versions |= {"torch": torch.__version__.partition("+")[0], "ringdp": ringdp.__version__}
    except Exception as error:
        problem = problem or f"{type(error).__name__}: {error}"
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return Hello(
        problem=problem,
        host=socket.gethostname(),
        versions=versions,
        address=connection[2] if len(connection) == 4 else "",
        seen=connection[0] if len(connection) == 4 else "",
        port=_free_port(),
    )


def _free_port() -> int:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _take_stdin() -> int:
    """A copy of the descriptor of standard input, which itself becomes /dev/null for the ranks that inherit it."""
    commands = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return commands


def _read(descriptor: int, rest: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """The next line that is not empty, and the bytes behind it; None at the end."""
    while True:
        found, newline, behind = rest.partition(b"\n")
        if newline:
            rest = behind
            if content := json.loads(found):
                return content, rest
            continue
        data = os.read(descriptor, 65536)
        if not data:
            return None, b""
        rest += data


def _say(content: Any) -> None:
    sys.stderr.write(MARK + line(content).decode())
    sys.stderr.flush()


def _end() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _end()
