"""The parts of ringdp.ddp know each other by public names: none reads what another keeps for itself."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.algorithms.join
import torch.nn.parallel.distributed

DDP = Path(__file__).resolve().parents[2] / "ringdp" / "ddp"
# torch's files of which RingDP has the names, and names of torch's modules and of the logger in C++ that ours stands in
# for.
TORCHS_FILES = (torch.nn.parallel.distributed, torch.distributed.algorithms.join)
TORCHS_NAMES = {"_parameters", "_set_comm_hook_name"}


def defined(source: str) -> set[str]:
    """The private names of functions, classes, fields and attributes that a module has or assigns."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def read_of_others(folder: Path) -> Iterator[str]:
    """Private names that a module of the folder reads, or writes, and another one defines."""
    sources = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    torchs = TORCHS_NAMES.union(*(defined(inspect.getsource(module)) for module in TORCHS_FILES))
    owners: dict[str, list[Path]] = {}
    for path, source in sources.items():
        for name in defined(source) - torchs:
            owners.setdefault(name, []).append(path)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and path not in owners.get(node.attr, [path]):
                where = ", ".join(str(owner.relative_to(folder)) for owner in owners[node.attr])
                yield f"{path.relative_to(folder)}:{node.lineno}: {ast.unparse(node)} is of {where}"


def test_no_part_of_ringdp_reads_what_another_keeps() -> None:
    assert list(read_of_others(DDP)) == []


def test_such_a_read_is_found(tmp_path: Path) -> None:
    (tmp_path / "guard.py").write_text("class Guard:\n    def look(self):\n        self._seen = self._join_config")
    (tmp_path / "report.py").write_text(
        "class Report:\n    def of(self, guard):\n        return guard._seen, self._seen"
    )
    assert list(read_of_others(tmp_path)) == [
        "report.py:3: guard._seen is of guard.py",
        "report.py:3: self._seen is of guard.py",
    ]
