"""docs/migrating_from_ddp.md says what the table of arguments says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers import need

need("torch")
from ringdp.ddp_arguments import TABLE  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "migrating_from_ddp.md").read_text()


@pytest.mark.parametrize("name", TABLE)
def test_every_argument_is_documented_as_it_is(name: str) -> None:
    assert f"| `{name}` | {TABLE[name].does} |" in PAGE


def test_nothing_else_is_documented_as_an_argument() -> None:
    section = PAGE.split("## Arguments")[1].split("## Methods")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(TABLE)


@pytest.mark.filterwarnings("error")
def test_its_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(snippet, "migrating_from_ddp.md", "exec"), {})


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (DOCS / target).exists(), target
