"""Unity units: files that include the .cpp files of a folder, so that their headers are parsed once for all of them.

Most of the time of compiling goes into headers: torch's take 3 to 20 seconds for each file that includes them. setup.py
and tests/cpp/Makefile compile the units of this module. RINGDP_UNITY=0 in the environment switches them off, so that an
edit of one file compiles that file alone.

Files are found by their folder and grouped by the tables below; a new file needs no entry. Two files that define the
same file-local name go into different units. `python3 tools/unity.py FOLDER...` writes the units of folders of
ringdp/csrc and prints what to compile. Standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = Path("ringdp/csrc")
FOLDER = Path("build/unity")

# Folders of the core whose files are compiled together. Those of `codec` and `kernels` are not: each is compiled for an
# instruction set of its own or is arithmetic that must stay as it is.
TOGETHER = ("base", "transport", "link", "shared", "meet", "device", "collective", "simulation", "membership", "engine")
# These stay alone, because a header of theirs excludes one that others in their folder include.
ALONE = {"transport/tcp_health.cpp": "<linux/tcp.h> and <netinet/tcp.h> define the same structures"}
# The folders of csrc/torch, and the group in which each is compiled. A file that includes pybind11 belongs to
# "bindings", wherever it lies.
TORCH_GROUPS = {"bindings": "bindings", "reducer": "reducer", "backend": "backend", "device": "backend"}
PYTHON_HEADERS = re.compile(
    r"^#include (<pybind11/|<torch/csrc/(utils/pybind|jit/python/|distributed/c10d/python_)"
    r'|"torch/bindings/bindings\.h")',
    re.M,
)


def switched_on() -> bool:
    return os.environ.get("RINGDP_UNITY", "1") != "0"


def sources(*folders: str, suffix: str = "cpp") -> list[Path]:
    """The files of folders of csrc, relative to the root of the project."""
    return [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / CSRC / folder).glob(f"*.{suffix}"))]


def core_units(*folders: str) -> list[str]:
    """The files to compile for these folders of the core: a unit for each folder of `TOGETHER`, the other files
    alone."""
    compiled = []
    for folder in folders:
        if switched_on() and folder in TOGETHER:
            compiled += write_units(folder, sources(folder))
        else:
            compiled += [str(path) for path in sources(folder)]
    return compiled


def torch_sources() -> list[Path]:
    return sources(*(f"torch/{folder}" for folder in TORCH_GROUPS))


def torch_units() -> tuple[list[str], list[str]]:
    """The files to compile of csrc/torch: the bindings, which are glue and need little optimisation, and the others."""
    groups: dict[str, list[Path]] = {name: [] for name in TORCH_GROUPS.values()}
    for path in torch_sources():
        groups[torch_group(path)].append(path)
    if not switched_on():
        bindings = groups.pop("bindings")
        return [str(p) for p in bindings], [str(p) for group in groups.values() for p in group]
    units = {name: write_units(f"torch_{name}", group) for name, group in groups.items()}
    bindings_units = units.pop("bindings")
    return bindings_units, [unit for group in units.values() for unit in group]


def torch_group(path: Path) -> str:
    return "bindings" if PYTHON_HEADERS.search((ROOT / path).read_text()) else TORCH_GROUPS[path.parent.name]


def write_units(name: str, files: list[Path]) -> list[str]:
    """Write the units of a group, one or, where names clash, several; returns what to compile."""
    alone = [path for path in files if str(path.relative_to(CSRC)) in ALONE]
    units = share([path for path in files if path not in alone], lambda path: local_names((ROOT / path).read_text()))
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    compiled = []
    for index, unit in enumerate(units):
        path = FOLDER / (f"{name}.cpp" if index == 0 else f"{name}_{index + 1}.cpp")
        write_if_changed(ROOT / path, unit)
        compiled.append(str(path))
    return compiled + [str(path) for path in alone]


def share(files: list[Path], names: Callable[[Path], set[str]]) -> list[list[Path]]:
    """Files in units: each in the first one that has none of its file-local names."""
    units: list[list[Path]] = []
    taken: list[set[str]] = []
    for path in files:
        own = names(path)
        index = next((index for index, others in enumerate(taken) if not others & own), len(units))
        if index == len(units):
            units.append([])
            taken.append(set())
        units[index].append(path)
        taken[index] |= own
    return units


def size_of(source: Path) -> int:
    """The size of a file, or of all files that a unit includes: a measure of how long it takes to compile."""
    if FOLDER not in source.parents:
        return (ROOT / source).stat().st_size
    included = re.findall(r'^#include "(.*)"$', (ROOT / source).read_text(), re.M)
    return sum((ROOT / CSRC / name).stat().st_size for name in included)


def local_names(text: str) -> set[str]:
    """The names that a file defines in unnamed namespaces, which clang-format does not indent."""
    names = set()
    for inside in re.findall(r"^namespace \{\n(.*?)^\}  // namespace$", text, re.M | re.S):
        names |= set(re.findall(r"^(?:struct|class|enum|enum class|union) (\w+)\b", inside, re.M))
        names |= set(
            re.findall(
                r"^(?!using |namespace )(?:\[\[\w+\]\] )?(?:\w[\w:<>,*& ]*[ *&>])(\w+)(?:\(|\{| =|;|\[)", inside, re.M
            )
        )
    return names


def write_if_changed(path: Path, files: Iterable[Path]) -> None:
    """ninja and make compare times, so a unit whose list is the same stays as it is."""
    lines = [f'#include "{file.relative_to(CSRC)}"' for file in files]
    text = "// Written by tools/unity.py.\n" + "\n".join(lines) + "\n"
    if path.exists() and path.read_text() == text:
        return
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    print(*core_units(*sys.argv[1:]))
