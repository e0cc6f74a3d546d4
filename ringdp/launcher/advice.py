"""The message to the user where torch's agent ends before the ranks have been started."""

from __future__ import annotations

import sys

from ringdp.launcher.arguments import Arguments
from ringdp.launcher.summary import duration
from ringdp.launcher.waiting import Waiting, unreachable_lines


def explain(error: BaseException, arguments: Arguments, waiting: Waiting | None) -> str:
    """The error with a remedy; the first line is a sentence for the user, torch's own text follows.

    Args:
        error: the exception that ended the agent.
        waiting: the rendezvous of the nodes; None on one host.
    """
    own = f"{type(error).__name__}: {error}".strip()
    args = arguments.torchrun
    if "EADDRINUSE" in own or "address already in use" in own.lower():
        port = arguments.meeting.port if arguments.meeting else args.master_port
        return (
            f"port {port} of this host is in use, perhaps by another job: choose another --master-port (or port of"
            f" --rdzv-endpoint), the same on all hosts\n{own}"
        )
    if isinstance(error, ValueError) and args.nproc_per_node in ("gpu", "xpu", "mtia") and "not available" in own:
        return (
            f"--nproc-per-node {args.nproc_per_node}: torch finds no such device on this host: give a number, or"
            f" auto or cpu; python -c 'import torch; print(torch.cuda.is_available())' says what it sees\n{own}"
        )
    if waiting is not None and arguments.meeting is not None and (seconds := waiting.seconds) is not None:
        problems = [] if waiting.connected or arguments.meeting.hosted_here else waiting.tried()
        tried = unreachable_lines(arguments.meeting, problems) if problems else []
        if waiting.connected and not arguments.meeting.hosted_here and "recv" in own:
            what = f"{arguments.meeting.host_name} ended before all nodes had come, {duration(seconds)} after this one"
        else:
            what = f"the nodes did not come together in {duration(seconds)}: {waiting.last or waiting.text()}"
            what += "; --rdzv-timeout SECONDS waits longer" if "timeout" in own.lower() else ""
        return "\n".join([what, *tried, *own.splitlines()[:3]])
    return own


def of_connection(name: str, output: str, code: int | None) -> str:
    """The output of a host's connection that ended before an answer, with a remedy.

    Args:
        name: the host, as the user names it.
        output: its output.
        code: the exit code; 255 is ssh's own.
    """
    if "No module named" in output or "not found" in output or "No such file" in output:
        return f"{output}: is ringdp installed there for {sys.executable}, the Python that runs this launcher?"
    if "Host key verification" in output:
        return f"{output}: ssh does not know this host yet, or its key has changed; once by hand: ssh {name}"
    if "Permission denied" in output:
        return f"{output}: ssh must get in without a password; once by hand: ssh-copy-id {name} (or a key in the agent)"
    return f"cannot be reached: {output}" if code == 255 else output
