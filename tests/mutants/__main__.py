"""Shows that the tests find the faults of faults.py: python -m tests.mutants [PART OF A NAME]…

Works on a copy of the checkout in build/mutants, with one build for the faults in C++. For each fault its tests run,
which have to fail; before, without any fault, they have to pass. Exit code 1 if a fault is not found.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tests.fake_cuda.__main__ import NOT_THERE
from tests.helpers import checkout_files
from tests.mutants.faults import ALL, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mutants"
LIMIT_S = 300  # for a file of tests
HEADER = """#pragma once
#include <cstdlib>
namespace ringdp {
inline bool mutant(int number) {
  static const int chosen = [] {
    const char* text = std::getenv("RINGDP_MUTANT");
    return text == nullptr ? -1 : std::atoi(text);
  }();
  return chosen == number;
}
}  // namespace ringdp
"""


def put(path: Path, text: str) -> None:
    """Nothing that is the same already is written, so that it is not compiled again."""
    if not path.exists() or path.read_text(errors="replace") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def replaced(text: str, mutant: Mutant, instead: str) -> str:
    if text.count(mutant.text) != 1:
        sys.exit(f"tests.mutants: {mutant.name!r}: {mutant.text!r} does not stand once in {mutant.file}")
    return text.replace(mutant.text, instead)


def both(number: int, mutant: Mutant) -> str:
    chosen = f"ringdp::mutant({number})"
    if mutant.text.rstrip().endswith((";", "}")):
        return f"if ({chosen}) {{ {mutant.instead} }} else {{ {mutant.text} }}"
    return f"({chosen} ? ({mutant.instead}) : ({mutant.text}))"


def copy_checkout(mutants: dict[int, Mutant]) -> None:
    changed: dict[str, str] = {}
    for number, mutant in mutants.items():
        if mutant.file.startswith("csrc/"):
            path = f"ringdp/{mutant.file}"
            text = changed.get(path) or '#include "base/mutant.h"\n' + (ROOT / path).read_text()
            changed[path] = replaced(text, mutant, both(number, mutant))
    changed["ringdp/csrc/base/mutant.h"] = HEADER
    paths = checkout_files(ROOT)
    for path in (COPY / "copied").read_text().splitlines() if (COPY / "copied").exists() else []:
        if path not in paths:
            (COPY / path).unlink(missing_ok=True)
    put(COPY / "copied", "\n".join(paths))
    for path in paths:
        if path not in changed:
            source, target = ROOT / path, COPY / path
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
                target.touch()
    for path, text in changed.items():
        put(COPY / path, text)


def environment(mutant: Mutant | None, number: int = -1) -> dict[str, str]:
    variables = {"RINGDP_MUTANT": str(number), "PYTHONPATH": str(COPY)}
    return os.environ | variables | (device() if mutant is not None and mutant.device else {})


@functools.cache
def device() -> dict[str, str]:
    """The environment of the fake device, built of the copy."""
    asks = "import json; from tests.fake_cuda.__main__ import build, variables_of; "
    asks += "print(json.dumps(variables_of(*build(), 'lazy')))"
    said = subprocess.run([sys.executable, "-c", asks], cwd=COPY, capture_output=True, text=True, check=True)
    told: dict[str, str] = json.loads(said.stdout.splitlines()[-1])
    return told


def passes(tests: Collection[str], variables: dict[str, str], device: bool, limit_s: float) -> tuple[bool, str]:
    """Whether they do, and the first test that does not; one that does not end does not pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no"]
    selected = ["-k", NOT_THERE] if device else []
    try:
        ended = subprocess.run(
            [*command, *selected, *tests],
            cwd=COPY,
            env=variables,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end in {limit_s:g} s"
    if ended.returncode == 0:
        return True, ended.stdout.strip().splitlines()[-1]
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return False, (failed or [f"pytest's exit code {ended.returncode}"])[0][:160]


def main(names: list[str]) -> int:
    mutants = {n: it for n, it in enumerate(ALL) if not names or any(name in it.name for name in names)}
    copy_checkout(mutants)
    subprocess.run([sys.executable, "tools/environment.py"], cwd=COPY, env=environment(None), check=True)
    for device in (False, True):
        tests = {test: None for it in mutants.values() if it.device == device for test in it.tests}
        some = next((it for it in mutants.values() if it.device == device), None)
        if tests:
            good, words = passes(tests, environment(some), device, LIMIT_S * len(tests))
            print(f"{'passed' if good else 'FAILED'}  without a fault: {words}", flush=True)
            if not good:
                return 1
    missed = 0
    for number, mutant in mutants.items():
        began = time.monotonic()
        source = COPY / "ringdp" / mutant.file
        text = source.read_text()
        if source.suffix == ".py":
            source.write_text(replaced(text, mutant, mutant.instead))
        good, words = passes(mutant.tests, environment(mutant, number), mutant.device, LIMIT_S * len(mutant.tests))
        put(source, text)
        missed += good
        took_s = time.monotonic() - began
        print(f"{'MISSED' if good else 'found '}  {mutant.name} ({took_s:.0f} s): {words}", flush=True)
    print(f"{len(mutants) - missed} of {len(mutants)} faults were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
