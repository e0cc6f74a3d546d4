"""The Python on the documentation's pages runs as it stands there, in order, and their links lead somewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers import need

need("torch")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["compression.md"]


@pytest.mark.parametrize("page", PAGES)
def test_its_python_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists(), target
