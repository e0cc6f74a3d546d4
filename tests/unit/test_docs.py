"""The documentation: all of its Python runs, its commands can be typed, its links lead somewhere, its tables are true.

Each Python block of each page runs by itself unless a table here says otherwise, so a new page needs no entry.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

need("torch")
import torch.distributed as dist  # noqa: E402

import ringdp  # noqa: E402
from ringdp.compression import registry  # noqa: E402
from ringdp.config import VARIABLES, RingConfig, tuning, variables  # noqa: E402
from ringdp.ddp.arguments import ARGUMENTS  # noqa: E402
from ringdp.launcher import arguments  # noqa: E402
from ringdp.testing import check_compressor  # noqa: E402
from tests.train.harness import ring_is_built, run_ranks  # noqa: E402
from tests.unit import doc_pages as pages  # noqa: E402
from tests.unit.doc_pages import ROOT, Block  # noqa: E402

FROM_DDP, FROM_HOROVOD = "docs/how-to/migrating_from_ddp.md", "docs/how-to/migrating_from_horovod.md"
CHECKPOINTS, LAUNCHING = "docs/how-to/checkpoints.md", "docs/how-to/launching.md"
ARCHITECTURE, MAP = "docs/design/architecture.md", "docs/design/map.md"
CUSTOM, AMP = "docs/start/custom_compressors.md", "docs/how-to/amp.md"
PAGES = pages.all_pages()
# Their blocks share their names and run in order.
IN_ORDER = [CUSTOM]
# Their files and commands are followed as they stand there, and what is printed is compared.
WALKS = ["docs/start/first_job.md", "docs/start/slow_network.md"]
# Need a library that is not here: tests/integrations/test_docs.py and test_torchft.py run them.
ELSEWHERE = ["docs/how-to/integrations.md", "docs/how-to/torchft.md"]
# Needs torch 2.14.
RECONFIGURE = "docs/how-to/reconfigure.md"
SETTINGS = "docs/reference/settings.md"
# Set by ringdp for the processes that a rank starts; a level that a logger gets.
NOT_READ_BY_A_VALUE = ["RINGDP_DOOR", "RINGDP_RANK_PROCESS", "RINGDP_LOG_LEVEL"]
# Uses a function of torch that newer versions deprecate.
MAY_WARN = [FROM_HOROVOD]

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


def python_blocks() -> list[Block]:
    return [block for page in PAGES for block in pages.blocks(page, "python")]


def alone() -> list[Block]:
    """The blocks that run by themselves in this process."""
    others = [*IN_ORDER, *WALKS, *ELSEWHERE]
    return [block for block in python_blocks() if block.page not in others and not block.text.startswith("# before")]


def after_horovod() -> list[Block]:
    return [block for block in pages.blocks(FROM_HOROVOD, "python") if block.text.startswith("# after")]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder, no launcher's variables, and a registry of compressors that is put back."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "RINGDP_", "PET_")
    for name in [name for name in os.environ if name.startswith(launcher)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    return tmp_path


def execute(block: Block, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the block; an error's traceback has the page's lines."""
    names = {"__name__": "__main__"} if names is None else names
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    return names


# Python


def test_no_python_is_left_out() -> None:
    """Every block is run, and there are as many as when this was written, or more."""
    run = {*map(str, alone())} | {str(it) for page in [*IN_ORDER, *WALKS, *ELSEWHERE] for it in pages.blocks(page)}
    left = [block for block in python_blocks() if str(block) not in run]
    assert [block.page for block in left] == [FROM_HOROVOD]  # its "# before"
    least = {"README.md": 3, CHECKPOINTS: 1, "docs/reference/errors.md": 1, "docs/how-to/compression.md": 5}
    least |= {FROM_DDP: 1, FROM_HOROVOD: 5, CUSTOM: 10, AMP: 1, WALKS[0]: 2, WALKS[1]: 1, ELSEWHERE[0]: 5}
    for page, count in least.items():
        assert len(pages.blocks(page, "python")) >= count, page


@pytest.mark.parametrize("block", alone(), ids=str)
def test_python_runs(block: Block, clean: Path, recwarn: pytest.WarningsRecorder) -> None:
    if block.page == RECONFIGURE and not hasattr(dist, "_reconfigure"):
        pytest.skip("torch has reconfigure since 2.14")
    try:
        names = execute(block)
    finally:
        ringdp.shutdown()
    if block.page not in MAY_WARN:
        assert [str(it.message) for it in recwarn] == []
    if block.page == AMP:
        assert names["scaler"].get_scale() <= 2.0**16
    if block == after_horovod()[0]:
        assert (clean / "model.pt").exists()


@pytest.mark.usefixtures("clean")
def test_compressors_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in pages.blocks(CUSTOM, "python"):
            execute(block, names)
    finally:
        ringdp.shutdown()
    assert "8.12 bits an element" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="set fixed_size = False"):
        check_compressor(names["Halves"]())


def run_on_rank(block: Block, port: int, folder: str) -> bool:
    before = os.getcwd()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    try:
        execute(block)
    finally:
        os.chdir(before)
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return not dist.is_initialized()


def run_on_ranks(block: Block, ranks: int, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(run_on_rank, block, port, str(folder), world_size=ranks, backend=None) == [True] * ranks


@pytest.mark.parametrize("block", after_horovod(), ids=str)
def test_after_horovod_runs_on_two_ranks(block: Block) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(block, 2, Path(folder))


def test_before_is_python() -> None:
    everything = pages.blocks(FROM_HOROVOD, "python")
    (before,) = (block for block in everything if block.text.startswith("# before"))
    assert "hvd.DistributedOptimizer" in before.text
    ast.parse(before.text)
    assert len(after_horovod()) == len(everything) - 1 == 4


@pytest.mark.parametrize("block", [block for page in ELSEWHERE for block in pages.blocks(page, "python")], ids=str)
def test_what_runs_elsewhere_is_python(block: Block) -> None:
    ast.parse(block.text)


def test_a_checkpoint_is_continued_by_another_number_of_ranks(tmp_path: Path) -> None:
    (block,) = (block for block in python_blocks() if "ringdp.checkpoint.load(" in block.text)
    for ranks in (2, 1):
        run_on_ranks(block, ranks, tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


# The pages of docs/start, step by step


def steps(page: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Write the page's files as it goes, run its `ringrun` lines; yields what was printed and what the page shows."""
    printed = ""
    for block in pages.blocks(page):
        insertion = re.fullmatch(r'into (\S+), after "(.*)"', block.note)
        if insertion:
            file = folder / insertion[1]
            assert file.read_text().count(insertion[2] + "\n") == 1
            file.write_text(file.read_text().replace(insertion[2] + "\n", f"{insertion[2]}\n{block.text}"))
        elif block.language == "python":
            (folder / block.title).write_text(block.text)
        elif block.language == "sh":
            lines = [line for line in block.text.splitlines() if "ringrun" in line]
            printed = "".join(run_line(line, folder) for line in lines)
        elif block.language == "text":
            yield printed, block.text


def run_line(line: str, folder: Path) -> str:
    variables, command = pages.without_assignments(shlex.split(line))
    own = os.environ | variables | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-m", "ringdp.launch", *command[1:]]
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == ("raise" in (folder / command[-1 if command[-1].endswith(".py") else -2]).read_text()), (
        done.stdout + done.stderr
    )
    return done.stdout + done.stderr


def lines_of(shown: str) -> list[str]:
    """A line of ringdp's log is longer than a page is wide: there it goes on in lines with a margin of eight blanks."""
    return re.sub(r"(?m)(?<=^ringdp: )(.*(?:\n {8}\S.*)+)", lambda it: " ".join(it[1].split()), shown).splitlines()


def shape(line: str) -> str:
    """The line without what differs from run to run: numbers with their units, the host, blanks."""
    line = line.replace(socket.gethostname(), "vm")
    line = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?( (µs|ms|s)\b)?( threads?\b)?", "#", line)
    return " ".join(re.sub(r"-{3,}", "---", line).split())


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [WALKS[0], pytest.param(WALKS[1], marks=pytest.mark.slow)])
def test_a_walk_shows_what_the_page_shows(page: str, clean: Path) -> None:
    shown = list(steps(page, clean))
    assert len(shown) >= 3
    for printed, expected in shown:
        lines = {shape(line) for line in printed.splitlines()}
        for line in lines_of(expected):
            assert shape(line) in lines, f"{line}\nis not in\n{printed}"


# Commands


def test_launch_lines_parse(clean: Path) -> None:
    secret = clean / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text("ab" * 32)
    found = {page: [it for it in map(pages.launched, pages.commands(page)) if it is not None] for page in PAGES}
    parsed = {page: [arguments.parse(words).torchrun for words in found[page]] for page in PAGES}
    assert {page: len(parsed[page]) for page in ("README.md", LAUNCHING)} == {"README.md": 1 + 1, LAUNCHING: 4}
    assert {(it.master_addr, it.master_port) for it in parsed[LAUNCHING]} == {("10.0.0.1", 29500)}
    placement = arguments.parse(found["README.md"][1]).placement
    assert placement is not None
    assert [(host.name, host.slots) for host in placement.hosts] == [("node1", 4), ("node2", 4)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    targets = re.findall(r"^([\w-]+):", pages.read("Makefile"), re.MULTILINE)
    scripts = {"train.py", *(block.title for block in pages.blocks(page, "python"))}
    for words in pages.commands(page):
        variables, command = pages.without_assignments(words)
        assert {name for name in variables if name.startswith("RINGDP_")} <= set(VARIABLES)
        if command[:1] == ["make"] and command[1] != "-C":
            assert command[1] in targets
        for word in command:
            if word.endswith(".py") and word not in scripts:
                assert (ROOT / word).is_file(), word


def test_the_ports_are_the_same_in_commands_and_firewall() -> None:
    text = pages.section(LAUNCHING, "Four machines")
    low, high = RingConfig.from_environment(
        {"RINGDP_PORT_RANGE": re.findall(r"PORT_RANGE=(\S+)", text)[0]}
    ).port_range or (0, 0)
    assert {*re.findall(r"(?:port|--dport) (\d[\d:]*)", text)} == {"29500", f"{low}:{high}"}
    assert high - low >= int(re.findall(r"--nproc-per-node (\d+)", text)[0])


def test_the_elastic_command_is_one_of_the_launcher() -> None:
    (line,) = re.findall(r"`launch\.py (--nnodes 2:4 .*?) …`", pages.read(FROM_HOROVOD))
    assert arguments.parse([*line.split(), "train.py"]).torchrun.rdzv_backend == "c10d"


# Links, names, tables


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in pages.links(page):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in pages.anchors(path), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_within_130_columns(page: str) -> None:
    """Tables and code, too: a long cell is shortened or becomes a list, a long command goes on behind a backslash."""
    long = [number for number, line in enumerate(pages.read(page).splitlines(), 1) if len(line) > 130]
    assert long == []


def test_the_readme_is_short_and_the_index_has_every_page() -> None:
    assert len(pages.read("README.md").splitlines()) <= 130
    listed = {target for target, _ in pages.links("docs/README.md")}
    missing = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - listed
    assert missing == {"README.md"}


def test_every_example_is_in_the_table() -> None:
    table = pages.read("examples/README.md")
    assert sorted(re.findall(r"\((\w+\.py)\)", table)) == sorted(it.name for it in (ROOT / "examples").glob("*.py"))


def settings() -> dict[str, tuple[str, str, str]]:
    """Of each variable on the page of settings its default, its values and what reads it."""
    rows = re.findall(r"^\| `(RINGDP_\w+)` \| (.*) \| (.*) \| `([\w.]+)` \|$", pages.read(SETTINGS), re.MULTILINE)
    return {variable: (default, values, reader) for variable, default, values, reader in rows}


def reading(variable: str, reader: str, text: str | None) -> Any:
    """What `reader` makes of the variable: of a field of RingConfig, or a function's result."""
    environ = {} if text is None else {variable: text}
    if reader.startswith("RingConfig."):
        assert variables._READERS[variable][0] == reader.removeprefix("RingConfig.")
        return getattr(RingConfig.from_environment(environ), reader.removeprefix("RingConfig."))
    return getattr(variables, reader)(environ)


def test_settings_are_the_variables_there_are_each_explained_once() -> None:
    assert list(settings()) == re.findall(r"^\| `(RINGDP_\w+)`", pages.read(SETTINGS), re.MULTILINE)
    assert set(settings()) == set(VARIABLES)
    explained = re.findall(r"^- `(RINGDP_\w+)`: ", pages.read(SETTINGS), re.MULTILINE)
    assert sorted(explained) == sorted(VARIABLES)


@pytest.mark.parametrize("variable", [it for it in VARIABLES if it not in NOT_READ_BY_A_VALUE])
def test_a_setting_has_the_default_and_the_values_of_its_page(
    variable: str, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, values, reader = settings()[variable]
    unset = reading(variable, reader, None)
    if default.startswith("`"):
        assert reading(variable, reader, default.strip("`")) == unset
    else:
        assert unset in (None, "", 0, tuning.Tuning())
    monkeypatch.setattr(variables, "metrics_dir", lambda environ=None: str(clean))  # tensorboard needs one
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(RingConfig, "_check_tls", lambda self: None)  # TLS needs a secret
    given = re.findall(r"`([^`]+)`", values)
    assert [text for text in given if reading(variable, reader, text) is None] == []
    assert len({str(reading(variable, reader, text)) for text in given}) == len(given)
    for highest in re.findall(r"` to `(\d+)`", values):
        with pytest.raises(ringdp.InvalidArgumentError, match=variable):
            reading(variable, reader, str(int(highest) + 1))


def test_settings_that_are_not_read_by_a_value() -> None:
    for variable in NOT_READ_BY_A_VALUE:
        default, _, reader = settings()[variable]
        assert default.startswith("none")
        assert callable(getattr(variables, reader))
    assert re.findall(r"`(\w+)`", settings()["RINGDP_LOG_LEVEL"][1]) == list(variables._LOG_LEVELS)


def test_the_exceptions_are_those_there_are() -> None:
    rows = re.findall(r"^\| `(\w+Error|MembershipChanged)` \|", pages.read("docs/reference/errors.md"), re.MULTILINE)
    there = {name for name in ringdp.__all__ if name.endswith("Error")} | {"MembershipChanged"}
    assert {*rows, "RingError"} == there
    fields = re.findall(r"^\| `([a-z_]+)` \|", pages.read("docs/reference/errors.md"), re.MULTILINE)
    assert tuple(fields) == ringdp.RingError._fields


def test_architecture_names_files_and_functions_there_are() -> None:
    items = re.findall(r"^- (.*\n(?:  .*\n)*)", pages.section(ARCHITECTURE, "Which file answers it"), re.MULTILINE)
    rows = [" ".join(item.split()).partition("? ")[::2] for item in items]
    assert len(rows) >= 20
    for question, answer in rows:
        files = re.findall(r"`([\w/]+\.\w+)`", answer)
        assert files, question
        assert [file for file in files if not (ROOT / file).is_file()] == [], question
        for function in re.findall(r"`(\w+)` in", answer):
            assert re.search(rf"\b{function}\(", pages.read(files[0])), f"{question} {function}"


def test_the_map_names_files_there_are() -> None:
    folders = "ringdp|csrc|engine|membership|link|meet|shared|torch"
    named = re.findall(rf"`((?:{folders})/[\w/]+(?:\.\w+)?)`", pages.read(MAP))
    assert len(named) >= 40
    places = [ROOT, ROOT / "ringdp", ROOT / "ringdp/csrc"]
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_the_way_of_a_gradient_leads_through_functions_there_are() -> None:
    ways = pages.section(ARCHITECTURE, "The way of a gradient").split("### In the code\n")[1]
    places = re.findall(r"^(\d+)\. `(\w+)` in `([\w/]+\.\w+)`", ways, re.MULTILINE)
    assert max(int(number) for number, _, _ in places) <= 15
    assert len({(function, file) for _, function, file in places}) == len(places) == len(re.findall(r"^\d", ways, re.M))
    for _, function, file in places:
        assert re.search(rf"\b{function}\(", pages.read(file)), f"{file} {function}"


MOST_ON_THE_WAY = (36, 29, 25)  # of a gradient, a lost rank, a connection; lowered where a way gets shorter


def test_the_files_on_a_way_know_each_other() -> None:
    items = re.findall(r"^- (.*\n(?:  .*\n)*)", pages.section(ARCHITECTURE, "Files on the way"), re.MULTILINE)
    ways = [re.findall(r"`(\w+(?:/\w+)+)`", item) for item in items]
    assert len(ways) == len(MOST_ON_THE_WAY)
    for item, way, most in zip(items, ways, MOST_ON_THE_WAY, strict=True):
        assert len(way) == len(set(way)) <= most
        assert f", {len(way)}: " in " ".join(item.split())
        texts = {}
        for name in way:
            files = [ROOT / "ringdp" / "csrc" / f"{name}.{ending}" for ending in ("h", "cpp")]
            texts[name] = "".join(file.read_text() for file in files if file.is_file())
        reached, left = {way[0]}, set(way[1:])
        while near := {
            name for name in left for it in reached if f'"{name}.h"' in texts[it] or f'"{it}.h"' in texts[name]
        }:
            reached, left = reached | near, left - near
        assert left == set()


def test_names_are_public() -> None:
    here = [block.text for block in python_blocks() if block.page not in ELSEWHERE]
    for name in re.findall(r"\bringdp\.([A-Za-z_]+)", " ".join(here)):
        assert name in ringdp.__all__, name


def test_what_horovods_page_names_exists() -> None:
    text = pages.read(FROM_HOROVOD)
    for name in re.findall(r"\bringdp\.([A-Za-z_]+)", text):
        assert name in ringdp.__all__, name
    for name in re.findall(r"\bringdp\.(?:metrics|checkpoint)\.([a-z_]+)", text):
        assert hasattr(ringdp.checkpoint, name) or hasattr(ringdp.metrics, name), name
    for name in re.findall(r"`(?:\w+ = )?dist\.([A-Za-z_]+)", text):
        assert hasattr(dist, name), name
    assert set(re.findall(r"\bRINGDP_\w+", text)) <= set(VARIABLES)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_documented_as_it_is(name: str) -> None:
    assert f"- `{name}`: {ARGUMENTS[name].does} - " in " ".join(pages.section(FROM_DDP, "Arguments").split()) + " - "


def test_nothing_else_is_documented_as_an_argument() -> None:
    section = pages.section(FROM_DDP, "Arguments")
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("- `")]
    assert rows == list(ARGUMENTS)


TROUBLE = "docs/how-to/troubleshooting.md"
# Of Python, torch and Linux, not of ringdp.
OF_OTHERS = ("ModuleNotFoundError", "DataLoader worker", "CUDA out of memory", "KeyError")


def test_texts_of_errors_are_those_of_the_sources() -> None:
    files = [path for ending in ("*.py", "*.cpp") for path in (ROOT / "ringdp").rglob(ending)]
    # What Python or C++ puts together of pieces is one text.
    sources = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    entries = re.findall(r"^- ((?:`[^`]+`(?:, | and )?)+)", pages.read(TROUBLE), re.MULTILINE)
    texts = [text for entry in entries for text in re.findall(r"`([^`]+)`", entry)]
    assert len(texts) >= 20
    assert [text for text in texts if text not in sources and not text.startswith(OF_OTHERS)] == []


def test_the_notebook_runs() -> None:
    """Its cells in one process, as a kernel runs them."""
    cells = json.loads(pages.read("examples/notebook.ipynb"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n".join([*code, 'print("same:", by_rank[0] == by_rank[1])'])
    done = subprocess.run(
        [sys.executable, "-"], input=program, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"epoch \d: loss \d\.\d{4} on 2 ranks", done.stdout)) == 4
    assert "same: True" in done.stdout
    assert "ValueError: no labels" in done.stdout
