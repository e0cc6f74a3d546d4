"""docs/custom_compressors.md: its Python runs, in order, and its links lead somewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import ringdp
from ringdp.compression import registry
from ringdp.testing import check_compressor
from tests.train.harness import ring_is_built

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "custom_compressors.md").read_text()
pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "RINGDP_")
    for name in [name for name in os.environ if name.startswith(launcher)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.mark.usefixtures("no_launcher")
def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for snippet in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(snippet, "custom_compressors.md", "exec"), names)
    finally:
        ringdp.shutdown()
    assert "8.12 bits an element" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="set fixed_size = False"):
        check_compressor(names["Halves"]())


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (DOCS / target).exists(), target
