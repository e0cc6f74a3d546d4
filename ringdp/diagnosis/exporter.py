"""Serves the metrics of a host's ranks to Prometheus, from their metrics folder."""

from __future__ import annotations

import errno
import importlib.util
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringdp.diagnosis.metrics_folder import RankState, read
from ringdp.errors import InvalidArgumentError, SystemResourceError

PHASES = {"between": "between steps", "forward": "forward", "backward": "backward", "after": "optimizer"}
PHASES |= {"other_wait": "other operations", "exposed": "waiting at the end of backward"}
_log = logging.getLogger("ringdp.metrics")
_COUNTERS = {
    "ringdp_steps": ("step", "Steps that the rank has made."),
    "ringdp_skipped_steps": ("skipped", "Steps whose gradients were not finite."),
    "ringdp_sent_bytes": ("sent_bytes_total", "Bytes that the rank has sent."),
}
"""Their names end in _total where they are served."""
_GAUGES = {
    "ringdp_compression_ratio": ("ratio", "How many times smaller the gradients' codes are."),
    "ringdp_busbw_bytes_per_second": (
        "busbw_bytes_per_s",
        "Bandwidth of the gradients on a link (busbw of nccl-tests).",
    ),
    "ringdp_memory_bytes": ("memory_bytes", "Resident memory of the rank."),
    "ringdp_last_step_timestamp_seconds": ("time", "When the rank made its last step, since 1970."),
}


def check() -> None:
    """Raises InvalidArgumentError without the package prometheus_client."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise InvalidArgumentError("--metrics-port needs the package prometheus_client: pip install prometheus_client")


class Collector:
    """Reads the folder whenever Prometheus asks, on a thread for each question.

    A file that cannot be read does not hide the other ranks: it is served with the reason, and logged once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._logged: dict[Path, str] = {}  # why a file could not be read, as logged

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        failed: dict[Path, str] = {}
        states = self._read(failed) if self._folder.is_dir() else []
        labels = ["rank", "host"]
        families: dict[str, Any] = {
            name: GaugeMetricFamily(name, about, labels=labels) for name, (_, about) in _GAUGES.items()
        }
        for name, (_, about) in _COUNTERS.items():
            families[name] = CounterMetricFamily(name, about, labels=labels)
        steps = GaugeMetricFamily("ringdp_step_seconds", "The mean of the last 20 steps.", labels=labels)
        phase = GaugeMetricFamily(
            "ringdp_phase_seconds", "Where a step goes, the mean of 20.", labels=[*labels, "phase"]
        )
        waits = GaugeMetricFamily("ringdp_peer_wait_seconds", "Waiting for a slow rank.", labels=[*labels, "slow_rank"])
        logged = GaugeMetricFamily("ringdp_logged", "Values given to ringdp.metrics.log.", labels=[*labels, "name"])
        for one in states:
            who = [str(one.rank), str(one.last.get("host", ""))]
            for name, (key, _) in (_GAUGES | _COUNTERS).items():
                if isinstance(value := one.last.get(key), int | float):
                    families[name].add_metric(who, value)
            steps.add_metric(who, one.seconds("step"))
            for key, text in PHASES.items():
                phase.add_metric([*who, text], one.seconds(key))
            if "slow_peer" in one.last:
                waits.add_metric([*who, str(one.last["slow_peer"])], one.seconds("slow_peer"))
            for key, value in one.logged.items():
                logged.add_metric([*who, key], value)
        unread = GaugeMetricFamily(
            "ringdp_unreadable_file", "A rank's metrics that cannot be read.", labels=["file", "reason"]
        )
        for file, reason in failed.items():
            unread.add_metric([file.name, reason], 1)
        yield from (*families.values(), steps, phase, waits, logged, unread)

    def _read(self, failed: dict[Path, str]) -> list[RankState]:
        """Fills `failed` with the reason for each file that could not be read."""

        def unreadable(file: Path, error: OSError) -> None:
            failed[file] = error.strerror or str(error)

        states = read(self._folder, unreadable=unreadable)
        with self._lock:
            new = {file: reason for file, reason in failed.items() if self._logged.get(file) != reason}
            self._logged = dict(failed)
        for file, reason in new.items():
            _log.warning("metrics: %s cannot be read (%s); the other ranks are served without it", file, reason)
        return states


def serve(folder: Path, port: int) -> int:
    """Serve from now on, on a thread; the port, which is a free one for 0.

    Raises:
        InvalidArgumentError: without the package prometheus_client.
        SystemResourceError: the port cannot be had.
    """
    check()
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Collector(folder))
    try:
        server, _ = start_http_server(port, registry=registry)
    except OSError as error:
        why = "another program has it" if error.errno == errno.EADDRINUSE else error.strerror
        raise SystemResourceError(f"metrics cannot be served on port {port}: {why}; give another port") from error
    return int(server.server_port)
