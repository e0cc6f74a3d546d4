"""What README.md promises: its Python runs, its command lines parse, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

import ringdp
from ringdp.config import VARIABLES, RingConfig
from ringdp.launch import arguments

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def first_line(snippet: str) -> str:
    return " ".join(line for line in snippet.splitlines() if "init" in line or "issubclass" in line)[:40]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("snippet", blocks("python"), ids=first_line)
def test_python_runs(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "RINGDP_")
    for name in [name for name in os.environ if name.startswith(launcher)]:
        monkeypatch.delenv(name)
    try:
        exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        ringdp.shutdown()


def test_launch_lines_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "RINGDP_"))]:
        monkeypatch.delenv(name)
    secret = tmp_path / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text("ab" * 32)
    launches = [words[2:] for words in commands() if words[:2] == ["python", "launch.py"]]
    assert len(launches) == 1 + 4
    parsed = [arguments.parse(words).torchrun for words in launches]
    assert {it.training_script for it in parsed} == {"train.py"}
    assert [(it.nnodes, it.node_rank) for it in parsed[1:]] == [("4", rank) for rank in range(4)]
    assert {(it.master_addr, it.master_port) for it in parsed[1:]} == {("10.0.0.1", 29500)}


def test_the_ports_are_the_same_in_commands_and_firewall() -> None:
    text = README.split("### Four machines")[1].split("\n## ")[0]
    low, high = RingConfig.from_environment(
        {"RINGDP_PORT_RANGE": re.findall(r"PORT_RANGE=(\S+)", text)[0]}
    ).port_range or (0, 0)
    assert {*re.findall(r"(?:port|--dport) (\d[\d:]*)", text)} == {"29500", f"{low}:{high}"}
    assert high - low >= int(re.findall(r"--nproc-per-node (\d+)", text)[0])


def test_every_example_is_in_the_table() -> None:
    table = README.split("## Examples")[1].split("\n## ")[0]
    assert sorted(re.findall(r"\(examples/(\w+\.py)\)", table)) == sorted(
        it.name for it in (ROOT / "examples").glob("*.py")
    )


def test_commands_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands():
        if words[0] == "make":
            assert words[1] in targets
        for word in words:
            if word.endswith(".py") and word != "train.py":
                assert (ROOT / word).is_file(), word


def test_links_and_paths_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_settings_are_the_variables_there_are() -> None:
    assert set(re.findall(r"`(RINGDP_\w+)`", README)) == set(VARIABLES)


def test_names_are_public() -> None:
    for name in re.findall(r"\bringdp\.([A-Za-z_]+)", " ".join(blocks("python"))):
        assert name in ringdp.__all__, name
