"""The type stubs of the compiled modules, ringdp/_C.pyi and tests/core/_core.pyi: `python3 tools/stubs.py [--check]`.

pybind11-stubgen reads the built modules. `rewrite` turns its output into what type checkers accept: short names, plain
`int` and `float`, and the types of `TYPES` where a binding's signature says too little. With --check nothing is
written, and the exit code says whether the stubs are those of the build. `make stubs` and `make lint` run this file.

It needs pybind11-stubgen and ruff; tests/unit/test_stubs.py compares names and arguments without them.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("ringdp._C", "tests.core._core")
HEADER = "# Written by tools/stubs.py from the built module (make stubs); do not edit.\n"
DOCSTRING_WIDTH = 106  # of 120, less two indents and the quotes

# Types that a binding cannot tell, because C++ sees only a Python object there or a pointer that may be null:
# FUNCTION(ARGUMENT), or FUNCTION for what it returns. An entry for what the build has not is an error.
SINK = "Callable[[int, str], object]"
HOOK = "Callable[[Any, GradBucket], torch.futures.Future[Any]]"
TYPES: dict[str, dict[str, str]] = {
    "ringdp._C": {
        "algorithms": "list[dict[str, Any]]",
        "network_interfaces": "list[dict[str, Any]]",
        "PendingMesh.__init__(config)": "dict[str, Any]",
        "ModuleSnapshot.__init__(module)": "torch.nn.Module",
        "ModuleSnapshot.differs(module)": "torch.nn.Module",
        "PythonReduction.__init__(hook)": HOOK,
        "TlsBridge.__init__(config)": "dict[str, Any]",
        "simulate": "dict[str, Any]",
        "simulate(settings)": "dict[str, Any]",
        **{f"simulate_{what}": "dict[str, Any]" for what in ("start", "loss", "change")},
        **{f"simulate_{what}(costs)": "dict[str, float]" for what in ("start", "loss", "change")},
        "tls_mode(config)": "dict[str, Any]",
        "ReducerReport.bucket_rows": "list[dict[str, Any]]",
        "Reducer.register_comm_hook(hook)": HOOK,
        "Reducer.when_counted(call)": "Callable[[], None]",
        "ReducerReport.stats": "dict[str, Any]",
        "ReducerReport.times": "dict[str, int]",
        "RingFuture.add_done_callback(callback)": "Callable[[RingFuture], object]",
        "RingFuture.then(callback)": "Callable[[RingFuture], object]",
        "create_process_group(config)": "dict[str, Any]",
        "prepare_world(config)": "dict[str, Any]",
        "create_reconfigurable_process_group(config)": "dict[str, Any]",
        "create_process_group(pending)": "PendingMesh | None",
        "fail_future(exception)": "BaseException",
        "on_change(listener)": "Callable[[int, list[int], list[str], str, bool, bool], object]",
        "before_unit(body)": "Callable[[], object]",
        "run_unit(body)": "Callable[[], object]",
        "find_codec": "CodecLibrary | None",
        "registered_transports": "list[dict[str, Any]]",
        "set_log_sink(sink)": SINK,
        "set_stack_source(describe)": "Callable[[], str]",
        "set_stack_source(helper_threads)": "Callable[[], int]",
    },
    "tests.core._core": {
        "CallbackStore.__init__(find)": "Callable[[str], str | bytes | None]",
        "CallbackStore.__init__(set)": "Callable[[str, str], object]",
        "Reconfiguration.__init__(secret)": "str | bytes",
        "Runtime.__init__(secret)": "str | bytes",
        "SlowDevice.queues": "object",
        "algorithms": "list[dict[str, Any]]",
        "codec_specs": "list[dict[str, Any]]",
        "network_interfaces": "list[dict[str, Any]]",
        "registered_transports": "list[dict[str, Any]]",
        "set_log_sink(sink)": f"{SINK} | None",
    },
}
# Where the names of a stub come from. The classes of c10d have stubs there, whichever module of torch shows them.
C10D = "torch._C._distributed_c10d"
IMPORTS = {
    "Any": "typing",
    "Buffer": "typing_extensions",
    "NDArray": "numpy.typing",
    "Callable": "collections.abc",
    "Mapping": "collections.abc",
    "Sequence": "collections.abc",
    "timedelta": "datetime",
    **dict.fromkeys(("Backend", "BuiltinCommHookType", "GradBucket", "ProcessGroup", "Store", "Work"), C10D),
}
# What a type is called in a signature, and what in a stub. pybind11 takes whatever converts to a number; a caller who
# passes anything but a number has made a mistake. torch's stubs call both of its Futures torch.futures.Future.
SPELLINGS = (
    (r"\btyping\.SupportsInt( \| typing\.SupportsIndex)?", "int"),
    (r"\btyping\.SupportsFloat( \| typing\.SupportsIndex)?", "float"),
    (r"\btorch\.(_C\.)?Future\b", "torch.futures.Future[Any]"),
    (r"\btorch(\.\w+)*\.(\w+)\b", lambda it: it[2] if IMPORTS.get(it[2]) == C10D else it[0]),
    # numpy's stubs give its arrays the Buffer protocol from Python 3.12 on.
    (r"\b(typing_extensions|collections\.abc)\.Buffer\b", "Buffer | NDArray[Any]"),
    (r"\b(typing|collections\.abc|datetime)\.(\w+)", r"\2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write ringdp/_C.pyi and tests/core/_core.pyi from the built modules.")
    parser.add_argument("--check", action="store_true", help="only say whether they are those of the build")
    check = parser.parse_args().check
    if not all(is_built(module) for module in MODULES):
        if not check:
            sys.exit("ringdp: the extension is not built here: make build")
        print("ringdp: the stubs are not checked, because the extension is not built here (make build)")
        return
    other = [stub_of(module) for module in MODULES if not renew(module, check=check)]
    if check and other:
        sys.exit(f"ringdp: the extension that is built here has other stubs than {', '.join(other)}: make stubs")


def is_built(module: str) -> bool:
    return any((ROOT / stub_of(module)).with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)


def stub_of(module: str) -> str:
    return f"{module.replace('.', '/')}.pyi"


def renew(module: str, *, check: bool) -> bool:
    """Write the stub, or with `check` print what would change. Whether it was right before."""
    path = ROOT / stub_of(module)
    old, new = path.read_text(), generate(module)
    if check:
        names = stub_of(module), f"{stub_of(module)} of the build"
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *names))
    elif old != new:
        path.write_text(new)
    return old == new


# --- making a stub


def generate(module: str) -> str:
    """The stub of a built module, in this project's style."""
    # Not an installed ringdp, which `import torch` would load.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "--exit-code", "-o", folder, module]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"ringdp: pybind11-stubgen cannot read {module}:\n{done.stderr or done.stdout}")
        text = (Path(folder) / stub_of(module)).read_text()
    text = rewrite(text, TYPES[module])
    for words in (("check", "--fix-only"), ("format",)):
        ruff = [sys.executable, "-m", "ruff", *words, "--quiet", "--stdin-filename", stub_of(module), "-"]
        text = subprocess.run(ruff, cwd=ROOT, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return text


def rewrite(text: str, types: dict[str, str]) -> str:
    """What pybind11-stubgen wrote, with the types of `types` and the names of `SPELLINGS` and `IMPORTS`."""
    tree = ast.parse(text)
    # Without its docstring (`help` reads the module's), __all__ (the modules have none) and imports of the long names.
    tree.body = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    left = dict(types)
    for place, function in functions(tree.body):
        for argument in every_argument(function.args):
            if argument.annotation is not None:
                said = ast.unparse(argument.annotation)
                argument.annotation = parsed_type(left.pop(f"{place}({argument.arg})", said))
        if function.returns is not None:
            function.returns = parsed_type(left.pop(place, ast.unparse(function.returns)))
        function.args.defaults = [simple(value) for value in function.args.defaults]
        function.args.kw_defaults = [value and simple(value) for value in function.args.kw_defaults]
        mark_unnamed(function.args)
    if left:
        sys.exit(f"ringdp: the build has no {', '.join(left)}, which TYPES in tools/stubs.py has")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.bases = [parsed_type(ast.unparse(base)) for base in node.bases]
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            wrap_docstring(node)
    return f"{HEADER}{imports(tree)}\n{ast.unparse(tree)}\n"


def functions(body: Iterable[ast.stmt], inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a stub with their places: ("Reducer.stats", its node)."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield inside + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{inside}{node.name}.")


def every_argument(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def parsed_type(text: str) -> ast.expr:
    for pattern, name in SPELLINGS:
        text = re.sub(pattern, name, text)
    return ast.parse(text, mode="eval").body


def simple(default: ast.expr) -> ast.expr:
    """A list or a dict as `...`: only constants say something."""
    return default if isinstance(default, ast.Constant) else ast.Constant(...)


def mark_unnamed(arguments: ast.arguments) -> None:
    """An argument without a name, which pybind11 calls arg0, can be passed by position only."""
    unnamed = [i for i, argument in enumerate(arguments.args) if re.fullmatch(r"arg\d+", argument.arg)]
    if unnamed:
        end = unnamed[-1] + 1
        arguments.posonlyargs, arguments.args = arguments.args[:end], arguments.args[end:]


def wrap_docstring(node: ast.ClassDef | ast.FunctionDef) -> None:
    text = ast.get_docstring(node)
    if text is not None:
        lines = [line for long in text.splitlines() for line in textwrap.wrap(long, DOCSTRING_WIDTH) or [""]]
        node.body[0] = ast.Expr(ast.Constant("\n".join(lines) + ("\n" if len(lines) > 1 else "")))


def imports(tree: ast.Module) -> str:
    """Of the names that a stub uses and does not define; ruff sorts them."""
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - defined
    lines = [f"from {module} import {name}" for name, module in IMPORTS.items() if name in used]
    whole = {text.rpartition(".")[0] for node in ast.walk(tree) if (text := dotted(node)).startswith("torch.")}
    return "\n".join([*lines, *(f"import {module}" for module in whole)]) + "\n"


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


if __name__ == "__main__":
    main()
