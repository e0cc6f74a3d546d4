"""Set up what ringdp needs, then run a command in it: `python3 tools/environment.py [--lint | --docs] [-- COMMAND …]`.

The make targets come through here. Run by a Python that has torch 2.11 or newer, that Python is used as it is and
nothing is downloaded; by one without torch, a .venv beside the Makefile is made for it. Then the extension is compiled
where it lies. What is there already is not done again, and whoever comes second waits for the first.

Standard library only: nothing is installed yet when this starts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cuda_toolkit
import toolchain
import unity
from toolchain import SetupError

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_STAMP = VENV / "ringdp.json"
TORCH: str | None = None  # the release that was asked for; None: that of requirements/build.txt, or what is there
BUILD = ROOT / "build"
BUILD_STAMP = BUILD / "stamp.json"
BUILD_LOG = BUILD / "build.log"
EACH_LOG = BUILD / "compile-each.log"
# What a build from nothing takes: seconds of one core in all; on any number of cores the longest units.
BUILD_CPU_S, BUILD_LEAST_S = 200, 60
REQUIREMENTS = ROOT / "requirements"
TOOLS = (
    "tools/cuda_toolkit.py",
    "tools/extension_build.py",
    "tools/toolchain.py",
    "tools/unity.py",
)  # what setup.py asks
PACKAGING = ("setup.py", "pyproject.toml")


@dataclass(frozen=True)
class Environment:
    """Where ringdp is built and run."""

    python: Path
    torch: str
    own: bool  # our .venv, which may be installed into; otherwise somebody else's, which stays as it is

    def variables(self) -> dict[str, str]:
        """The environment of every command: the Python's folder first on PATH, where torch looks for ninja."""
        variables = dict(os.environ)
        variables["PATH"] = f"{self.python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
        if self.own:
            variables["VIRTUAL_ENV"] = str(VENV)
        else:
            others = variables.get("PYTHONPATH")
            variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{others}" if others else str(ROOT)
        return variables


def say(text: str) -> None:
    print(f"ringdp: {text}", flush=True)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_stamp(path: Path) -> dict[str, str]:
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(path: Path, stamp: dict[str, str]) -> None:
    """In one step: an interrupted set-up leaves no stamp or the old one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(stamp, indent=1))
    part.replace(path)


def digest(paths: list[Path]) -> str:
    """Of names and contents. Contents, not times: a fresh checkout or a branch and back must not build again."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(f"{path.relative_to(ROOT)}\0".encode())
        sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()


# --- the environment


def use_torch(version: str) -> None:
    """From now on .venv is one of its own beside it, for this release of torch."""
    global VENV, VENV_STAMP, TORCH
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SetupError(f"TORCH={version} is not a release of torch: write it as 2.15.0")
    VENV, TORCH = ROOT / f".venv-torch-{version}", version
    VENV_STAMP = VENV / "ringdp.json"


def find_environment() -> Environment:
    """This Python where it has torch and no release was asked for, else the .venv, made and filled if need be."""
    if TORCH is None and toolchain.installed_torch() is not None:
        return Environment(Path(sys.executable), toolchain.check_torch(), own=False)
    prepare_venv()
    return Environment(VENV / "bin" / "python", version_in_venv("torch"), own=True)


def prepare_venv() -> None:
    """Make .venv and install requirements/build.txt and test.txt, unless exactly that was done before."""
    lists = [REQUIREMENTS / "build.txt", REQUIREMENTS / "test.txt"]
    wanted = {"python": sys.version, "requirements": digest(lists)} | ({} if TORCH is None else {"torch": TORCH})
    found = read_stamp(VENV_STAMP)
    if all(found.get(key) == value for key, value in wanted.items()) and (VENV / "bin" / "python").exists():
        return
    toolchain.check_toolchain()  # before a large download
    other_python = found.get("python", sys.version) != sys.version
    say(f"making {VENV.name} for Python {sys.version.split()[0]}")
    make_venv(clear=other_python)
    if TORCH is None:
        say("installing torch and what the tests need into .venv (about 250 MB to download)")
        pip("install", *(word for path in lists for word in ("-r", str(path))))
    else:
        say(f"installing torch {TORCH} and what the tests need into {VENV.name} (a CUDA build takes 5 GB)")
        others = [line for line in lists[0].read_text().splitlines() if line and not line.startswith(("#", "torch=="))]
        pip("install", f"torch=={TORCH}", *others, "-r", str(lists[1]))
    write_stamp(VENV_STAMP, wanted)


def make_venv(*, clear: bool) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: install its venv module "
            f"(Debian and Ubuntu: `apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv`)."
        )
    command = [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(VENV)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


def pip(*words: str) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    done = subprocess.run([*command, "--quiet", "--progress-bar", "off"], cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SetupError(
            "pip could not install what is needed (its message is above): check the network or pip's index, or name a "
            "Python that has torch 2.11 or newer already (make PYTHON=…)."
        )


def version_in_venv(package: str) -> str:
    """The version of a package in .venv; '' where it is missing."""
    folder = VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for found in importlib.metadata.distributions(name=package, path=[str(folder)]):
        return found.version
    return ""


# --- the extension


def build_inputs() -> list[Path]:
    folders = ROOT / "ringdp" / "csrc", ROOT / "tests" / "core"
    suffixes = {".cpp", ".h", ".inc", ".def", ".cu", ".cuh"}
    sources = [p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes and p.is_file()]
    return [*sources, *(ROOT / name for name in (*TOOLS, *PACKAGING))]


def build_outputs() -> dict[str, str]:
    """Path and time of what a build leaves, so that one that something else removed or replaced is noticed."""
    modules = [*(ROOT / "ringdp").glob("_*.so"), *(ROOT / "tests" / "core").glob("_*.so")]
    outputs = [*modules, ROOT / "ringdp" / "_build_info.py"]
    return {p.name: str(p.stat().st_mtime_ns) for p in sorted(outputs) if p.exists()}


def build(environment: Environment) -> None:
    """Compile ringdp/_C and tests/core/_core where they lie, unless this very build is there."""
    wanted = {
        "python": str(environment.python),
        "torch": environment.torch,
        "compiler": " ".join(toolchain.compiler()),
        "cuda": f"{cuda_toolkit.find_nvcc()} {os.environ.get('TORCH_CUDA_ARCH_LIST', '')}",
        "unity": str(unity.switched_on()),
        "inputs": digest(build_inputs()),
    }
    found = read_stamp(BUILD_STAMP)
    if found != wanted | {"outputs": json.dumps(build_outputs())}:
        compile_extension(environment)
    if environment.own:
        install_editable()  # a .venv that was made anew, for another Python, does not know what may be built still
    built = wanted | {"outputs": json.dumps(build_outputs())}
    if found != built:
        write_stamp(BUILD_STAMP, built)


def compile_extension(environment: Environment) -> None:
    toolchain.check_toolchain()
    log = BUILD_LOG.relative_to(ROOT)
    say(f"building for torch {environment.torch}; {usual_time()} from nothing (log: {log})")
    started = time.monotonic()
    BUILD_STAMP.unlink(missing_ok=True)
    words = ["build_ext", "--inplace"] if environment.own else ["egg_info", "build_ext", "--inplace"]
    run_setup(environment, words, BUILD_LOG)
    say(f"built in {time.monotonic() - started:.0f} s")


def usual_time() -> str:
    """How long a build from nothing takes on as many cores as there are, while nothing else uses them."""
    cores = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    seconds = max(BUILD_LEAST_S, BUILD_CPU_S / cores) if unity.switched_on() else 3 * BUILD_CPU_S / cores
    return f"usually {max(1, round(seconds / 60))} min on {cores} core{'s' if cores > 1 else ''}"


def compile_each(environment: Environment) -> None:
    """Compile each file by itself, as RINGDP_UNITY=0 does, for the compiler's messages alone: nothing is written."""
    toolchain.check_toolchain()
    say(f"compiling each file by itself; usually 4 min on 2 cores (log: {EACH_LOG.relative_to(ROOT)})")
    os.environ["RINGDP_UNITY"] = "0"
    run_setup(environment, ["build_ext", "--each-alone"], EACH_LOG)
    say("each file compiles by itself")


def run_setup(environment: Environment, words: list[str], log_file: Path) -> None:
    """setup.py with a line for each file compiled; the log has all of it, the console also warnings and errors."""
    started = time.monotonic()
    command = [str(environment.python), "setup.py", *words]
    with (
        open(log_file, "w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        places = r"(?:ringdp/csrc|build/unity|tests/core)"
        progress = re.compile(rf"(\[\d+/\d+\]) .* -c \S*?/({places}/\S+) -o \S*?/(core|ringdp\._C|tests\.core\._core)/")
        failed = False  # inside the messages of a file that does not compile
        last_line = ""
        for line in process.stdout:
            log.write(line)
            compiled = progress.match(line)
            if compiled:
                failed = False
                elapsed_s = time.monotonic() - started
                print(f"  {elapsed_s:3.0f} s  {compiled[3]} {compiled[1]} {compiled[2]}", flush=True)
            elif line.startswith("FAILED: "):
                failed = True
            elif " -c " in line and " -o " in line:
                pass  # the command that failed: a thousand characters, and in the log
            elif failed or re.search(rf"{places}/.*(error|warning):", line) or line.startswith("ringdp: "):
                print(line.rstrip(), flush=True)
            last_line = line.rstrip() or last_line
    if process.returncode != 0:
        if last_line.startswith("ringdp: "):
            sys.exit(1)  # setup.py has said it in a sentence
        raise SetupError(f"the build failed: {last_line[:200]} (the rest is in {log_file})")


def install_editable() -> None:
    """Make .venv know ringdp, `ringrun` and the entry point for torch; again only when the packaging changed."""
    stamp = read_stamp(VENV_STAMP)
    packaging = digest([ROOT / name for name in PACKAGING])
    if stamp.get("installed") == packaging and version_in_venv("ringdp"):
        return
    pip("install", "--no-build-isolation", "--no-deps", "--editable", ".")
    write_stamp(VENV_STAMP, stamp | {"installed": packaging})


# --- tools of single targets


def prepare_tools(environment: Environment, target: str) -> None:
    """The pinned packages of requirements/TARGET.txt: installed into .venv, only looked for elsewhere."""
    requirements = REQUIREMENTS / f"{target}.txt"
    pins = dict(line.split("==") for line in requirements.read_text().split() if "==" in line)
    if environment.own:
        if any(version_in_venv(name) != version for name, version in pins.items()):
            say(f"installing {', '.join(pins)} into .venv")
            pip("install", "-r", str(requirements))
        return
    for name, version in pins.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            raise SetupError(
                f"`make {target}` needs {name} {version} and {sys.executable} has {found}: "
                f"{sys.executable} -m pip install -r requirements/{target}.txt"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Set up ringdp, then run a command in it.")
    parser.add_argument("--lint", action="store_true", help="also the tools of `make lint`; does not build")
    parser.add_argument("--docs", action="store_true", help="also the tools of `make docs`; does not build")
    parser.add_argument("--torch", metavar="VERSION", help="in an environment of its own with this release of torch")
    parser.add_argument("--compile-each", action="store_true", help="only check that each C++ file compiles by itself")
    parser.add_argument("command", nargs="*", help="what to run afterwards")
    arguments = parser.parse_args()
    try:
        toolchain.check_platform()
        if arguments.torch:
            use_torch(arguments.torch)
        with one_at_a_time():
            environment = find_environment()
            if arguments.lint:
                prepare_tools(environment, "lint")
            elif arguments.docs:
                prepare_tools(environment, "docs")
            elif arguments.compile_each:
                compile_each(environment)
            else:
                build(environment)
        run(environment, arguments.command)
    except SetupError as error:
        sys.exit(f"ringdp: {error}")


def run(environment: Environment, command: list[str]) -> None:
    """Become the command. `python` is the environment's; where `-m MODULE` is missing there, say so in a sentence."""
    if not command:
        return
    variables = environment.variables()
    program = str(environment.python) if command[0] == "python" else shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise SetupError(f"{command[0]} is not installed beside {environment.python}.")
    if not environment.own and command[:2] == ["python", "-m"] and importlib.util.find_spec(command[2]) is None:
        raise SetupError(
            f"{command[2]} is not installed for {environment.python}: {environment.python} -m pip install {command[2]}"
        )
    os.chdir(ROOT)
    os.execve(program, [program, *command[1:]], variables)


if __name__ == "__main__":
    main()
