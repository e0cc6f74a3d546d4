"""tools/carried_build.py: a build made elsewhere is used only if it is of these sources and can be imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ringdp")

ROOT = Path(__file__).resolve().parents[2]
BUILT = ("ringdp/_*.so", "ringdp/_build_info.py", "tests/core/_*.so")
DIGEST = (
    "import sys, json; sys.path.insert(0, 'tools'); import carried_build; "
    "print(json.dumps(carried_build.made_from('9.0')))"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources, and in .gpu the build that these tests run with."""
    shutil.copytree(ROOT / "ringdp", tmp_path / "ringdp", ignore=shutil.ignore_patterns("_*.so", "_build_info.py"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "tests" / "core", tmp_path / "tests" / "core", ignore=shutil.ignore_patterns("_*.so"))
    shutil.copy2(ROOT / "tests" / "__init__.py", tmp_path / "tests")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)
    carried = tmp_path / ".gpu"
    (carried / "ringdp.egg-info").mkdir(parents=True)
    for pattern in BUILT:
        for path in ROOT.glob(pattern):
            target = carried / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    made = subprocess.run([sys.executable, "-c", DIGEST], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    (tmp_path / ".gpu" / "made_from.json").write_text(json.dumps(json.loads(made.stdout)))
    return tmp_path


def use(tree: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "tools/carried_build.py", "use"], cwd=tree, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def built(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for pattern in BUILT for path in tree.glob(pattern))


def test_what_can_be_imported_is_used(tree: Path) -> None:
    assert use(tree) == (0, "ringdp: the build in .gpu is used\n")
    assert built(tree) == built(tree / ".gpu")
    done = subprocess.run([sys.executable, "-c", "from ringdp import _C; print(_C.__file__)"], cwd=tree,
                          stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    assert Path(done.stdout.strip()).parent == tree / "ringdp"


def test_what_cannot_be_imported_is_not(tree: Path) -> None:
    (module,) = (tree / ".gpu" / "ringdp").glob("_C.*.so")
    module.write_text("of another machine")
    status, text = use(tree)
    assert status == 1
    assert text.startswith("ringdp: the build in .gpu is not used: ImportError: ")
    assert built(tree) == []


def test_one_of_other_sources_is_not(tree: Path) -> None:
    with open(tree / "ringdp" / "csrc" / "base" / "bytes.h", "a") as file:
        file.write("// another line\n")
    assert use(tree) == (1, "ringdp: the build in .gpu is not used: it was made from other sources than these\n")
    assert built(tree) == []


def test_without_one_it_says_so(tree: Path) -> None:
    shutil.rmtree(tree / ".gpu")
    assert use(tree) == (1, "ringdp: the build in .gpu is not used: there is no .gpu/made_from.json\n")
