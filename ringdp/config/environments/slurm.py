"""Slurm's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringdp.config.environments.environment import (
    LaunchEnvironment,
    meeting_point,
    optional_integer,
    require_all,
    whole_number,
)

# srun sets these in a job step; a batch script, which runs as one process, has SLURM_PROCID and SLURM_NTASKS too.
_SLURM_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
COUNTS = None  # the variables that count ranks are lists of all hosts


def started(environ: Mapping[str, str]) -> bool:
    """Whether this family started the process."""
    return "SLURM_PROCID" in environ and any(name in environ for name in _SLURM_STEP)


def read(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place that the variables say. Raises InvalidArgumentError, as `launch_environment`."""
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID")
    require_all(environ, names)
    rank, world_size, local_rank = (whole_number(name, environ[name]) for name in names)
    local_size = _slurm_local_size(environ)
    nodes = optional_integer(environ, "SLURM_STEP_NUM_NODES") or optional_integer(environ, "SLURM_NNODES")
    if nodes is None:
        listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
        nodes = 2 if re.search(r"[,\[]", listed) else 1  # two or more: the names are for Slurm to read
    return LaunchEnvironment(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size if local_size is not None or nodes > 1 else world_size,
        init_method=meeting_point(
            environ,
            one_host=nodes == 1,
            job=f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}".strip("."),
            first_host=_first_host(environ),
            advice='before srun, export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            " and MASTER_PORT=<free port>",
        ),
    )


def forgotten(environ: Mapping[str, str]) -> str | None:
    """The warning for a process inside a job of several tasks that srun did not start; None elsewhere."""
    tasks = optional_integer(environ, "SLURM_NTASKS") or 1
    if "SLURM_JOB_ID" not in environ or tasks == 1 or started(environ):
        return None
    return (
        f"this is one process in a Slurm job of {tasks} tasks (SLURM_NTASKS), which srun did not start: it trains"
        " alone, as one rank. Start the ranks with srun: srun python train.py"
    )


def _first_host(environ: Mapping[str, str]) -> str:
    """Rank 0's host: the first of the step. Never SLURM_LAUNCH_NODE_IPADDR, from where srun was called."""
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return ""  # the list is sorted, and rank 0 may be on any of them
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    # gpu[08-09,12],box3 is gpu08, gpu09, gpu12, box3; there may be several brackets in a name.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """This node's entry in a list like ``2(x3),1``, or what --ntasks-per-node said."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = optional_integer(environ, "SLURM_NODEID")
    if node is not None and re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        counts = [n for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
        if 0 <= node < len(counts):
            return int(counts[node])
    return optional_integer(environ, "SLURM_NTASKS_PER_NODE")
