"""ringdp.integrations where none of the libraries is installed; needs nothing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ringdp import integrations
from ringdp.integrations import libraries
from tests.integrations.environment import ROOT

WITHOUT_LIBRARIES = """
import sys
from importlib.machinery import PathFinder

LIBRARIES = set(sys.argv[1:])

class Absent(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
import ringdp.integrations
for name in ringdp.integrations.__all__:
    try:
        getattr(ringdp.integrations, name)
        print(name, "was found")
    except ImportError as error:
        print(name, error)
"""


def test_the_error_says_what_to_install() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "ringdp" / "integrations").glob("*.py"))
    imports = re.findall(r'imported\(((?:"[\w.]+", )+)package="(.*?)"', sources)
    libraries = {name.split(".")[0] for names, _ in imports for name in re.findall(r"[\w.]+", names)}
    assert len(libraries) > 6
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, *libraries],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(said) == integrations.__all__
    tested = (ROOT / "requirements" / "integrations.txt").read_text().splitlines()
    for name, text in said.items():
        what = re.fullmatch(
            r"this part of ringdp\.integrations needs (.*), which is not installed: pip install '(.*)'", text
        )
        assert what is not None, f"{name}: {text}"
        assert what[1] == what[2]
        assert what[1] in tested


def test_an_import_error_inside_a_library_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    folder = str(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with open(f"{folder}/broken_library.py", "w") as module:
        module.write("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        libraries.imported("broken_library", package="broken-library")


def test_unknown_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RingHorovod'"):
        integrations.RingHorovod  # noqa: B018
    assert set(integrations.__all__) <= set(dir(integrations))
