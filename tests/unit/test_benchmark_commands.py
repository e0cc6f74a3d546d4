"""`python -m benchmarks` lists each benchmark, each explains itself, and the documents' commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import need  # noqa: E402

need("sklearn", "scikit-learn")  # the digits

from benchmarks.__main__ import RUNNABLES, listed, main, module_of  # noqa: E402
from benchmarks.lib import session  # noqa: E402

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    "docs/lab/benchmarks.md": 3,
    "docs/how-to/compression.md": 0,
    "docs/lab/compression_measured.md": 3,
    "docs/lab/elastic.md": 3,
    "docs/lab/far_apart.md": 1,
}
"""And how many commands of benchmarks each has at least."""


def test_what_has_a_command_line_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert listed() in capsys.readouterr().out
    modules = {it.module for it in RUNNABLES.values()}
    for path in (ROOT / "benchmarks").glob("*/*.py"):
        runs = re.search(r"^def (options|main)\(", path.read_text(), re.MULTILINE)
        name = f"{path.parent.name}.{path.stem}"
        assert (name in modules) == bool(runs) or path.stem == "session" or path.stem.endswith("_rank"), name
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize("name", RUNNABLES)
def test_help_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "options:" in out
    assert out.startswith(f"usage: python -m benchmarks {name}")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("allreduce --sizes 4q", "is not a size"),
        ("allreduce --sizes 6", "positive multiple of 4"),
        ("allreduce --peers nccl", "'nccl' is not known: choose from gloo, mpi"),
        ("allreduce --ranks 3 --hosts 2", "cannot be spread evenly"),
        ("allreduce --ranks-per-host 2", "goes with --hosts"),
        ("allreduce --percentiles 101", "between 0 and 100"),
        ("step --modes nonsense", "'nonsense' is not known: choose from bare,"),
        ("step --modes bare --against ringdp", "'ringdp' is not known: choose from bare"),
        ("time_to_loss --modes bare", "'bare' is not known"),
        ("compression_quality gpt --methods nonsense", "'nonsense' is not known: choose from exact;"),
        ("compression_quality gpt --methods exact;topk DGC", "momentum on the ranks"),
        ("elastic_peers --ranks 2", "3 to 8 ranks are needed"),
        ("churn --every x", "could not convert"),
        ("churn --delay 5ms --ranks 5", "the ranks are split over two hosts"),
        ("startup --ranks 2,0", "--ranks must be 1 or more"),
        ("rounds overlap --every 0", "--every must be 1 or more"),
        ("rounds_late --period 0", "--period is above 0"),
        ("rounds_loss --warm-up 1", "from 0 to below 1"),
        ("kernels --fraction nan", "above 0 and at most 1"),
        ("tune --ranks 1", "--ranks must be 2 or more"),
        ("hosts run --hosts 2", "which command?"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, options = command.partition(" ")
    given = options.split(" ", 2) if ";" in options else shlex.split(options)
    with pytest.raises(SystemExit) as ended:
        main([name, *given])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("document", "least"), DOCUMENTS.items())
def test_the_commands_in_the_documents_parse(document: str, least: int) -> None:
    text = (ROOT / document).read_text().replace("\\\n", "")
    lines = re.findall(r"^(?:sudo )?python -m benchmarks (\S+) ?(.*)$", text, re.MULTILINE)
    assert len(lines) >= least
    for name, options in lines:
        module, words = module_of(name), shlex.split(options, comments=True)
        module.parse(words) if hasattr(module, "parse") else session.parse(module, words, name)
