"""Call sites on every Python release of this machine: where frames are in memory differs from release to release."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "ringdp/csrc"
MODULE = r"""
#include <Python.h>
#include "torch/backend/call_site.h"

static PyObject* site(PyObject*, PyObject*) { return PyLong_FromLong(ringdp::python_call_site()); }
static PyObject* unlocked_site(PyObject*, PyObject*) {  // as an operation of torch is issued
  int32_t number = -1;
  Py_BEGIN_ALLOW_THREADS
  number = ringdp::python_call_site();
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(number);
}
static PyObject* text(PyObject*, PyObject* number) {
  return PyUnicode_FromString(ringdp::python_call_site_text(static_cast<int32_t>(PyLong_AsLong(number))).c_str());
}
static PyMethodDef methods[] = {{"site", site, METH_NOARGS, nullptr},
                                {"unlocked_site", unlocked_site, METH_NOARGS, nullptr},
                                {"text", text, METH_O, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sites", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_sites() { return PyModule_Create(&definition); }
"""
PROGRAM = """
import sys, threading
import sites

def here(call): return call()
def one(call):
    return here(call)
def other(call):
    return here(call)
def deep(n, call):
    return deep(n - 1, call) if n else call()
def generated(call):
    yield call()
def loop(call):
    return {call() for _ in range(100)}

for call in (sites.site, sites.unlocked_site):
    numbers = [loop(lambda: function(call)) for function in (one, other)]
    assert all(len(found) == 1 and min(found) >= 0 for found in numbers), numbers
    first, second = (min(found) for found in numbers)
    assert first != second
    lines = sites.text(first).splitlines()
    assert lines[0].startswith(__file__ + ":") and lines[0].endswith(" in here"), lines
    assert lines[1].endswith(" in one") and sites.text(second).splitlines()[1].endswith(" in other"), lines
    assert lines[-1].endswith(" in <module>"), lines
    assert len(sites.text(deep(100, call)).splitlines()) == 20
    assert " in generated" in sites.text(next(generated(call)))
    assert " in <lambda>" in sites.text(list(map(lambda _: call(), [0]))[0])
    scope = {"call": call}
    exec(compile("def made(): return call()\\nfound = made()", "made.py", "exec"), scope)
    assert sites.text(scope["found"]).startswith("made.py:1 in made"), sites.text(scope["found"])
    threads = []
    thread = threading.Thread(target=lambda: threads.append(sites.text(one(call))))
    thread.start()
    thread.join()
    assert " in one" in threads[0] and " in run" in threads[0], threads
print("%d.%d" % sys.version_info[:2])
"""


def pythons() -> list[str]:
    """One of each release from 3.10 on that this machine has: this one, those of PATH, and pyenv's."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for minor in range(10, 15):
        release = f"3.{minor}"
        there = [str(path) for path in sorted(pyenv.glob(f"{release}.*/bin/python"))]
        if path := shutil.which(f"python{release}"):
            there.append(path)
        for one in there:
            if subprocess.run([one, "--version"], capture_output=True, check=False).returncode == 0:
                found.setdefault(release, one)
    return list(found.values())


@pytest.mark.parametrize("python", pythons())
def test_the_line_of_a_script_is_found_on_this_release(python: str, tmp_path: Path) -> None:
    ask = "import sysconfig; print(sysconfig.get_paths()['include'])"
    include = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    compiler = shutil.which("c++")
    if compiler is None or not Path(include, "Python.h").exists():
        pytest.skip("no compiler, or no headers of this Python")
    (tmp_path / "module.cpp").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    sources = [str(tmp_path / "module.cpp"), str(CSRC / "torch/backend/call_site.cpp")]
    built = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", f"-I{CSRC}"]
    subprocess.run([*built, *sources, "-o", str(tmp_path / "sites.so")], check=True)
    ran = subprocess.run([python, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
