"""What a rank tells its launcher when it ends: the steps of the wrapper that made most, also of one that is gone."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

from tests.forked import Program

BODY = """
    import os, sys, torch, ringdp
    ringdp.init("ring", rank=int(os.environ["OWN"]), world_size=2, init_method="file://" + os.environ["MEET"])
    def train(steps):
        model = ringdp.RingDP(torch.nn.Linear(2, 1))
        for _ in range(steps):
            with model.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2)).sum().backward()
    train(3)
    train(2)
    ringdp.shutdown()
    if os.environ["END"] == "killed":
        os.kill(os.getpid(), 9)
"""


def reports(folder: Path, end: str) -> list[str | None]:
    """Of two ranks."""
    paths = [folder / f"{end}-{rank}.json" for rank in range(2)]
    own = {"MEET": str(folder / f"meet-{end}"), "END": end}
    ranks = [
        Program(textwrap.dedent(BODY), environ=os.environ | own | {"OWN": str(rank), "RINGDP_REPORT_FILE": str(path)})
        for rank, path in enumerate(paths)
    ]
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0 if end == "well" else -9] * 2, said
    return [path.read_text() if path.exists() else None for path in paths]


def test_the_steps_of_a_process(tmp_path: Path) -> None:
    assert [json.loads(told or "{}") for told in reports(tmp_path, "well")] == [{"steps": 3}] * 2
    assert reports(tmp_path, "killed") == [None, None]
