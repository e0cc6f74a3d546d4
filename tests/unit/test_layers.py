"""Who may include or import whom, and who reads the environment: docs/design/architecture.md in a form that fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ringdp"
CSRC = PACKAGE / "csrc"
CPP_SUFFIXES = {".h", ".hpp", ".inc", ".def", ".cpp", ".cu", ".cuh"}

# torch -> {engine, cuda, simulation} -> membership -> {collective, meet} -> {link, shared, codec}
# -> {transport, kernels, device} -> base: a folder includes itself and folders of lower rank. Folders of one rank
# do not know each other.
RANK = {
    "base": 0,
    "transport": 1,
    "kernels": 1,
    "device": 1,
    "link": 2,
    "shared": 2,
    "codec": 2,
    "collective": 3,
    "meet": 3,
    "membership": 4,
    "simulation": 5,
    "engine": 5,
    "cuda": 5,
    "torch": 6,
}
# The rooms of torch/, in the same way; those of backend and device know each other.
TORCH_RANK = {"backend": 0, "device": 0, "reducer": 1, "bindings": 2}
# Declares what a file binds beside what it does, and lets go of Python's lock: for all of torch/.
FOR_ALL_OF_TORCH = {"torch/bindings/bindings.h", "torch/bindings/without_python_lock.h"}
# What users' libraries include, and the core too: it knows nothing of ringdp.
PUBLIC = "../include/ringdp/"
# The files beside the folders are the border to Python: above everything but torch, and used by torch/ alone.
BORDER_RANK = 6
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|c10d|caffe2)/")
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h$)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
ENVIRONMENT_IN_CPP = re.compile(r"\b(getenv|secure_getenv|setenv|putenv|unsetenv|clearenv|environ)\b")

# Each folder of ringdp, and each module beside them: what else of ringdp it may import. "" is the package itself, for
# __version__. What a row names stands below it: the rows have no circle.
MAY_IMPORT: dict[str, set[str]] = {
    "stories": set(),
    "errors": {"stories"},
    "refusals": {"errors"},
    "values": {"errors"},
    "text": set(),
    "costs": {"errors", "text"},
    "_early": set(),
    "_build_info": set(),
    "_build": {"_build_info"},
    "config": {"errors", "_build", "_C"},
    "job": {"", "errors", "stories", "refusals", "config", "_build", "_C"},
    "compression": {"errors", "values", "refusals", "text", "_C"},
    "hooks": {"errors", "refusals", "compression", "job", "_C"},
    "diagnosis": {"", "errors", "text", "costs", "config", "job", "_C"},
    "ddp": {"errors", "values", "refusals", "text", "config", "job", "compression", "hooks", "diagnosis", "_C"},
    "amp": {"errors", "hooks", "ddp", "_C"},
    "metrics": {"errors", "config", "job", "diagnosis"},
    "checkpoint": {"errors", "text", "job"},
    "data": {"errors", "values", "text", "config", "job"},
    "kvstore": {"errors", "values", "refusals", "text", "config", "job", "compression", "hooks", "_C"},
    "nn": {"errors", "values", "refusals", "text", "job", "kvstore", "_C"},
    "rounds": {"errors", "values", "refusals", "config", "job", "compression", "ddp", "_C"},
    "elastic": {"", "errors", "values", "refusals", "text", "config", "job", "data", "ddp", "rounds", "_C"},
    "script": {"errors", "values", "config", "job", "data", "ddp"},
    "launcher": {"", "_early", "errors", "stories", "refusals", "config", "diagnosis", "_C"},
    "launch": {"launcher", "job"},
    "_autoload": {"job"},
    # The face names what is public, and loads it when it is used.
    "__init__": {"_early", "errors", "job", "compression", "hooks", "ddp", "diagnosis", "amp", "metrics", "checkpoint"}
    | {"data", "elastic", "kvstore", "nn", "rounds", "script", "_autoload", "_build", "testing"},
}
# May import anything; nothing may import them.
TOPMOST = {"__main__", "tools", "testing", "integrations"}
# The launcher makes the environment of the ranks, integrations what Accelerate reads; everything else asks config.
MAY_READ_ENVIRONMENT = {"config", "launcher", "integrations"}


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


def imported_modules(tree: ast.Module, path: Path, package: Path) -> set[str]:
    """The dotted names, without the package's, that a file imports of the package; "" is the package itself."""
    root = package.name
    modules = set()
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
            first, _, rest = name.partition(".")
            if first == root:
                modules.add("" if rest == "__version__" else rest)
    return modules


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Of the nodes of a graph those that lie on a circle, one list for each set of nodes that reach each other."""
    reached = {node: set(others) for node, others in arrows.items()}
    for between in arrows:
        for others in reached.values():
            if between in others:
                others |= reached[between]
    found = {
        tuple(sorted(other for other in arrows if other in reached[node] and node in reached[other]))
        for node in arrows
        if node in reached[node]
    }
    return [list(circle) for circle in sorted(found)]


def module_circles(package: Path) -> list[list[str]]:
    """Modules that import each other, wherever in the file that is done, be it for the type checker alone."""
    paths = {module_name(path, package): path for path in package.rglob("*.py")}
    arrows = {}
    for name, path in paths.items():
        needed = set()
        for other in imported_modules(ast.parse(path.read_text()), path, package):
            while other and other not in paths:  # a name of a module
                other = other.rpartition(".")[0]
            needed.add(other)
        arrows[name] = needed - {name, ""}
    return circles(arrows)


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
        unit = path.relative_to(package).with_suffix("").parts[0]
        name = path.relative_to(package.parent)
        tree = ast.parse(path.read_text())
        if unit not in TOPMOST and unit not in MAY_IMPORT:
            yield f"{name}: {unit} has no place in {Path(__file__).name}"
            continue
        if unit not in TOPMOST:
            units = {module.partition(".")[0] for module in imported_modules(tree, path, package)}
            for other in sorted(units - {unit} - MAY_IMPORT[unit]):
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


def test_no_folder_needs_what_needs_it() -> None:
    assert circles(MAY_IMPORT) == []
    assert not [row for row in MAY_IMPORT if "." in row]


def test_no_module_needs_what_needs_it() -> None:
    assert module_circles(PACKAGE) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "ringdp"
    (package / "job").mkdir(parents=True)
    (package / "errors.py").write_text("")
    (package / "job" / "__init__.py").write_text("from ringdp.job import a")
    (package / "job" / "a.py").write_text("from ringdp.errors import RingError\nfrom ringdp.job.b import B")
    (package / "job" / "b.py").write_text("def f():\n    from ringdp.job import c")
    (package / "job" / "c.py").write_text("if TYPE_CHECKING:\n    from ringdp.job.a import A")
    assert module_circles(package) == [["job.a", "job.b", "job.c"]]
    assert circles({"a": {"b"}, "b": {"c", "x"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("collective/ring.cpp", '#include "engine/engine.h"', "does not stand to the right"),
        ("link/link.cpp", '#include "codec/codec.h"', "does not stand to the right"),
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
        ("link/link.cpp", "#include <pybind11/pybind11.h>", "knows nothing of Python"),
        ("link/link.cpp", '#include "python_errors.h"', "border to Python"),
        ("link/link.cpp", '#include "link.h"', "no file under"),
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
        ("config/environments/slurm.py", "from ringdp.job import backend", "imports ringdp.job"),
        ("diagnosis/verdict.py", "from ringdp.ddp.wrapper import RingDP", "imports ringdp.ddp"),
        ("diagnosis/remedies.py", "from ringdp.tools import top", "imports ringdp.tools"),
        ("hooks/names.py", "def f():\n    from ringdp.ddp.wrapper import RingDP", "imports ringdp.ddp"),
        ("ddp/wrapper.py", "from ringdp import testing", "imports ringdp.testing"),
        ("data/sampler.py", "from ringdp import _C", "imports ringdp._C"),
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
