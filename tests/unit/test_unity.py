"""What is compiled together: every file once, and no two files of a unit with the same file-local name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    "base",
    "transport",
    "link",
    "shared",
    "meet",
    "kernels",
    "codec",
    "device",
    "collective",
    "simulation",
    "membership",
    "engine",
)
TORCH = ("torch/backend", "torch/device", "torch/reducer", "torch/bindings")


@pytest.fixture
def unity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delenv("RINGDP_UNITY", raising=False)
    return importlib.import_module("unity")


def files_in(compiled: list[str]) -> list[str]:
    """The files of csrc that these sources are or include."""
    files = []
    for source in compiled:
        if source.startswith("build/unity/"):
            included = re.findall(r'^#include "(.*)"$', (ROOT / source).read_text(), re.MULTILINE)
            files += [f"ringdp/csrc/{name}" for name in included]
        else:
            files.append(source)
    return sorted(files)


def every(*folders: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for name in folders for path in (ROOT / "ringdp" / "csrc" / name).glob("*.cpp")
    )


def test_every_file_is_compiled_once(unity: ModuleType) -> None:
    core = unity.core_units(*CORE)
    bindings, others = unity.torch_units()
    assert files_in(core) == every(*CORE)
    assert files_in([*bindings, *others]) == every(*TORCH)
    assert len([*core, *bindings, *others]) < len(every(*CORE, *TORCH)) / 3


def test_each_file_is_compiled_by_itself_when_it_is_switched_off(
    unity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGDP_UNITY", "0")
    bindings, others = unity.torch_units()
    assert sorted(unity.core_units(*CORE)) == every(*CORE)
    assert sorted([*bindings, *others]) == every(*TORCH)
    assert "ringdp/csrc/torch/bindings/reducer_bindings.cpp" in bindings
    assert "ringdp/csrc/torch/reducer/reducer.cpp" in others


def test_kernels_and_codecs_stay_alone(unity: ModuleType) -> None:
    assert unity.core_units("kernels", "codec") == [*every("kernels"), *every("codec")]


TEXT = """
namespace ringdp {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPause{100};
constexpr auto kLimit = 3;
static int counter;
std::map<int, std::string> table[4];

struct Local {
  int inside = 0;
};

[[noreturn]] void refuse(const std::string& why) { throw why; }
Clock::time_point now() {
  int inside_a_function = 0;
  return helper(inside_a_function);
}

}  // namespace

int Shared::outside() { return 0; }
"""


def test_file_local_names_are_found(unity: ModuleType) -> None:
    names = unity.local_names(TEXT)
    assert {"kPause", "kLimit", "counter", "table", "Local", "refuse", "now"} == names


def test_files_with_the_same_local_name_are_kept_apart(unity: ModuleType) -> None:
    names = {"a": {"x"}, "b": {"y"}, "c": {"x"}, "d": {"z", "y"}, "e": {"x"}}
    units = unity.share([Path(name) for name in names], lambda path: names[str(path)])
    assert [[str(path) for path in unit] for unit in units] == [["a", "b"], ["c", "d"], ["e"]]
