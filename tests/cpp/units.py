"""Units of C++ tests, as tools/unity.py makes them: `python3 units.py NAME test_a test_b …` prints what to compile.

Most of the time of compiling a test goes into the core's headers, which a unit parses once. Standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))
import unity  # noqa: E402


def names(file: Path) -> set[str]:
    """What two files of a unit must not both define."""
    text = (HERE / file).read_text()
    return unity.local_names(text) | set(re.findall(r"^(?:using|#define) (\w+)(?: = |\()", text, re.M))


def units(name: str, tests: list[str]) -> list[str]:
    files = [Path(f"{test}.cpp") for test in tests]
    if not unity.switched_on():
        return [str(file) for file in files]
    folder = unity.ROOT / unity.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    compiled = []
    for index, unit in enumerate(unity.share(files, names)):
        path = folder / f"{name}_{index + 1}.cpp"
        unity.write_if_changed(path, [unity.CSRC / file for file in unit])
        compiled.append(f"../../{unity.FOLDER}/{path.name}")
    return compiled


if __name__ == "__main__":
    print(*units(sys.argv[1], sys.argv[2:]))
