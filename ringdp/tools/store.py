"""``python -m ringdp store``: keeps the store of an elastic job on a host of its own, which outlives the others."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
from typing import Any

from ringdp.config import STORE_KEPT

_ABOUT = (
    "Keep the store in which the launchers and ranks of an elastic job meet and agree, so that the job goes on without "
    "any of its hosts: ringrun --elastic --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME. "
    "One store for each job. It listens on all addresses, without a password: only on a network that you trust. Ends "
    "by SIGTERM or Ctrl-C."
)


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "store", help="the store of an elastic job, on a host that outlives the job's", description=_ABOUT
    )
    parser.add_argument("--port", type=int, default=29400, help="to listen on; 0: any free one (default 29400)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Keep it until a signal ends it; the exit code."""
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        store = TCPStore("0.0.0.0", args.port, None, True, wait_for_workers=False)
    except DistNetworkError as error:
        sys.stderr.write(f"ringdp: no store on port {args.port}: {str(error).splitlines()[0]}\n")
        return 1
    store.set(STORE_KEPT, "")
    sys.stdout.write(f"ringdp: the store of one job, at {socket.gethostname()}:{store.port}\n")
    sys.stdout.flush()
    over.wait()
    return 0
