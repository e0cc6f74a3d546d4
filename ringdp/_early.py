"""Runs in the launcher before ringdp imports torch, which takes seconds: keeps signals that are for its ranks."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence

RANK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def hold() -> None:
    """Keep `RANK_SIGNALS` until `release` delivers those that came to their handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)


def release() -> None:
    """Deliver the signals that `hold` kept; called when there are handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RANK_SIGNALS)


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a command line, with the interpreter and its flags, starts the launcher."""
    for number, word in enumerate(words[1:], 1):
        if word == "-m":
            return words[number + 1 : number + 2] in (["ringdp.launch"], ["ringdp.launcher"])
        if not word.startswith("-"):
            return os.path.basename(word) == "ringrun"
    return False


def is_command(words: Sequence[str]) -> bool:
    """Whether this process is ringrun or ``python -m ringdp…``, whose errors are lines for a user. `words`: its command
    line, sys.orig_argv."""
    if is_launcher(words):
        return True
    return any(flag == "-m" and name.partition(".")[0] == "ringdp" for flag, name in itertools.pairwise(words[:4]))
