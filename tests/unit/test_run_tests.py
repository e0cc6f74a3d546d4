"""tools/run_tests.py: a test that fails once runs again, alone; the last line counts what came of all of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import need

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
# Each call of fails(n, name) is one run of a test: the first n fail.
CASES = """
import os
from pathlib import Path

import pytest

def fails(times, name):
    path = Path(__file__).with_name(name)
    with open(path, "a") as file:
        file.write("x" if "PYTEST_XDIST_WORKER" in os.environ else "a")
    assert len(path.read_text()) > times, f"{name} fails"
"""
MARKED = "import pytest\n\npytestmark = pytest.mark.alone\n"


@dataclass(frozen=True)
class Output:
    status: int
    text: str

    @property
    def last(self) -> str:
        return self.text.splitlines()[-1]

    @property
    def counts(self) -> list[str]:
        return re.findall(r"\d+ (?:passed|failed|error|skipped)", self.last)


@dataclass(frozen=True)
class Project:
    """A checkout with this tool and tests of its own."""

    root: Path

    def write(self, tests: str, *, name: str = "test_some.py", alone: bool = False) -> None:
        (self.root / "tests" / name).write_text(CASES + MARKED * alone + tests)

    def run(self, *arguments: str) -> Output:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "RINGDP_"))}
        done = subprocess.run(
            [sys.executable, "tools/run_tests.py", *arguments],
            cwd=self.root,
            env=environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist"},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        return Output(done.returncode, done.stdout + done.stderr)

    def runs(self, name: str) -> str:
        """One letter for each run of a test: x beside others, a alone."""
        return (self.root / "tests" / name).read_text()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    need("xdist", "pytest-xdist")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tools" / "run_tests.py", tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\n"
        'addopts = ["--import-mode=importlib", "--strict-markers", "-m", "not slow"]\n'
        'testpaths = ["tests"]\n'
        'markers = ["slow: s", "ci: c", "nightly: n", "alone: a", "integrations: i"]\n'
    )
    return Project(tmp_path)


def test_what_fails_once_passes_and_is_named(project: Project) -> None:
    project.write(
        """
@pytest.mark.parametrize("case", ["a - b", "x::y[z]"])
def test_flaky(case):
    fails(1, f"flaky-{len(case)}")

@pytest.fixture(params=["before", "after"])
def shaky(request):
    fails(request.param == "before", "before")
    yield
    fails(request.param == "after", "after")

def test_shaky(shaky):
    pass

def test_firm():
    fails(0, "firm")
    assert not [name for name in os.environ if name.startswith(("RINGDP_", "RUN_TESTS"))]

def test_not_here():
    pytest.skip("no")
"""
    )
    project.write("def test_bound():\n    fails(1, 'bound')\n", name="test_bound.py", alone=True)
    output = project.run("--tier", "default", "-k", "flaky or shaky or firm or bound or here", "tests")
    assert output.status == 0, output.text
    assert output.counts == ["6 passed", "1 skipped"]
    named = next(line for line in output.text.splitlines() if "failed once and passed" in line)
    tests = ["flaky[a - b]", "flaky[x::y[z]]", "shaky[before]", "shaky[after]"]
    for test in (*(f"tests/test_some.py::test_{test}" for test in tests), "tests/test_bound.py::test_bound"):
        assert test in named
    assert "firm" not in named
    assert "flaky-5 fails" in output.text, "the first failure is shown"
    assert (project.runs("flaky-5"), project.runs("bound"), project.runs("firm")) == ("xa", "aa", "x")

    output = project.run()
    assert (output.status, output.counts) == (0, ["6 passed", "1 skipped"]), "nothing of the first call is left"
    assert "once more" not in output.text


def test_what_does_not_pass_the_second_time_has_failed(project: Project) -> None:
    project.write(
        """
def test_broken():
    fails(2, "broken")

def test_skips():
    fails(1, "skips")
    pytest.skip("no")

@pytest.mark.slow
def test_slow():
    fails(1, "slow")
"""
    )
    output = project.run("--tier", "default", "--tier", "slow")
    assert output.status == 1
    assert output.counts == ["2 failed", "1 passed"], output.text
    named = next(line for line in output.text.splitlines() if "failed once and passed" in line)
    assert "tests/test_some.py::test_slow" in named
    assert "broken" not in named
    assert "skips" not in named
    assert project.runs("broken") == "xa"


@pytest.mark.parametrize("argument", ["-x", "--maxfail=3"])
def test_not_where_the_first_failures_are_to_end_the_run(project: Project, argument: str) -> None:
    project.write("def test_flaky():\n    fails(1, 'flaky')\n")
    output = project.run(argument)
    assert output.status != 0
    assert output.counts == ["1 failed"]
    assert project.runs("flaky") == "x"


@pytest.mark.slow
@pytest.mark.parametrize(("many", "status"), [(20, 0), (21, 1)])
def test_not_where_many_fail(project: Project, many: int, status: int) -> None:
    project.write(
        f"@pytest.mark.parametrize('case', range({many}))\ndef test_flaky(case):\n    fails(1, f'flaky-{{case}}')\n"
    )
    output = project.run()
    assert (output.status, output.counts) == (status, [f"{many} {'failed' if status else 'passed'}"]), output.text
    assert project.runs("flaky-7") == ("x" if status else "xa")


def test_a_run_that_broke_off_has_failed(project: Project) -> None:
    """As after the limit of a test that never returns to Python: the process ends with status 1, and tests are left."""
    project.write(
        "def test_flaky():\n    fails(1, 'flaky')\n\ndef test_ends():\n    os._exit(1)\n\ndef test_left():\n    pass\n",
        alone=True,
    )
    output = project.run()
    assert output.status == 1
    assert "once more" not in output.text
    assert project.runs("flaky") == "a"


def test_a_file_that_cannot_be_collected_is_not_run_again(project: Project) -> None:
    project.write("def test_flaky():\n    fails(1, 'flaky')\n")
    project.write("import nothing_of_this_name\n", name="test_broken.py")
    output = project.run()
    assert output.status != 0
    assert any("error" in count for count in output.counts), output.text
    assert "once more" not in output.text
