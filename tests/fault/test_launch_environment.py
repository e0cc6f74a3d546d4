"""What the ranks are given: torchrun's environment, a secret, threads, logs; and the flags mean the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fault.launch_jobs import LAUNCH, ROOT, TORCHRUN, Job, script
from tests.helpers import free_port

REPORT = """
    import glob, json, os, sys
    secret = os.environ.get("RINGDP_SECRET_FILE")
    report = {"environ": dict(os.environ), "argv": sys.argv, "umask": oct(os.umask(0o22)),
              "ignored": [line for line in open("/proc/self/status") if line.startswith(("SigIgn", "SigBlk"))],
              "descriptors": sorted(d for d in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + d))}
    if secret:
        report["secret"] = open(secret).read()
        report["secret_mode"] = os.stat(secret).st_mode
        report["folder_mode"] = os.stat(os.path.dirname(secret)).st_mode
        commands = b""
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                commands += open(path, "rb").read() + b"\\n"
            except OSError:
                pass
        report["secret_in_a_command"] = report["secret"].strip().encode() in commands
        report["secret_in_the_environment"] = report["secret"].strip() in os.environ.values()
    json.dump(report, open("report" + os.environ["RANK"], "w"))
    print("out of", os.environ["RANK"])
    print("err of", os.environ["RANK"], file=sys.stderr)
"""

SAME_AS_TORCHRUN = [
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
]  # fmt: skip
DIFFERENT = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
OURS = {"RINGDP_SECRET_FILE", "RINGDP_REPORT_FILE", "RINGDP_DUMP_DIR", "RINGDP_RANK_PROCESS", "OMP_NUM_THREADS"}


def run(jobs: list[Job], folder: Path, *arguments: str | Path, **options: Any) -> Job:
    folder.mkdir(exist_ok=True)
    job = Job(folder, *arguments, **options)
    jobs.append(job)
    code = job.wait()
    assert code == 0, job.err
    return job


def reports(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"report{rank}").read_text()) for rank in range(ranks)]


def test_the_same_script_sees_the_same_under_torchrun(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, REPORT)
    flags = ("--standalone", "--nproc-per-node=2", "--role=trainer", "--max-restarts=2", path, "--lr", "0.1")
    environ = {"OMP_NUM_THREADS": "", "TMPDIR": str(tmp_path), "LOGLEVEL": ""}
    theirs = run(jobs, tmp_path / "torchrun", *flags, command=TORCHRUN, environ=environ)
    ours = run(jobs, tmp_path / "ringrun", *flags, command=LAUNCH, environ=environ)
    for expected, actual in zip(reports(theirs.folder), reports(ours.folder), strict=True):
        wanted, found = expected["environ"], actual["environ"]
        assert {name: wanted[name] for name in SAME_AS_TORCHRUN} == {name: found[name] for name in SAME_AS_TORCHRUN}
        added = {name for name in found if name not in wanted or wanted[name] != found[name]}
        assert added - DIFFERENT - OURS - {"LAUNCH_TEST_MARK", "PWD", "_"} == set()
        assert set(wanted) <= set(found)
        for aspect in ("argv", "umask", "ignored", "descriptors"):
            assert actual[aspect] == expected[aspect], aspect

    first, second = reports(ours.folder)
    assert len(bytes.fromhex(first["secret"])) == 32
    assert first["secret"] == second["secret"]
    assert stat.S_IMODE(first["secret_mode"]) == 0o600
    assert stat.S_IMODE(first["folder_mode"]) == 0o700
    assert not first["secret_in_a_command"]
    assert not first["secret_in_the_environment"]
    assert not os.path.exists(first["environ"]["RINGDP_SECRET_FILE"])
    assert list(tmp_path.glob("ringdp-*")) == []

    # The console has rank 0, the logs have everybody, and nobody warns.
    assert ours.out == "out of 0\n"
    greeting, *rest, last = ours.err.splitlines()
    assert "ranks 0-1 of 2" in greeting
    assert rest == ["err of 0"]
    assert re.fullmatch(r"ringrun: finished after [\d.]+ s, logs in logs/\S+_script", last)
    for rank in range(2):
        folder = ours.run_folder() / "attempt_0" / str(rank)
        assert (folder / "stdout.log").read_text() == f"out of {rank}\n"
        assert (folder / "stderr.log").read_text() == f"err of {rank}\n"


def test_flags_of_torchrun_and_pet_variables(tmp_path: Path, jobs: list[Job]) -> None:
    """-m, --log-dir, --tee, --redirects, --local-ranks-filter, PET_NPROC_PER_NODE, and threads as the user set them."""
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", REPORT, name="program.py")
    job = run(
        jobs,
        tmp_path,
        *("-m", "--log-dir", "mine", "--tee", "0:1,1:3", "--redirects", "0:2", "--local-ranks-filter", "0,1"),
        *("package.program", "--flag"),
        command=(sys.executable, "-m", "ringdp.launch"),
        environ={"PET_NPROC_PER_NODE": "3", "OMP_NUM_THREADS": "7", "PYTHONPATH": os.pathsep.join(paths())},
    )
    assert sorted(job.out.splitlines()) == ["[default0]:out of 0", "[default1]:out of 1"]
    assert job.err.splitlines()[1:-1] == ["[default1]:err of 1"]
    (folder,) = (tmp_path / "mine").iterdir()
    assert (folder / "attempt_0" / "2" / "stderr.log").read_text() == "err of 2\n"
    third = reports(tmp_path, 3)[2]
    assert third["environ"]["OMP_NUM_THREADS"] == "7"
    assert third["environ"]["WORLD_SIZE"] == "3"
    assert third["argv"][1:] == ["--flag"]


def test_run_path_runs_in_the_launchers_interpreter(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, REPORT)
    job = run(jobs, tmp_path, "--nproc-per-node", "1", "--run-path", "--console", "all", path)
    assert job.out == "[rank 0] out of 0\n"
    assert "[rank 0] err of 0" in job.err.splitlines()


def test_a_secret_for_several_hosts(tmp_path: Path, jobs: list[Job]) -> None:
    """Two launchers as on two hosts: both get the file's secret; without one, none (rank 0 publishes its own)."""
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32 + "\n")
    secret.chmod(0o600)
    path = script(tmp_path, REPORT)
    port = free_port()
    flags = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--secret-file", secret)
    both = [Job(folder(tmp_path / f"host{n}"), *flags, "--node-rank", str(n), path) for n in range(2)]
    jobs.extend(both)
    assert [job.wait() for job in both] == [0, 0]
    for rank, job in enumerate(both):
        report = json.loads((job.folder / f"report{rank}").read_text())
        assert report["secret"] == secret.read_text()
        assert report["environ"]["RINGDP_SECRET_FILE"] == str(secret)
    assert secret.exists()
    # Rank 0 is not on the second host, whose console has nothing but errors.
    assert both[1].out == ""
    assert both[1].err.splitlines()[0].startswith("ringrun: rank 1 of 2")


def test_a_bad_secret_file_is_refused_in_words(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o644)
    result = subprocess.run(
        [*LAUNCH, "--secret-file", str(secret), "script.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 2
    assert "0644" in result.stderr
    assert "chmod 600" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "logs").exists()


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def paths() -> list[str]:
    root = str(Path(__file__).parents[2])
    return [root, *filter(None, [os.environ.get("PYTHONPATH")])]


@pytest.mark.ci
def test_a_host_without_names(tmp_path: Path, jobs: list[Job]) -> None:
    """A bare container: no /etc/hosts, so neither localhost nor its own name means anything, and no name server."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare (apt-get install util-linux)")
    (tmp_path / "empty").touch()
    (tmp_path / "resolv").write_text("nameserver 127.0.0.1\n")
    binds = f"mount --bind {tmp_path}/empty /etc/hosts && mount --bind {tmp_path}/resolv /etc/resolv.conf"
    bare = ["unshare", "--mount", "--uts", "sh", "-c", f'{binds} && hostname bare-box && exec "$@"', "sh"]
    program = "import torch, ringdp; ringdp.init(); t = torch.ones(1); torch.distributed.all_reduce(t); print(int(t))"
    path = script(tmp_path, f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}\n")
    jobs.append(Job(tmp_path, "-n", "2", path, command=[*bare, *LAUNCH]))
    assert jobs[-1].wait() == 0, jobs[-1].err
    assert jobs[-1].out == "2\n"
