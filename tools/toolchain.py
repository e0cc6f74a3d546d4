"""The requirements of a build on the machine, checked before any download or compilation.

Used by setup.py and by tools/environment.py, which run before anything is installed: standard library only.
Each check returns its result, or raises SetupError with one sentence that has a remedy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

MINIMUM_TORCH = (2, 11)
MINIMUM_PYTHON = (3, 10)

# What the sources use of C++20; a compiler that takes the flag but lacks one of these (GCC 10) is too old.
CXX20_PROBE = """
#include <atomic>
#include <bit>
#include <concepts>
#include <coroutine>
#include <span>
#if __cplusplus < 202002L
#error "not C++20"
#endif
template <std::integral T>
constexpr int ones(std::span<const T> values) {
  int sum = 0;
  for (T value : values) sum += std::popcount(value);
  return sum;
}
std::atomic<int> flag;
void sleep_on() { flag.wait(0); }
"""


class SetupError(Exception):
    """The machine does not meet a requirement; the message is one sentence with a remedy."""


def check_platform() -> None:
    """Linux, Python 3.10 or newer."""
    if sys.platform != "linux":
        raise SetupError(f"ringdp runs on Linux only; this is {sys.platform}.")
    if sys.version_info < MINIMUM_PYTHON:
        raise SetupError(
            f"ringdp needs Python 3.10 or newer and {sys.executable} is {sys.version.split()[0]}: "
            "name a newer one, for example `make build PYTHON=python3.11`."
        )


def release(version: str) -> tuple[int, int]:
    """Major and minor number: '2.13.0+cpu' -> (2, 13)."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def installed_torch() -> str | None:
    """The version of the torch this Python would import, without importing it; None where there is none."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # a source build on PYTHONPATH
        import torch

        return str(torch.__version__)


def check_build_isolation() -> None:
    """Not in the environment that pip makes for a build: it has no torch, and pip would first download one in vain."""
    if any("pip-build-env" in path for path in sys.path):
        raise SetupError(
            "pip builds in an environment of its own, which has no torch, and ringdp is compiled against the torch "
            "that will run it: install torch first, then add --no-build-isolation: `pip install --no-build-isolation .`"
        )


def check_torch() -> str:
    """The installed torch's version, 2.11 or newer."""
    version = installed_torch()
    if version is None:
        check_build_isolation()
        raise SetupError(
            f"ringdp is compiled against the torch that will run it and {sys.executable} has none: run `make build`, "
            "or install torch first and then use `pip install --no-build-isolation .`."
        )
    if release(version) < MINIMUM_TORCH:
        raise SetupError(
            f"ringdp needs torch 2.11 or newer and {sys.executable} has torch {version}: upgrade it, or name a Python "
            "without torch (`make build PYTHON=…`), for which a .venv with a fitting torch is made."
        )
    return version


def compiler() -> list[str]:
    """The C++ compiler's command, as torch's extension builder chooses it: $CXX, or c++."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _compiles(source: str, *flags: str) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.cpp")
        path.write_text(source)
        command = [*compiler(), "-std=c++20", "-fsyntax-only", *flags, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode == 0, done.stderr


def check_compiler() -> str:
    """A C++20 compiler; its version line."""
    command = compiler()
    if shutil.which(command[0]) is None:
        raise SetupError(
            f"no C++ compiler ({command[0]}) on PATH: install one (Debian and Ubuntu: `apt-get install g++`), "
            "or name one in the environment (CXX=…)."
        )
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    first_line = version.strip().split("\n")[0] or command[0]
    if not _compiles(CXX20_PROBE)[0]:
        raise SetupError(
            f"{command[0]} ({first_line}) cannot compile C++20: install GCC 11, Clang 14 or newer and name it in the "
            "environment (CXX=…)."
        )
    return first_line


def check_python_headers() -> Path:
    """The folder with Python.h."""
    include = Path(sysconfig.get_path("include"))
    platform_include = Path(sysconfig.get_path("platinclude"))
    for folder in (include, platform_include):
        if (folder / "Python.h").is_file():
            return folder
    raise SetupError(
        f"{include}/Python.h is missing, so no extension can be compiled for {sys.executable}: install the headers "
        f"(Debian and Ubuntu: `apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev`)."
    )


def check_toolchain() -> str:
    """Everything a compile needs but torch; the compiler's version line."""
    check_platform()
    version = check_compiler()
    check_python_headers()
    return version


def repository() -> str | None:
    """The project's https address: DOCS_REPOSITORY, or git's remote `origin`; None where there is neither."""
    if address := os.environ.get("DOCS_REPOSITORY"):
        return address.rstrip("/")
    asked = ["git", "-C", str(Path(__file__).resolve().parents[1]), "remote", "get-url", "origin"]
    try:
        address = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return None
    return address.removesuffix(".git") if address.startswith("https://") else None


def project_urls() -> dict[str, str]:
    """For the metadata: where the sources, the documentation and the changes are."""
    address = repository()
    if address is None:
        return {}
    return {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changes": f"{address}/blob/main/CHANGELOG.md",
    }
