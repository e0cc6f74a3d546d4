"""Dumps in the form of torch's flight recorder, for ``torchfrtrace`` and what else reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ringdp.tools.hang.dumps import Dump, Group, Job, Operation

VERSION = "2.10"  # of torch's format
PREFIX = "ringdp_trace_"
# Torch's reader refuses names of backends that it does not know, ring among them.
_BACKEND = "gloo"
_STATES = {"queued": "scheduled", "started": "started", "failed": "started", "done": "completed"}


def write(job: Job, folder: Path) -> list[Path]:
    """Write a file for each rank's dump: ``ringdp_trace_<rank>``. Messages and what callbacks issued are left out:
    torch pairs operations by their order. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank, dump in job.dumps.items():
        path = folder / f"{PREFIX}{rank}"
        path.write_bytes(pickle.dumps(_trace(dump, job)))
        paths.append(path)
    return paths


def _trace(dump: Dump, job: Job) -> dict[str, Any]:
    names = _names(dump)
    return {
        "version": VERSION,
        "pg_config": {
            names[group.id]: {
                "name": names[group.id],
                "desc": _description(group, job),
                "ranks": str(list(group.members)),
            }
            for group in dump.groups.values()
        },
        "pg_status": {},
        "entries": [
            _entry(it, dump.groups[it.group], names[it.group], _description(dump.groups[it.group], job))
            for it in dump.operations
            if it.order == "collective" and it.group in dump.groups and it.kind not in ("send", "recv")
        ],
    }


def _names(dump: Dump) -> dict[str, str]:
    """Of each group a name that no other has."""
    names = [group.name for group in dump.groups.values()]
    return {
        group.id: group.name if names.count(group.name) == 1 else f"{group.name}:{group.id}"
        for group in dump.groups.values()
    }


def _description(group: Group, job: Job) -> str:
    return "default_pg" if len(group.members) == job.world and group.name in ("0", "default_pg") else "undefined"


def _entry(it: Operation, group: Group, name: str, description: str) -> dict[str, Any]:
    size = len(group.members)
    inputs = [it.count * size] if it.kind == "reduce_scatter" else [it.count]
    outputs = [it.count * size] if it.kind == "all_gather" else [it.count]
    sizes: list[list[int]] = [[]] if it.kind == "barrier" else [inputs]
    return {
        "record_id": it.number,
        "pg_id": 0,
        "process_group": (name, description),
        "collective_seq_id": it.sequence,
        "p2p_seq_id": 0,
        "op_id": it.number,
        "profiling_name": f"{_BACKEND}:{it.kind}",
        "time_created_ns": it.queued_ns,
        "time_discovered_started_ns": it.started_ns or None,
        "time_discovered_completed_ns": it.ended_ns or None,
        "duration_ms": (it.ended_ns - it.started_ns) / 1e6 if it.ended_ns and it.started_ns else None,
        "input_sizes": sizes,
        "input_dtypes": [it.dtype],
        "output_sizes": sizes if it.kind == "barrier" else [outputs],
        "output_dtypes": [it.dtype],
        "state": _STATES.get(it.state, it.state),
        "retired": it.ended_well,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [_frame(line) for line in it.call_site.splitlines() if line],
    }


def _frame(line: str) -> dict[str, Any]:
    place, _, function = line.rpartition(" in ")
    path, _, number = place.rpartition(":")
    return {"name": function, "filename": path, "line": int(number) if number.isdigit() else 0}
