"""The scripts of docs/how-to/integrations.md, as they stand there, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.environment import ROOT, output_of, python_with

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]

PAGE = (ROOT / "docs" / "how-to" / "integrations.md").read_text()
SCRIPTS = dict(re.findall(r"^## ([^\n]*)\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
PACKAGES = {
    "Lightning Fabric": ("lightning",),
    "Lightning Trainer": ("lightning",),
    "Hugging Face Accelerate": ("accelerate",),
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "Ray Train": ("ray",),
}


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=pytest.mark.slow) if "Ray" in name else name for name in PACKAGES]
)
def test_the_script_trains_a_ringdp(library: str, tmp_path: Path) -> None:
    assert set(SCRIPTS) == set(PACKAGES)
    (tmp_path / "script.py").write_text(SCRIPTS[library])
    command = [str(python_with(*PACKAGES[library]))]
    if library != "Ray Train":
        command += ["-m", "ringdp.launch", "--nproc-per-node", "2"]
    assert "trained with RingDP" in output_of([*command, "script.py"], tmp_path)
