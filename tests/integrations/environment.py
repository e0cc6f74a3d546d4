"""An environment of its own for the libraries, and jobs of several ranks inside it.

The libraries are large, and ringdp does not need them: they are installed when a test asks for them, into
build/integrations, whose Python also sees everything that this one has, torch above all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import site
import subprocess
import sys
import tempfile
import venv
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "integrations"
PYTHON = HOME / "bin" / "python"
STAMP = HOME / "installed.json"
REQUIREMENTS = ROOT / "requirements" / "integrations.txt"
JOB_TIMEOUT_S = 200.0


@cache
def python_with(*packages: str) -> Path:
    """The Python that has these lines of requirements/integrations.txt; the test is skipped where pip cannot get them.

    In CI that is a failure: the run there is what shows that they work.
    """
    HOME.parent.mkdir(exist_ok=True)
    with open(HOME.parent / "integrations.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = [line for line in _requirements() if re.split(r"[\[<>=!]", line)[0] in packages]
        assert len(wanted) == len(packages), f"requirements/integrations.txt lacks one of {packages}"
        installed = _installed()
        if missing := [line for line in wanted if line not in installed]:
            _install(missing)
            STAMP.write_text(json.dumps({"base": _base(), "installed": installed + missing}))
    return PYTHON


def _requirements() -> list[str]:
    return [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]


def _base() -> str:
    """What the environment stands on; another one needs it made anew."""
    return hashlib.sha256(repr((sys.executable, sys.version, torch.__version__)).encode()).hexdigest()


def _installed() -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads(STAMP.read_text())
        if stamp["base"] == _base() and PYTHON.exists():
            return list(stamp["installed"])
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(HOME)
    folders = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if path in sys.path]
    library = HOME / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (library / "base.pth").write_text("\n".join(folders) + "\n")
    # pip must never bring another torch. (torch.__version__ of the wheel on PyPI says +cu132, its metadata does not.)
    (HOME / "constraints.txt").write_text(f"torch=={version('torch')}\n")
    return []


def _install(lines: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", str(PYTHON)]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--constraint", str(HOME / "constraints.txt"), *lines],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing"]
        outcome = pytest.fail if os.environ.get("CI") else pytest.skip
        outcome(f"pip could not install {', '.join(lines)} (a package index is needed): {said[-1]}")


def run_ranks(
    python: Path, module: str, *arguments: object, launcher: str | None = "ringdp.launch", ranks: int = 2
) -> list[dict[str, Any]]:
    """Run ``python -m module FOLDER arguments…`` on several ranks and read the FOLDER/rank<r>.pt that each one wrote.

    Args:
        launcher: a module with torchrun's flags that starts the ranks; None leaves it to the library.
    """
    with tempfile.TemporaryDirectory(prefix="ringdp-job-") as folder:
        command = [str(python), "-m"]
        if launcher is not None:
            command += [launcher, "--nproc-per-node", str(ranks), "-m"]
        output_of([*command, module, folder, *map(str, arguments)], Path(folder))
        return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(ranks)]


def output_of(command: list[str], folder: Path) -> str:
    """Run ``command`` in ``folder``, let nothing of it outlive the call, and give what it said; it must succeed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_variables(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"nothing in {JOB_TIMEOUT_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    assert code == 0, f"{' '.join(command)} ended with {code}:\n{said[-6000:]}"
    return said


def _variables() -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    families = ("TORCHELASTIC_", "ACCELERATE_")
    variables = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(families)}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables
