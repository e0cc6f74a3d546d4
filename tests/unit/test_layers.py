"""Who may include or import whom, and who reads the environment: docs/architecture.md in a form that fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ringdp"
CSRC = PACKAGE / "csrc"
CPP_SUFFIXES = {".h", ".hpp", ".inc", ".cpp", ".cu", ".cuh"}

# torch -> {engine, cuda} -> collective -> {mesh, codec} -> {transport, kernels, device} -> base: a folder includes
# itself and folders of lower rank. Folders of one rank do not know each other.
RANK = {
    "base": 0,
    "transport": 1,
    "kernels": 1,
    "device": 1,
    "mesh": 2,
    "codec": 2,
    "collective": 3,
    "engine": 4,
    "cuda": 4,
    "torch": 5,
}
# What users' libraries include, and the core too: it knows nothing of ringdp.
PUBLIC = "../include/ringdp/"
# The files beside the folders are the border to Python: above everything but torch, and used by torch/ alone.
BORDER_RANK = 5
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|c10d|caffe2)/")
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h$)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
ENVIRONMENT_IN_CPP = re.compile(r"\b(getenv|secure_getenv|setenv|putenv|unsetenv|clearenv|environ)\b")

# Each module or package of ringdp: what else of ringdp it may import. "" is the package itself, for __version__.
# A new module finds its place here.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_build_info": set(),
    "_build": {"_build_info"},
    "launchers": {"errors"},
    "config": {"errors", "launchers", "tuning"},
    "tuning": {"errors"},
    "cost_model": {"errors"},
    "compression": {"errors", "_C"},
    "backend": {"errors", "config", "_build", "_C"},
    "devices": {"errors", "config", "backend"},
    "device_guard": {"backend"},
    "rank_devices": {"errors", "backend", "exchange", "_C"},
    "process_group": {"", "errors", "config", "backend", "devices", "device_guard"},
    "barrier": {"errors"},
    "hooks": {"errors", "compression", "process_group", "backend", "exchange"},
    "loss_scale": set(),
    "reduced_gradients": {"exchange", "_C"},
    "amp": {"errors", "hooks", "loss_scale", "reduced_gradients", "_C"},
    "exchange": {"errors"},
    "metrics": {"errors", "config", "backend", "exchange"},
    "checkpoint": {"errors", "backend", "exchange"},
    "model_check": {"errors", "exchange"},
    "model_parameters": set(),
    "sync_batch_norm": {"errors", "backend"},
    "reducer_log": {"errors", "config", "backend"},
    "ddp_arguments": {"errors"},
    "mixed_precision": {"errors", "hooks"},
    "sharded_parameters": {"errors"},
    "optimizer_in_backward": {"errors", "hooks"},
    "compression_tuner": set(),
    "link_probe": {"backend", "compression", "compression_tuner", "exchange", "_C"},
    "auto_compression": {"backend", "compression", "exchange", "hooks", "compression_tuner", "link_probe"},
    "model_compression": {
        "errors",
        "auto_compression",
        "compression_tuner",
        "backend",
        "compression",
        "hooks",
        "exchange",
        "model_parameters",
        "rank_devices",
        "_C",
    },
    "compression_state": {"errors", "backend", "compression", "exchange", "model_compression", "_C"},
    "compression_quality": {"backend", "compression", "model_compression"},
    "compression_stats": {"auto_compression", "compression", "compression_quality", "model_compression"},
    "compressed_module": {
        "errors",
        "rank_devices",
        "compression",
        "model_compression",
        "model_parameters",
        "compression_state",
        "compression_quality",
        "compression_stats",
    },
    "parallel": {
        "errors",
        "config",
        "compression",
        "backend",
        "hooks",
        "model_check",
        "model_parameters",
        "reducer_log",
        "sync_batch_norm",
        "ddp_arguments",
        "mixed_precision",
        "sharded_parameters",
        "optimizer_in_backward",
        "reduced_gradients",
        "compressed_module",
        "rank_devices",
        "loss_scale",
        "_C",
    },
    "launch": {"", "errors", "config"},
    "_autoload": {"backend"},
    "__init__": {
        "errors",
        "amp",
        "backend",
        "process_group",
        "barrier",
        "parallel",
        "_autoload",
        "_build",
        "checkpoint",
        "hooks",
        "compression",
        "metrics",
    },
}
# May import anything; nothing may import them.
TOPMOST = {"__main__", "tools", "testing", "integrations"}
# The launcher makes the environment of the ranks, integrations what Accelerate reads; everything else asks config.
MAY_READ_ENVIRONMENT = {"config", "launch", "launchers", "integrations"}


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
        return
    if other == "":
        if folder != "torch":
            yield f"{name} includes {header}: the border to Python is for torch/ alone"
    elif RANK.get(other, BORDER_RANK) >= (RANK[folder] if folder else BORDER_RANK):
        yield f"{name} includes {header}: {other} does not stand to the right of {folder or 'the module file'}"


def unit_of(path: Path, package: Path) -> str:
    """The module or subpackage a file belongs to: ringdp/launch/agent.py -> launch."""
    parts = path.relative_to(package).parts
    return parts[0].removesuffix(".py")


def imported_units(tree: ast.Module, path: Path, package: Path) -> set[str]:
    """Everything of the package a file imports, at any depth; "" is the package itself."""
    root = package.name
    units = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [root, *path.relative_to(package).parts[: -node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from ringdp import x`: x may be a module, also a compiled one, or a name of the package.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == root else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == root:
                unit = parts[1] if len(parts) > 1 else ""
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
        unit, name = unit_of(path, package), path.relative_to(package.parent)
        tree = ast.parse(path.read_text())
        if unit not in TOPMOST and unit not in MAY_IMPORT:
            yield f"{name}: {unit} has no place in {Path(__file__).name}"
            continue
        if unit not in TOPMOST:
            for other in sorted(imported_units(tree, path, package) - MAY_IMPORT[unit] - {unit}):
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
        ("core_module.cpp", '#include "torch/bindings.h"', "does not stand to the right"),
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
    headers = ["engine/engine.h", "codec/codec.h", "kernels/kernels.h", "torch/bindings.h", "python_errors.h"]
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
        ("compression/int8.py", "from ringdp.process_group import rank", "imports ringdp.process_group"),
        ("compression/int8.py", "from ..process_group import rank", "imports ringdp.process_group"),
        ("compression/int8.py", "from .. import process_group", "imports ringdp.process_group"),
        ("hooks/names.py", "def f():\n    from ringdp.parallel import RingDP", "imports ringdp.parallel"),
        ("parallel.py", "from ringdp import testing", "imports ringdp.testing"),
        ("launch/agent.py", "from ringdp import _C", "imports ringdp._C"),
        ("unheard_of.py", "", "has no place"),
        ("parallel.py", "import os\nos.environ['X']", "reads the environment"),
        ("parallel.py", "from os import getenv", "reads the environment"),
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
    path = tmp_path / "ringdp" / "launch" / "agent.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from . import logs\nfrom .views import Stream\nfrom ringdp.launch import secret\nimport os\nos.environ\n"
    )
    assert list(import_violations(tmp_path / "ringdp")) == []
