"""The stubs of the compiled modules say what those have: every name, and every function's arguments.

Types are compared by `make lint`, which has pybind11-stubgen (tools/stubs.py --check).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import need

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("ringdp._C", "tests.core._core")


def differences(module: ModuleType, stub: str) -> list[str]:
    """What a stub says otherwise than its module, a sentence each."""
    built, told = dict(of_build(vars(module))), dict(of_stub(ast.parse(stub).body))
    return sorted(
        f"{place}: {built.get(place, 'nothing')} in the build, {told.get(place, 'nothing')} in the stub"
        for place in built.keys() | told.keys()
        if built.get(place) != told.get(place)
    )


def of_build(names: Mapping[str, object], inside: str = "") -> Iterator[tuple[str, str]]:
    """Places and what is there: ("Reducer.find", "(self, tensors)")."""
    for name, value in names.items():
        if name.startswith("_pybind11_") or (name.startswith("__") and not counts(name, value)):
            continue
        if inspect.isclass(value):
            bases = [base.__name__ for base in value.__bases__ if base.__name__ != "pybind11_object"]
            yield inside + name, f"class({', '.join(bases)})"
            yield from of_build(vars(value), f"{inside}{name}.")
        elif isinstance(value, property):
            yield inside + name, "property" if value.fset is None else "attribute"
        else:
            yield inside + name, arguments_of(inspect.getdoc(value) or "")


def counts(name: str, value: object) -> bool:
    """A constructor, what makes it callable, or a block: others are Python's own, or pybind11's."""
    counted = name in ("__init__", "__call__", "__enter__", "__exit__")
    return counted and (inspect.getdoc(value) or "").startswith(f"{name}(")


def arguments_of(doc: str) -> str:
    """Of the signature with which pybind11 begins a function's documentation."""
    signature = doc.partition("\n")[0]
    try:
        [function] = ast.parse(f"def {signature}: ...").body
    except SyntaxError:
        return f"a signature that is not Python's: {signature}"
    assert isinstance(function, ast.FunctionDef)
    return words_of(function.args)


def of_stub(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in node.bases]
            yield inside + node.name, f"class({', '.join(bases)})"
            yield from of_stub(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            written = ["attribute" if one.endswith(".setter") else one for one in decorators]  # after its @property
            yield inside + node.name, ", ".join(written) or words_of(node.args)
        elif isinstance(node, ast.AnnAssign):
            yield inside + ast.unparse(node.target), "attribute"


def words_of(arguments: ast.arguments) -> str:
    """Names, kinds and which have a default: "(self, key, *, timeout_ms=...)". arg0 has no name."""
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.args, arguments.posonlyargs = [*arguments.posonlyargs, *arguments.args], []
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


@pytest.mark.parametrize("name", MODULES)
def test_a_stub_is_that_of_the_build(name: str) -> None:
    module = need(name, "ringdp's extension, built with `make build`,")
    found = differences(module, (ROOT / f"{name.replace('.', '/')}.pyi").read_text())
    assert found == [], "the extension or its stubs are old: `make stubs` builds, and writes them"


@pytest.mark.parametrize(
    ("line", "other", "complaint"),
    [
        ("    def done(self) -> bool: ...\n", "", "Work.done: (self) in the build, nothing in the stub"),
        ("def isa()", "def iza()", "isa: () in the build, nothing in the stub"),
        ("def isa()", "def iza()", "iza: nothing in the build, () in the stub"),
        (
            "class MemoryStore(Store)",
            "class MemoryStore",
            "MemoryStore: class(Store) in the build, class() in the stub",
        ),
        (
            "def wait(self, timeout_ms: int = 0)",
            "def wait(self, timeout: int = 0)",
            "Work.wait: (self, timeout_ms=...) in the build, (self, timeout=...) in the stub",
        ),
        (
            "def set(self, key: str, value: str)",
            "def set(self, key: str, value: str = ...)",
            "MemoryStore.set: (self, key, value) in the build, (self, key, value=...) in the stub",
        ),
        (
            "def get(self, key: str, *, timeout_ms",
            "def get(self, key: str, timeout_ms",
            "MemoryStore.get: (self, key, *, timeout_ms=...) in the build, (self, key, timeout_ms=...) in the stub",
        ),
        (
            "    @property\n    def finite(self) -> bool: ...\n",
            "    finite: bool\n",
            "FiniteReport.finite: property in the build, attribute in the stub",
        ),
    ],
)
def test_a_wrong_stub_is_found(line: str, other: str, complaint: str) -> None:
    module = need("tests.core._core", "ringdp's extension, built with `make build`,")
    stub = (ROOT / "tests" / "core" / "_core.pyi").read_text()
    assert stub.count(line) == 1
    assert complaint in differences(module, stub.replace(line, other))


def test_a_signature_in_cpp_is_found() -> None:
    """As pybind11 writes one where a class is bound after a function that takes it."""
    assert "not Python's" in arguments_of("meet(pending: ringdp::PendingMesh = None) -> None\n\nWaits.")
    assert arguments_of("meet(pending: ringdp._C.PendingMesh = None) -> None\n\nWaits.") == "(pending=...)"
