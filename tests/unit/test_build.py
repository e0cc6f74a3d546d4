"""The build: what it compiles and when, and the sentences it says where it cannot."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringdp import _build

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("toolchain")


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with some environment variables replaced; output and errors come back as one text in stdout."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- sentences at build time


def test_missing_compiler_is_named(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(
        toolchain.SetupError, match=r"no C\+\+ compiler .* on PATH: install one .*apt-get install g\+\+"
    ):
        toolchain.check_compiler()


def test_old_compiler_is_refused_with_its_version(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = script(tmp_path / "c++", 'case "$*" in *--version*) echo "c++ 9.4.0";; *) exit 1;; esac')
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(toolchain.SetupError, match=r"c\+\+ 9\.4\.0\) cannot compile C\+\+20: install GCC 11"):
        toolchain.check_compiler()


def test_this_machine_s_compiler_and_headers_pass(toolchain: ModuleType) -> None:
    if shutil.which(toolchain.compiler()[0]) is None:
        pytest.skip("no C++ compiler here")
    assert toolchain.check_compiler()
    assert (toolchain.check_python_headers() / "Python.h").is_file()


def test_missing_python_headers_are_named(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(toolchain.SetupError, match=r"Python\.h is missing.*apt-get install python3\.\d+-dev"):
        toolchain.check_python_headers()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "has none: run `make build`"),
        ("2.10.1", "2.11 or newer and .* has torch 2.10.1: upgrade it"),
        ("1.13.1", r"has torch 1\.13\.1"),
    ],
)
def test_torch_that_does_not_serve(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    monkeypatch.setattr(toolchain, "installed_torch", lambda: version)
    with pytest.raises(toolchain.SetupError, match=words):
        toolchain.check_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git123", "3.0.0.dev2"])
def test_torch_that_serves(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(toolchain, "installed_torch", lambda: version)
    assert toolchain.check_torch() == version


def test_other_systems_are_refused(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(toolchain.SetupError, match="Linux only; this is darwin"):
        toolchain.check_platform()


def test_setup_says_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    done = run(sys.executable, "setup.py", "build_ext", cwd=ROOT, CXX=str(tmp_path / "c++"))
    assert done.returncode != 0
    assert done.stdout.strip().split("\n")[-1].startswith("ringdp: no C++ compiler")
    assert "Traceback" not in done.stdout


def test_setup_refuses_an_older_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    (tmp_path / "torch-2.9.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    done = run(sys.executable, "setup.py", "build_ext", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "needs torch 2.11 or newer" in done.stdout
    assert "torch 2.9.1" in done.stdout
    assert "Traceback" not in done.stdout


# --- sentences at import


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A build that fits, as `_build.check` sees it; the tests spoil one thing each."""
    info = SimpleNamespace(TORCH_VERSION="2.13.0+cpu", PYTHON_TAG=sys.implementation.cache_tag, CUDA="13.0")
    monkeypatch.setattr(_build, "_torch_version", lambda: "2.13.1+cu130")
    monkeypatch.setattr(_build, "_torch_cuda", lambda: "13.2")
    monkeypatch.setattr(_build, "_build_info", lambda: info)
    return info


def test_a_fitting_build_passes(fitting: SimpleNamespace) -> None:
    _build.check()


@pytest.mark.parametrize("built", ["2.12.0", "2.14.0", "3.13.0", "2.13.0a0+git1"])
def test_a_build_for_another_torch(fitting: SimpleNamespace, built: str) -> None:
    fitting.TORCH_VERSION = built
    with pytest.raises(ImportError, match=rf"built for torch {built.replace('+', '.')} and this is torch 2\.13\.1"):
        _build.check()


def test_a_build_for_another_python(fitting: SimpleNamespace) -> None:
    fitting.PYTHON_TAG = "cpython-39"
    with pytest.raises(ImportError, match=r"built for cpython-39 and this is .*make build PYTHON="):
        _build.check()


def test_an_older_torch_at_import(fitting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_torch_version", lambda: "2.10.0")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer and this is torch 2\.10\.0"):
        _build.check()


@pytest.mark.parametrize("running, words", [("12.8", "has CUDA 12.8"), (None, "has none")])
def test_a_build_for_another_cuda(
    fitting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, running: str | None, words: str
) -> None:
    monkeypatch.setattr(_build, "_torch_cuda", lambda: running)
    with pytest.raises(
        ImportError, match=rf"built for CUDA 13\.0 and this torch 2\.13\.1\+cu130 {words}: build it again"
    ):
        _build.check()
    fitting.CUDA = None
    _build.check()


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A folder with ringdp's Python files and nothing compiled."""
    names = shutil.ignore_patterns("*.so", "_build_info.py", "csrc", "__pycache__")
    shutil.copytree(ROOT / "ringdp", tmp_path / "ringdp", ignore=names)
    return tmp_path


def import_ringdp(folder: Path, code: str = "import ringdp") -> str:
    """The last line of a failed import in a process of its own, torch's autoload switched off."""
    done = run(sys.executable, "-c", code, cwd=folder, PYTHONPATH=str(folder), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1, done.stdout
    return done.stdout.strip().split("\n")[-1]


def test_import_of_what_was_not_built(unbuilt: Path) -> None:
    assert import_ringdp(unbuilt).startswith("ImportError: ringdp is not built: its compiled part is missing")


def test_import_of_a_build_for_another_torch(unbuilt: Path) -> None:
    info = f'TORCH_VERSION = "2.99.0"\nPYTHON_TAG = "{sys.implementation.cache_tag}"\n'
    (unbuilt / "ringdp" / "_build_info.py").write_text(info)
    assert import_ringdp(unbuilt).startswith("ImportError: ringdp was built for torch 2.99.0 and this is torch 2.")


@pytest.mark.parametrize("words", [["-m", "ringdp", "doctor"], ["-m", "ringdp.launcher", "--version"]])
def test_commands_of_a_build_for_another_torch_say_it_in_a_line(unbuilt: Path, words: list[str]) -> None:
    info = f'TORCH_VERSION = "2.99.0"\nPYTHON_TAG = "{sys.implementation.cache_tag}"\n'
    (unbuilt / "ringdp" / "_build_info.py").write_text(info)
    done = run(sys.executable, *words, cwd=unbuilt, PYTHONPATH=str(unbuilt), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    (line,) = done.stdout.strip().split("\n")
    assert line.startswith("ringdp: ringdp was built for torch 2.99.0 and this is torch 2.")


def test_import_without_torch_and_elsewhere_than_on_linux(unbuilt: Path) -> None:
    no_torch = "import sys; sys.modules['torch'] = None; import ringdp"
    assert "ImportError: ringdp needs torch 2.11 or newer" in import_ringdp(unbuilt, no_torch)
    darwin = "import sys; sys.platform = 'darwin'; import ringdp"
    assert "ImportError: ringdp runs on Linux only" in import_ringdp(unbuilt, darwin)


# --- what is compiled, and when


MODULE = """
#include <Python.h>
#include "base/number.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ringdp::number()); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "%s", "", -1, methods, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_%s() { return PyModule_Create(&module); }
"""


@pytest.fixture
def small_project(tmp_path: Path) -> Path:
    """The real setup.py over three small sources that compile in a second."""
    tools = ("cuda_toolkit", "extension_build", "toolchain", "unity")
    for name in ("setup.py", "pyproject.toml", *(f"tools/{tool}.py" for tool in tools)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").touch()
    (tmp_path / "ringdp" / "csrc" / "base").mkdir(parents=True)
    (tmp_path / "ringdp" / "csrc" / "torch" / "bindings").mkdir(parents=True)
    (tmp_path / "ringdp" / "__init__.py").touch()
    csrc = tmp_path / "ringdp" / "csrc"
    (csrc / "base" / "number.h").write_text("#pragma once\n#define NUMBER 1\nnamespace ringdp { int number(); }\n")
    (csrc / "base" / "number.cpp").write_text('#include "base/number.h"\nint ringdp::number() { return NUMBER; }\n')
    (csrc / "base" / "alone.cpp").write_text("namespace ringdp { int alone() { return 0; } }\n")
    (tmp_path / "tests" / "core").mkdir(parents=True)
    for folder in ("tests", "tests/core"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "tests" / "core" / "core_module.cpp").write_text(MODULE % ("_core", "_core"))
    (csrc / "torch" / "bindings" / "bindings.cpp").write_text(MODULE % ("_C", "_C"))
    return tmp_path


def compiled(output: str) -> list[str]:
    """The sources that ninja compiled, by file name."""
    lines = [line for line in output.split("\n") if line.startswith("[")]
    return sorted(Path(line.split(" -o ")[0].split()[-1]).name for line in lines)


def answers(project: Path) -> str:
    code = "import torch, ringdp._C, tests.core._core as core; print(core.answer(), ringdp._C.answer())"
    done = run(sys.executable, "-c", code, cwd=project, PYTHONPATH=str(project), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    return done.stdout.strip()


@pytest.mark.slow
def test_only_what_changed_is_built_again(small_project: Path) -> None:
    if shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None:
        pytest.skip("ninja is not installed (pip install ninja)")
    csrc = small_project / "ringdp" / "csrc"

    def build(unity: str = "0") -> str:
        done = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=small_project, RINGDP_UNITY=unity)
        assert done.returncode == 0, done.stdout
        return done.stdout

    everything = ["alone.cpp", "bindings.cpp", "core_module.cpp", "number.cpp"]
    assert compiled(build()) == everything, "the core is compiled once for both modules"

    again = build()
    assert compiled(again) == []
    assert "-shared" not in again, "nothing changed, and a module was linked again"

    header = csrc / "base" / "number.h"
    header.write_text(header.read_text().replace("NUMBER 1", "NUMBER 2"))
    assert compiled(build()) == ["bindings.cpp", "core_module.cpp", "number.cpp"], "those that include the header"
    assert answers(small_project) == "2 2"

    (csrc / "base" / "alone.cpp").unlink()
    last = build()
    assert compiled(last) == []
    assert last.count("-shared") == 2, "both modules are linked again, without the source that is gone"
    assert "alone.o" not in last

    together = ["base.cpp", "core_module.cpp", "torch_bindings.cpp"]
    assert compiled(build(unity="1")) == [name for name in together if name != "core_module.cpp"]
    assert answers(small_project) == "2 2"
    header.write_text(header.read_text().replace("NUMBER 2", "NUMBER 3"))
    assert compiled(build(unity="1")) == together
    assert answers(small_project) == "3 3"

    (csrc / "base" / "number.cpp").write_text("int ringdp::number() { return nothing; }\n")
    done = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=small_project)
    assert done.returncode != 0
    assert "number.cpp:1" in done.stdout
    assert done.stdout.strip().split("\n")[-1].startswith("ringdp: Error compiling objects")
    assert "Traceback" not in done.stdout


def test_neither_module_sees_the_other_s_headers() -> None:
    """tests.core._core is free of torch; ringdp._C has torch's own pybind11, never pip's."""
    folders = [path.parent.parent for path in (ROOT / "build").glob("*/ringdp._C/build.ninja")]
    if not folders:
        pytest.skip("no build by ninja in build/ (make build)")
    folder = max(folders, key=lambda p: (p / "ringdp._C" / "build.ninja").stat().st_mtime)

    def headers(module: str) -> list[str]:
        """What one include leads to, with the flags of this module's build."""
        lines = dict(
            re.findall(r"^(cxx|cflags|post_cflags) = (.*)$", (folder / module / "build.ninja").read_text(), re.M)
        )
        source = (
            "#include <pybind11/pybind11.h>\n"
            "#if __has_include(<c10/macros/Macros.h>)\n"
            "#include <c10/macros/Macros.h>\n"
            "#endif\n"
        )
        words = shlex.split(f"{lines['cxx']} {lines['cflags']} {lines['post_cflags']} -M -x c++ -")
        done = subprocess.run(words, input=source, capture_output=True, text=True, check=True)
        return done.stdout.replace("\\\n", " ").split()

    core, torch_side = headers("tests.core._core"), headers("ringdp._C")
    assert any(h.endswith("/pybind11/pybind11.h") for h in core)
    assert not [h for h in core if "/torch/include/" in h]
    assert any(h.endswith("/torch/include/c10/macros/Macros.h") for h in torch_side)
    assert not [h for h in torch_side if "/pybind11/" in h and "/torch/include/pybind11/" not in h]


# --- tools/environment.py


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[..., list[str | Path]]:
    """The command of the real tools/environment.py over a setup.py that only counts its calls and takes its time."""
    (tmp_path / "ringdp" / "csrc").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for name in ("environment.py", "cuda_toolkit.py", "extension_build.py", "toolchain.py", "unity.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "ringdp" / "csrc" / "a.cpp").touch()
    (tmp_path / "setup.py").write_text(
        "import pathlib, sys, time\n"
        "with open('calls', 'a') as calls: calls.write('call\\n')\n"
        "time.sleep(0.5)\n"
        "if pathlib.Path('broken').exists(): sys.exit('csrc/a.cpp:1: error: broken')\n"
        "pathlib.Path('ringdp/_C.so').touch()\n"
        "pathlib.Path('ringdp/_build_info.py').touch()\n"
    )
    return lambda *command: [sys.executable, tmp_path / "tools" / "environment.py", *command]


def calls(folder: Path) -> int:
    path = folder / "calls"
    return len(path.read_text().split()) if path.exists() else 0


def test_set_up_is_done_once(set_up: Callable[..., list[str | Path]], tmp_path: Path) -> None:
    both = [subprocess.Popen(set_up(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    output = "".join(process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert calls(tmp_path) == 1
    assert "waiting for it" in output
    assert run(*set_up(), cwd=tmp_path).stdout == ""
    assert calls(tmp_path) == 1


def test_set_up_is_done_again_when_something_changed(set_up: Callable[..., list[str | Path]], tmp_path: Path) -> None:
    def built() -> int:
        before = calls(tmp_path)
        assert run(*set_up(), cwd=tmp_path).returncode == 0
        return calls(tmp_path) - before

    assert built() == 1
    (tmp_path / "ringdp" / "csrc" / "a.cpp").touch()
    assert built() == 0, "the same text with another time"
    (tmp_path / "ringdp" / "csrc" / "a.cpp").write_text("int a;\n")
    assert built() == 1
    (tmp_path / "ringdp" / "_C.so").unlink()
    assert built() == 1, "the compiled module was removed"
    assert built() == 0


def test_a_failed_build_fails_again(set_up: Callable[..., list[str | Path]], tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    for count in (1, 2):
        done = run(*set_up("--", "python", "-c", "print('ran')"), cwd=tmp_path)
        assert done.returncode == 1
        assert "csrc/a.cpp:1: error: broken" in done.stdout
        assert "ran" not in done.stdout
        assert calls(tmp_path) == count


def test_commands_run_in_the_environment(set_up: Callable[..., list[str | Path]], tmp_path: Path) -> None:
    code = "import os, sys; print(sys.executable, os.environ['PATH'].split(':')[0], os.environ.get('PYTHONPATH'))"
    done = run(*set_up("--", "python", "-c", code), cwd=tmp_path, PYTHONPATH="")
    folder = Path(sys.executable).parent
    assert done.stdout.split("\n")[-2] == f"{sys.executable} {folder} {tmp_path}"
    assert run(*set_up("--", "python", "-c", "exit(7)"), cwd=tmp_path).returncode == 7
    missing = run(*set_up("--", "python", "-m", "no_such_module"), cwd=tmp_path)
    assert missing.returncode == 1
    assert "no_such_module is not installed for" in missing.stdout


def test_a_venv_that_is_made_anew_gets_ringdp_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after an update of the Python that it was made with: what was built then is still good."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    environment: Any = importlib.import_module("environment")
    done: list[str] = []
    monkeypatch.setattr(environment, "BUILD_STAMP", tmp_path / "built.json")
    monkeypatch.setattr(environment, "VENV_STAMP", tmp_path / "venv.json")
    monkeypatch.setattr(environment, "compile_extension", lambda _: done.append("compiled"))
    monkeypatch.setattr(environment, "pip", lambda *_: done.append("installed"))
    monkeypatch.setattr(environment, "version_in_venv", lambda _: "0.1" if environment.VENV_STAMP.exists() else "")
    here = environment.Environment(Path(sys.executable), "2.13.0", own=True)
    environment.build(here)
    environment.build(here)
    assert done == ["compiled", "installed"]
    environment.VENV_STAMP.unlink()
    environment.build(here)
    assert done == ["compiled", "installed", "installed"]


@pytest.mark.parametrize("version, warned", [("2.15.1", False), ("2.16.0+cpu", True), ("3.0.0.dev2", True)])
def test_a_torch_newer_than_tested_is_told_once(version: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_torch_version", lambda: version)
    monkeypatch.setattr(_build, "_build_info", lambda: SimpleNamespace(PYTHON_TAG="", TORCH_VERSION=version))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ImportError, match="was built for"):
            _build.check()
    expected = [f"ringdp was tested with torch up to 2.15 and this is torch {version}"] if warned else []
    assert [str(one.message) for one in caught] == expected


@pytest.mark.parametrize("version", ["2.15", "newest", "2.15.0+cpu"])
def test_a_release_of_torch_that_is_none_is_refused_before_anything_is_made(version: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "environment.py"), "--torch", version],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"TORCH={version} is not a release of torch: write it as 2.15.0" in done.stderr
    assert not list(ROOT.glob(f".venv-torch-{version}*"))
