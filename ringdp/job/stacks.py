"""The stacks of this process's threads, as dumps and other ranks' stall notices show them."""

from __future__ import annotations

import faulthandler
import linecache
import os
import signal
import sys
import sysconfig
import threading
from types import FrameType
from typing import Any

_SIGNAL_BELOW_LAST = 8  # SIGRTMAX minus so much, at which faulthandler writes stacks without Python's lock
_MOST_FRAMES = 40  # of a thread
_MOST_THREADS = 16
_HELPERS = ("multiprocessing.queues", "ringdp.diagnosis.", "tensorboard.", "torch.utils.data.", "tqdm.", "wandb.")

_installed = False


def install() -> None:
    """Let the extension ask for stacks; once a process, and nothing where that was done."""
    global _installed
    if _installed:
        return
    _installed = True
    from ringdp import _C

    number, file = _listen_without_lock()
    _C.set_stack_source(describe, helper_threads, number, file, foreign_paths())


def describe() -> str:
    """The stacks of all threads, the main thread's first, innermost frames first, in faulthandler's form."""
    frames = sys._current_frames()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    own = threading.get_ident()
    out: list[str] = []
    for ident in sorted(frames, key=lambda it: it != main)[:_MOST_THREADS]:
        if ident == own:
            continue
        thread = threads.get(ident)
        called = "Main thread" if ident == main else f"Thread {thread.name if thread else hex(ident)}"
        out += ["", f"{called} (most recent call first):", *_lines(frames[ident])]
    return "\n".join(out[1:]) + "\n"


def helper_threads() -> int:
    """The number of threads of libraries, which never call code of the program."""
    return sum(_begins_in(thread).startswith(_HELPERS) for thread in threading.enumerate())


def _begins_in(thread: threading.Thread) -> str:
    """The module of its class, or of the function that a plain thread runs."""
    module: Any = type(thread).__module__
    if module == "threading":
        module = getattr(getattr(thread, "_target", None), "__module__", None)
    return module if isinstance(module, str) else ""


def foreign_paths() -> list[str]:
    """Beginnings of the paths of code that is not the user's: Python's own, installed packages, ringdp."""
    import torch

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_paths()[name] for name in names}
    found |= {os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    return sorted(path + os.sep for path in found)


def _lines(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < 2 * _MOST_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        if source := linecache.getline(code.co_filename, frame.f_lineno or 0).strip():
            lines.append(f"    {source[:120]}")
        frame = frame.f_back
    return lines


def _listen_without_lock() -> tuple[int, int]:
    """A signal and a file at which faulthandler writes all stacks; (0, -1) where none is free."""
    number = signal.SIGRTMAX - _SIGNAL_BELOW_LAST
    if signal.getsignal(number) != signal.SIG_DFL:
        return 0, -1
    try:
        file = os.memfd_create("ringdp-stacks")
        faulthandler.register(number, file=file, all_threads=True)
    except (OSError, RuntimeError, AttributeError):
        return 0, -1
    return int(number), file
