"""docs/migrating_from_horovod.md: what is under "after" runs, on one rank and on two; what it names exists."""

from __future__ import annotations

import ast
import os
import re
import socket
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

import ringdp
from ringdp.config import VARIABLES
from ringdp.launch import arguments
from tests.train.harness import ring_is_built, run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating_from_horovod.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
AFTER = [block for block in BLOCKS if block.startswith("# after")]

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


def run_block(index: int, port: int) -> bool:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            exec(compile(AFTER[index], PAGE.name, "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(before)
            del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return not dist.is_initialized()


@pytest.mark.parametrize("index", range(len(AFTER)))
def test_after_runs_on_two_ranks(index: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(run_block, index, port, world_size=2, backend=None) == [True, True]


def test_after_runs_on_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    exec(compile(AFTER[0], PAGE.name, "exec"), {"__name__": "__main__"})
    assert (tmp_path / "model.pt").exists()


def test_before_is_python() -> None:
    (before,) = (block for block in BLOCKS if block.startswith("# before"))
    assert "hvd.DistributedOptimizer" in before
    ast.parse(before)
    assert len(AFTER) == len(BLOCKS) - 1 == 4


def test_names_variables_and_links_exist() -> None:
    for name in re.findall(r"\bringdp\.([A-Za-z_]+)", TEXT):
        assert name in ringdp.__all__, name
    for name in re.findall(r"\bringdp\.(?:metrics|checkpoint)\.([a-z_]+)", TEXT):
        assert hasattr(ringdp.checkpoint, name) or hasattr(ringdp.metrics, name), name
    for name in re.findall(r"`(?:\w+ = )?dist\.([A-Za-z_]+)", TEXT):
        assert hasattr(dist, name), name
    assert set(re.findall(r"\bRINGDP_\w+", TEXT)) <= set(VARIABLES)
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target


def test_the_elastic_command_is_one_of_the_launcher() -> None:
    (line,) = re.findall(r"`launch\.py (--nnodes 2:4 .*?) …`", TEXT)
    assert arguments.parse([*line.split(), "train.py"]).torchrun.rdzv_backend == "c10d"
