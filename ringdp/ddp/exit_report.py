"""The report that a rank which ends well writes for its launcher into RINGDP_REPORT_FILE: the number of its steps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os

from ringdp import config


@functools.cache
def report_at_exit() -> None:
    """Write the report when this process ends without an exception or a signal. The first RingDP calls it."""
    if (path := config.report_file()) is not None:
        atexit.register(_report, path, os.getpid())


def _report(path: str, pid: int) -> None:
    from ringdp import _C

    if os.getpid() != pid:  # a process that this one has forked
        return
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"steps": _C.most_steps()}, file)
