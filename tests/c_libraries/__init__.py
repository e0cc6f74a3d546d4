"""Compressors in C for tests: built from the source beside this file, or from another one."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from ringdp.compression import include_dir
from tests.helpers import need_command

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c99", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra"]


def build(folder: Path, name: str, *macros: str, source: Path = HERE / "int8.c") -> Path:
    """The library of `source` whose codec is called `name`, with these macros; skips without a C compiler."""
    command = shlex.split(sysconfig.get_config_var("CC") or "cc")
    need_command(command[0], "gcc")
    path = folder / f"lib{name}.so"
    defined = [f"-D{macro}" for macro in (f'NAME="{name}"', *macros)]
    done = subprocess.run(
        [*command, *FLAGS, *defined, f"-I{include_dir()}", str(source), "-o", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(done.stderr)
    return path
