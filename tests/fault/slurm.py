"""A Slurm cluster of the test's own: two hosts as network namespaces, munged, slurmctld and two slurmd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault import hosts

_PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
_CONF = """\
ClusterName=test
SlurmctldHost=n1({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeAddr={first} CPUs={cpus}
NodeName=n2 NodeAddr={second} CPUs={cpus}
PartitionName=all Nodes=n1,n2 Default=YES OverSubscribe=NO
"""


def why_not() -> str | None:
    """What stands in the way, in words; None when nothing does."""
    for program, package in _PROGRAMS.items():
        if _which(program) is None:
            return f"{program} is not installed (apt-get install {package})"
    return hosts.why_not()


class Cluster:
    """The cluster while `with` lasts; `run` is what a user types on its first host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lab = hosts.Lab(2)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        self._lab.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):  # nothing of theirs is to be kept
            daemon.kill()
            daemon.wait()
        for space in self._lab.spaces:  # slurmstepd outlives slurmd
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
            for pid in map(int, listed.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._lab.__exit__()

    def run(self, *words: str | Path, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """A command on the first host, with its output."""
        foreign = ("SLURM_", "RINGDP_", "MASTER_", "OMP_", "MKL_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return subprocess.run(
            [*self._lab.on(0), *map(str, words)],
            cwd=self.folder,
            env=clean | {"SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def batch(self, command: str, *flags: str) -> str:
        """What a batch script of one line printed. `sbatch --wait` would look every ten seconds."""
        out, end = self.folder / "batch.out", self.folder / "batch.end"
        end.unlink(missing_ok=True)
        done = self.run("sbatch", *flags, "-o", out, "--wrap", f"{command}; touch {end}")
        assert done.returncode == 0, done.stderr
        self._await(end.exists, "the batch script")
        return out.read_text()

    def logs(self) -> str:
        """What the daemons said last."""
        return "\n".join(f"{it.name}: {it.read_text()[-1500:]}" for it in sorted(self.folder.glob("*.log")))

    def _start(self) -> None:
        first, second = "10.87.0.1", "10.87.0.2"
        self._lab.link("eth0", ["10.87.0.{}/24"])
        self._lab.named(self.folder, {"n1": first, "n2": second})
        (self.folder / "state").mkdir()
        conf = self.folder / "slurm.conf"
        conf.write_text(_CONF.format(folder=self.folder, first=first, second=second, cpus=os.cpu_count()))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._daemon(0, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        self._await(lambda: _answers(self.folder / "munge.socket"), "munged")
        self._daemon(0, "slurmctld", "-D", "-f", str(conf))
        for host in (0, 1):
            (self.folder / f"spool-n{host + 1}").mkdir()
            self._daemon(host, "slurmd", "-D", "-f", str(conf))
        self._await(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2", "two idle nodes")

    def _daemon(self, host: int, program: str, *words: str) -> None:
        path = _which(program)
        assert path is not None
        command = [*self._lab.on(host), path, *words]
        self._daemons.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 30
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"waited 30 s for {what}:\n{self.logs()}")
            time.sleep(0.1)


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as it:
        try:
            it.connect(str(path))
        except OSError:
            return False
    return True
