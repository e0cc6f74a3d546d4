"""Who may include or import whom, and who reads the environment: docs/design/architecture.md in a form that fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ringdp"
CSRC = PACKAGE / "csrc"
CPP_SUFFIXES = {".h", ".hpp", ".inc", ".def", ".cpp", ".cu", ".cuh"}

# torch -> {engine, cuda} -> {collective, membership} -> {mesh, codec} -> {transport, kernels, device} -> base: a folder
# includes itself and folders of lower rank. Folders of one rank do not know each other.
RANK = {
    "base": 0,
    "transport": 1,
    "kernels": 1,
    "device": 1,
    "mesh": 2,
    "codec": 2,
    "collective": 3,
    "membership": 3,
    "engine": 4,
    "cuda": 4,
    "torch": 5,
}
# The rooms of torch/, in the same way; those of backend and device know each other.
TORCH_RANK = {"backend": 0, "device": 0, "reducer": 1, "bindings": 2}
# Declares what a file binds beside what it does, and lets go of Python's lock: for all of torch/.
FOR_ALL_OF_TORCH = {"torch/bindings/bindings.h", "torch/bindings/without_python_lock.h"}
# What users' libraries include, and the core too: it knows nothing of ringdp.
PUBLIC = "../include/ringdp/"
# The files beside the folders are the border to Python: above everything but torch, and used by torch/ alone.
BORDER_RANK = 5
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|c10d|caffe2)/")
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h$)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
ENVIRONMENT_IN_CPP = re.compile(r"\b(getenv|secure_getenv|setenv|putenv|unsetenv|clearenv|environ)\b")

# Each room of ringdp, and each module beside them: what else of ringdp it may import. "" is the package itself, for
# __version__. Some modules of a room have a row of their own, because rooms below use them.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_moved": set(),
    "_early": set(),
    "_build_info": set(),
    "_build": {"_build_info"},
    "job.launchers": {"errors"},
    "job.inheritance": {"errors"},
    "job.tuning": {"errors"},
    "job.threads": set(),
    "job.secret": {"errors"},
    "job.values": {"errors"},
    "config": {"errors", "job.inheritance", "job.launchers", "job.tuning", "job.secret", "job.values", "_build", "_C"},
    "job": {"", "errors", "config", "_build", "_C"},
    "compression": {"errors", "_C"},
    "hooks": {"errors", "compression", "job", "_C"},
    "ddp": {"errors", "config", "job", "compression", "hooks", "diagnosis", "ddp.words", "_C"},
    "ddp.words": set(),
    "tools.cost_model": {"errors"},
    "diagnosis": {"", "errors", "config", "job", "ddp.words", "tools.cost_model", "_C", "_core"},
    "amp": {"errors", "hooks", "ddp", "_C"},
    "metrics": {"errors", "config", "job", "diagnosis"},
    "checkpoint": {"errors", "job"},
    "data": {"errors", "config", "job"},
    "nn": {"errors", "job", "kvstore", "_C"},
    "kvstore": {"errors", "config", "job", "compression", "hooks", "_C"},
    "rounds": {"errors", "config", "job", "compression", "ddp", "_C"},
    "launch": {"launcher", "job"},
    "launcher": {"", "_early", "errors", "config", "job.inheritance", "job.threads", "job.launchers", "diagnosis"},
    "_autoload": {"job"},
    "__init__": {
        "_early",
        "errors",
        "job",
        "compression",
        "hooks",
        "ddp",
        "diagnosis",
        "amp",
        "metrics",
        "checkpoint",
        "data",
        "kvstore",
        "nn",
        "rounds",
    }
    | {"_autoload", "_build", "_moved", "testing"},
}
# May import anything; nothing may import them.
TOPMOST = {"__main__", "tools", "testing", "integrations"}
# The launcher makes the environment of the ranks, integrations what Accelerate reads; everything else asks config.
MAY_READ_ENVIRONMENT = {"config", "launcher", "job.launchers", "job.threads", "integrations"}


def cpp_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in CPP_SUFFIXES)


def without_comments_and_strings(source: str) -> str:
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, " ", source, flags=re.DOTALL)


def include_violations(root: Path) -> Iterator[str]:
    """What the C++ files under root include against the rules, one sentence each."""
    for path in cpp_files(root):
        name = path.relative_to(root)
        folder = name.parts[0] if len(name.parts) > 1 else ""
        if folder and folder not in RANK:
            yield f"{name}: the folder {folder} has no rank in {Path(__file__).name}"
            continue
        for own, system in INCLUDE.findall(path.read_text()):
            header = own or system
            if TORCH_HEADER.match(header) and not (root / header).is_file():
                if folder != "torch":
                    yield f"{name} includes {header}: only torch/ may include torch"
            elif PYTHON_HEADER.match(header):
                if folder not in ("torch", ""):
                    yield f"{name} includes {header}: the core knows nothing of Python"
            elif own and own.startswith(PUBLIC) and (root / own).is_file():
                continue
            elif own and not (root / own).is_file():
                yield f"{name} includes {own}, which is no file under {root.name}/"
            elif own:
                yield from own_include_violations(name, folder, Path(own))


def own_include_violations(name: Path, folder: str, header: Path) -> Iterator[str]:
    other = header.parts[0] if len(header.parts) > 1 else ""
    if other == folder:
        if folder == "torch" and str(header) not in FOR_ALL_OF_TORCH:
            yield from torch_include_violations(name, header)
        return
    if other == "":
        if folder != "torch":
            yield f"{name} includes {header}: the border to Python is for torch/ alone"
    elif RANK.get(other, BORDER_RANK) >= (RANK[folder] if folder else BORDER_RANK):
        yield f"{name} includes {header}: {other} does not stand to the right of {folder or 'the module file'}"


def torch_include_violations(name: Path, header: Path) -> Iterator[str]:
    room, other = name.parts[1], header.parts[1]
    if room not in TORCH_RANK or other not in TORCH_RANK:
        yield f"{name} includes {header}: a file of torch/ lies in one of its rooms"
    elif TORCH_RANK[other] > TORCH_RANK[room]:
        yield f"{name} includes {header}: {other} does not stand to the right of {room}"


def unit_of(parts: Sequence[str]) -> str:
    """The row that speaks of a module, or its room: launch, agent -> launch; job, launchers -> job.launchers."""
    own = ".".join(parts[:2])
    return own if own in MAY_IMPORT else parts[0]


def imported_units(tree: ast.Module, path: Path, package: Path) -> set[str]:
    """The row or room of everything of the package that a file imports; "" is the package itself."""
    root = package.name
    units = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [root, *path.relative_to(package).parts[: -node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from ringdp import x`: x may be a module, also a compiled one, or a name of the package.
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == root:
                unit = unit_of(parts[1:]) if len(parts) > 1 else ""
                units.add("" if unit == "__version__" else unit)
    return units


def reads_environment(tree: ast.Module) -> bool:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
    }
    return bool({"environ", "environb", "getenv", "getenvb", "putenv"} & (attributes | imported))


def import_violations(package: Path) -> Iterator[str]:
    """What the Python files of a package import, or read, against the rules, one sentence each."""
    for path in sorted(package.rglob("*.py")):
        unit = unit_of(path.relative_to(package).with_suffix("").parts)
        name = path.relative_to(package.parent)
        tree = ast.parse(path.read_text())
        if unit not in TOPMOST and unit not in MAY_IMPORT:
            yield f"{name}: {unit} has no place in {Path(__file__).name}"
            continue
        if unit not in TOPMOST:
            for other in sorted(imported_units(tree, path, package) - {unit}):
                if other in MAY_IMPORT[unit] or other.partition(".")[0] in MAY_IMPORT[unit] | {unit}:
                    continue
                yield f"{name} imports {package.name}.{other}".rstrip(".") + f": {unit} may not"
        if unit not in MAY_READ_ENVIRONMENT | TOPMOST and reads_environment(tree):
            yield f"{name} reads the environment: config does that"


def test_cpp_includes_only_what_stands_to_its_right() -> None:
    assert cpp_files(CSRC)
    assert list(include_violations(CSRC)) == []


def test_cpp_leaves_the_environment_alone() -> None:
    readers = [
        str(path.relative_to(CSRC))
        for path in cpp_files(CSRC)
        if ENVIRONMENT_IN_CPP.search(without_comments_and_strings(path.read_text()))
    ]
    assert readers == []


def test_python_imports_only_what_stands_to_its_right() -> None:
    assert list(import_violations(PACKAGE)) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("collective/ring.cpp", '#include "engine/engine.h"', "does not stand to the right"),
        ("mesh/link.cpp", '#include "codec/codec.h"', "does not stand to the right"),
        ("base/fd.cpp", '#include "kernels/kernels.h"', "does not stand to the right"),
        ("cuda/cast.cu", '#include "engine/engine.h"', "does not stand to the right"),
        ("core_module.cpp", '#include "torch/bindings/bindings.h"', "does not stand to the right"),
        ("torch/backend/work.cpp", '#include "torch/reducer/reducer.h"', "does not stand to the right"),
        (
            "torch/reducer/reducer.cpp",
            '#include "torch/bindings/bindings.h"\n#include "torch/work.h"',
            "one of its rooms",
        ),
        ("engine/engine.cpp", "#  include <c10/core/Stream.h>", "only torch/ may include torch"),
        ("engine/engine.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>", "only torch/ may include torch"),
        ("cuda/cast.cu", "#include <ATen/ATen.h>", "only torch/ may include torch"),
        ("mesh/link.cpp", "#include <pybind11/pybind11.h>", "knows nothing of Python"),
        ("mesh/link.cpp", '#include "python_errors.h"', "border to Python"),
        ("mesh/link.cpp", '#include "link.h"', "no file under"),
        ("new/thing.cpp", "#include <vector>", "has no rank"),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    headers = ["engine/engine.h", "codec/codec.h", "kernels/kernels.h", "python_errors.h"]
    headers += ["torch/bindings/bindings.h", "torch/reducer/reducer.h", "torch/work.h"]
    for name, text in [(header, "") for header in headers] + [
        (file, f'#include "base/x.h"\n{line}\n'),
        ("base/x.h", ""),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(include_violations(tmp_path))
    assert len(found) == 1
    assert file in found[0]
    assert complaint in found[0]


def test_a_read_of_the_environment_is_found_in_code_but_not_in_comments() -> None:
    quiet = '// getenv("X")\n/* environ */ log("no getenv here"); int environment;'
    assert not ENVIRONMENT_IN_CPP.search(without_comments_and_strings(quiet))
    assert ENVIRONMENT_IN_CPP.search(without_comments_and_strings('auto x = std::getenv("X");'))


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("errors.py", "import ringdp.config", "errors.py imports ringdp.config"),
        ("compression/int8.py", "from ringdp.job.process_group import rank", "imports ringdp.job"),
        ("compression/int8.py", "from ..job.process_group import rank", "imports ringdp.job"),
        ("compression/int8.py", "from .. import job", "imports ringdp.job"),
        ("config.py", "from ringdp.job import launchers, backend", "imports ringdp.job"),
        ("job/launchers.py", "from ringdp.job import backend", "imports ringdp.job"),
        ("hooks/names.py", "def f():\n    from ringdp.ddp.wrapper import RingDP", "imports ringdp.ddp"),
        ("ddp/wrapper.py", "from ringdp import testing", "imports ringdp.testing"),
        ("launch/agent.py", "from ringdp import _C", "imports ringdp._C"),
        ("unheard_of.py", "", "has no place"),
        ("ddp/wrapper.py", "import os\nos.environ['X']", "reads the environment"),
        ("ddp/wrapper.py", "from os import getenv", "reads the environment"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    path = tmp_path / "ringdp" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = list(import_violations(tmp_path / "ringdp"))
    assert len(found) == 1
    assert complaint in found[0]


def test_imports_inside_a_package_are_its_own_business(tmp_path: Path) -> None:
    path = tmp_path / "ringdp" / "launcher" / "agent.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from . import logs\nfrom .views import Stream\nfrom ringdp.launcher import secret\nimport os\nos.environ\n"
    )
    assert list(import_violations(tmp_path / "ringdp")) == []
