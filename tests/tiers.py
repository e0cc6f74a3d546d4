"""The order of the files, and those that run alone: what is to be known before pytest has collected anything.

The tier of a test is its marker (pyproject.toml says what each means); without one it is of `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# These measure time or memory: nothing runs beside them. The other files of fault/ have bounds too, but wide ones: they
# passed while a dozen processes shared two cores. What nevertheless fails is run again, alone.
ALONE = (
    "fault/test_false_alarms.py",
    "fault/test_hostile.py",
    "fault/test_launch_stop.py",
    "fault/test_rank_liveness.py",
    "train/test_parallel_memory.py",
)

# These files begin first: they take longest, so that none of them is left for one process alone at the end. The others
# follow by name, at the end those of unit/, which are short.
FIRST = (
    "cpp/test_cpp.py",
    "cpp/test_threads.py",
    "unit/test_wheel.py",
    "unit/test_build.py",
    "unit/test_benchmarks.py",
    "unit/test_init.py",
    "unit/test_docs.py",
    "train/test_ddp_parity.py",
    "train/test_reproducible.py",
    "fault/test_many_hosts.py",
    "fault/test_elastic_launch.py",
    "fault/test_shared_memory.py",
    "fault/test_rank_handshake.py",
)


def place(item: pytest.Item) -> int:
    """Where a test's file comes among the others."""
    name = str(item.path.relative_to(HERE)) if HERE in item.path.parents else ""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def mark(item: pytest.Item) -> None:
    """Add the marker `alone` to the tests of those files."""
    if item.get_closest_marker("alone"):
        raise pytest.UsageError(f"{item.nodeid}: what runs alone is named in tests/tiers.py, not marked")
    if HERE in item.path.parents and str(item.path.relative_to(HERE)) in ALONE:
        item.add_marker(pytest.mark.alone)
