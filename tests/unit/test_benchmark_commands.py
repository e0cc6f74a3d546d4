"""The benchmarks print their help, and understand every command that the documents give."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import need  # noqa: E402

need("sklearn", "scikit-learn")  # the digits
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # the tools are scripts: they find each other beside themselves

import allreduce  # noqa: E402
import auto_compression  # noqa: E402
import checksum  # noqa: E402
import churn  # noqa: E402
import compression_plots  # noqa: E402
import compression_quality  # noqa: E402
import elastic  # noqa: E402
import elastic_peers  # noqa: E402
import embedding  # noqa: E402
import far  # noqa: E402
import far_loss  # noqa: E402
import guard  # noqa: E402
import hosts  # noqa: E402
import kernels  # noqa: E402
import kvstore  # noqa: E402
import long_line  # noqa: E402
import memory  # noqa: E402
import plots  # noqa: E402
import reconfigure  # noqa: E402
import reducer  # noqa: E402
import rounds  # noqa: E402
import selection  # noqa: E402
import startup  # noqa: E402
import step  # noqa: E402
import strangers  # noqa: E402
import time_to_loss  # noqa: E402
import tune  # noqa: E402

pytestmark = pytest.mark.nightly
import unequal  # noqa: E402

TOOLS = (
    allreduce,
    auto_compression,
    checksum,
    churn,
    compression_plots,
    compression_quality,
    elastic,
    elastic_peers,
    embedding,
    far,
    far_loss,
    guard,
    hosts,
    kernels,
    kvstore,
    long_line,
    memory,
    plots,
    reconfigure,
    reducer,
    rounds,
    selection,
    startup,
    step,
    strangers,
    time_to_loss,
    tune,
    unequal,
)
PARSERS = {f"{tool.__name__}.py": tool.parse for tool in TOOLS}
DOCUMENTS = {
    "docs/lab/benchmarks.md": 3,
    "docs/how-to/compression.md": 0,
    "docs/lab/compression_measured.md": 3,
    "docs/lab/elastic.md": 3,
    "docs/lab/far_apart.md": 1,
}
"""And how many commands of benchmarks each has at least."""


@pytest.mark.parametrize("tool", PARSERS)
def test_help_is_printed(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        PARSERS[tool](["--help"])
    assert ended.value.code == 0
    assert "options:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "options", "words"),
    [
        ("time_to_loss.py", "--modes nonsense", "'nonsense' is not known: choose from ddp-gloo,"),
        ("time_to_loss.py", "--modes bare", "'bare' is not known"),
        ("step.py", "--modes nonsense", "'nonsense' is not known: choose from bare,"),
        ("compression_quality.py", "gpt --methods nonsense", "'nonsense' is not known: choose from exact;"),
        ("checksum.py", "--meetings 1", "at least two meetings"),
        ("checksum.py", "--sizes 6", "positive multiple of 4"),
        ("checksum.py", "--ranks 1", "at least two are needed"),
        ("reconfigure.py", "--ranks 1", "at least two ranks"),
        ("elastic.py", "--losses 1", "at least two ranks"),
        ("elastic_peers.py", "--ranks 2", "3 to 8 ranks are needed"),
        ("elastic_peers.py", "--peers nonsense", "'nonsense' is not known: choose from ringdp, torchft, horovod"),
        ("churn.py", "--ranks 1", "at least two ranks"),
        ("churn.py", "--faults flood", "'flood' is not known: choose from kill,"),
        ("startup.py", "--ranks 2,0", "at least one is needed"),
        ("startup.py", "--peers mpi", "'mpi' is not known: choose from ring, gloo"),
        ("kvstore.py", "--models nonsense", "'nonsense' is not known: choose from mlp, gpt, small"),
        ("guard.py", "--every x", "a list of numbers like default,100,500"),
        ("unequal.py", "--models nonsense", "'nonsense' is not known: choose from mlp, gpt"),
        ("rounds.py", "loss --runs nonsense", "'nonsense' is not known: choose from RingDP"),
        ("unequal.py", "--ranks 1", "at least two ranks"),
        ("selection.py", "--numel 0", "at least one element"),
        ("selection.py", "--rounds 0", "one round"),
        ("selection.py", "--fraction nan", "above 0 and at most 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    tool: str, options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PARSERS[tool](shlex.split(options))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("document", "least"), DOCUMENTS.items())
def test_the_commands_in_the_documents_parse(document: str, least: int) -> None:
    lines = re.findall(r"^(?:sudo )?python benchmarks/(\S+) ?(.*)$", (ROOT / document).read_text(), re.MULTILINE)
    assert len(lines) >= least
    for tool, options in lines:
        PARSERS[tool](shlex.split(options))
