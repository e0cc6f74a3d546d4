"""--metrics-dir, --metrics-port, --tensorboard: the agent sets them up for its ranks before it starts them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def begin(args: argparse.Namespace, run_folder: Path) -> None:
    """Set the ranks' variables, and serve their metrics for as long as this process lives.

    Raises:
        OSError: the folder cannot be made.
        SystemResourceError: the port cannot be had.
    """
    if args.metrics_dir is None and args.metrics_port is None:
        return
    folder = run_folder / "metrics" if args.metrics_dir is None else Path(args.metrics_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RINGDP_METRICS_DIR"] = str(folder)
    if args.tensorboard:
        os.environ["RINGDP_TENSORBOARD"] = "1"
    if args.metrics_port is not None:
        from ringdp.diagnosis.exporter import serve  # with torch, which this process has by now

        serve(folder, args.metrics_port)
