"""Writes the files that are not there; see the package."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tests.train.harness import run_ranks
from tests.train.saved_states import CASES, saved


def main(names: list[str]) -> None:
    for case in CASES:
        if case.path.exists() or (names and case.name not in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(saved, case, Path(folder), world_size=case.ranks, backend=case.group)
        mean, after_mean = ranks[0]["mean"], ranks[0]["after mean"]
        exact, after_exact = [one["exact"] for one in ranks], ranks[0]["after exact"]
        content = {"exact": exact, "after exact": after_exact, "mean": mean, "after mean": after_mean}
        torch.save(content, case.path)
        print(f"{case.name}: {case.path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
