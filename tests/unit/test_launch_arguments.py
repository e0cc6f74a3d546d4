"""The command line: torchrun's flags, a free port on one node, and ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringdp.launcher.arguments import GRACE_S, parse
from ringdp.launcher.logs import make_run_folder, remove_run_folder
from ringdp.launcher.views import Mode, Stream, View


def test_on_one_node_without_flags_the_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PET_MASTER_PORT", raising=False)
    for flags in ([], ["--standalone"], ["--nproc-per-node", "4"]):
        first, second = (parse([*flags, "script.py"]).torchrun for _ in range(2))
        assert (first.rdzv_backend, first.rdzv_endpoint) == ("c10d", "127.0.0.1:0")
        assert first.rdzv_id != second.rdzv_id


def test_explicit_rendezvous_flags_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = parse(["--master-port", "29501", "script.py"]).torchrun
    assert (one.rdzv_backend, one.master_port) == ("static", 29501)
    static = parse(["--nnodes", "2", "--node-rank", "1", "--master-addr", "a", "script.py"])
    assert static.several_hosts
    assert (static.torchrun.rdzv_backend, static.torchrun.master_addr) == ("static", "a")
    assert static.torchrun.master_port == 29500
    elastic = parse(["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", "--rdzv-id", "j", "s.py"])
    assert elastic.several_hosts
    assert (elastic.torchrun.rdzv_backend, elastic.torchrun.rdzv_endpoint) == ("c10d", "a:1")
    assert elastic.torchrun.rdzv_id == "j"
    monkeypatch.setenv("PET_MASTER_PORT", "29502")
    variable = parse(["script.py"])
    assert not variable.several_hosts
    assert (variable.torchrun.rdzv_backend, variable.torchrun.master_port) == ("static", 29502)


def test_arguments_of_the_script_are_its_own() -> None:
    args = parse(["script.py", "--secret-file", "x", "--console", "nonsense"])
    assert args.torchrun.training_script_args == ["--secret-file", "x", "--console", "nonsense"]
    assert args.secret_file is None


def test_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert parse(["script.py"]).grace_s == GRACE_S < 5
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    assert parse(["script.py"]).grace_s == 60


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--console", "all", "--tee", "3", "s.py"],
            "--console and --redirects, --tee or --local-ranks-filter cannot be combined",
        ),
        (["--tee", "7", "s.py"], "7 does not match"),
        (["--secret-file", "/nonexistent/secret", "s.py"], "--secret-file /nonexistent/secret"),
        (["--tls", "--nnodes", "2", "--master-addr", "a", "s.py"], "--tls needs the job's secret on every host"),
        (["--nnodes", "1:2:3", "s.py"], "nnodes=1:2:3"),
        (
            ["--elastic", "--nnodes", "1:2", "--rdzv-endpoint", "a:1", "s.py"],
            "needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT",
        ),
        (["--nnodes", "0", "s.py"], "--nnodes must be a number from 1 on, or MIN:MAX, got 0"),
        (["--nnodes", "2:1", "s.py"], "got 2:1"),
        (["--nnodes", "two", "s.py"], "got two"),
        (["--nproc-per-node", "0", "s.py"], "--nproc-per-node must be 1 or more, got 0"),
        (["--nproc-per-node", "-3", "s.py"], "got -3"),
        (["--max-restarts", "-1", "s.py"], "--max-restarts must be 0 or more, got -1"),
        (["--local-ranks-filter", "x", "s.py"], "invalid literal"),
        (["--metrics-port", "70000", "s.py"], "--metrics-port must be a port up to 65535, got 70000"),
        ([""], "the name of the script is empty"),
        (["-n", "2", " ", "--lr", "1"], "the name of the script is empty"),
        (["-m", ""], "the name of the module is empty"),
        (["--no-python", ""], "the name of the script is empty"),
        (["-n", "", "s.py"], "--nproc-per-node must be a number, or auto, cpu or gpu, got ''"),
        (["-n", "1.5", "s.py"], "got '1.5'"),
        (["-n", "99999999999", "s.py"], "--nproc-per-node must be at most 65,536"),
        (["--metrics-dir", "", "s.py"], "--metrics-dir is empty"),
        (["--hostfile", "", "s.py"], "--hostfile is empty"),
        (["--ssh", "", "-H", "a:1", "s.py"], "--ssh is empty"),
        (["-x", "=3", "-H", "a:1", "s.py"], "-x is empty"),
        (["--master-port", "70000", "s.py"], "--master-port must be a port up to 65535, got 70000"),
        (["--tensorboard", "s.py"], "--tensorboard needs --metrics-dir"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        parse(arguments)
    assert info.value.code == 2
    assert said in capsys.readouterr().err


RAW, HIDDEN = View(mode=Mode.RAW), View(mode=Mode.HIDDEN)


def lines(prefix: str) -> View:
    return View(mode=Mode.LINES, prefix=prefix)


def errors(prefix: str) -> View:
    return View(mode=Mode.ERRORS, prefix=prefix)


@pytest.mark.parametrize(
    ("flags", "stream", "expected"),
    [
        ([], "stdout", [RAW, HIDDEN]),
        ([], "stderr", [RAW, errors("[rank 1] ")]),
        (["--console", "rank0"], "stderr", [RAW, HIDDEN]),
        (["--console", "all"], "stdout", [lines("[rank 0] "), lines("[rank 1] ")]),
        (["--tee", "3"], "stdout", [lines("[default0]:"), lines("[default1]:")]),
        (["--tee", "0:1"], "stdout", [lines("[default0]:"), RAW]),
        (["--tee", "0:1", "--role", "w"], "stderr", [lines("[rank 0] "), lines("[rank 1] ")]),
        (["--redirects", "3"], "stderr", [HIDDEN, HIDDEN]),
        (["--redirects", "1:3"], "stdout", [RAW, HIDDEN]),
        (["--local-ranks-filter", "1"], "stdout", [HIDDEN, RAW]),
    ],
)
def test_views(flags: list[str], stream: Stream, expected: list[View]) -> None:
    views = parse([*flags, "script.py"]).views
    actual = [views.of(rank=r, local_rank=r, local_world_size=2, stream=stream) for r in range(2)]
    assert actual == expected


def test_on_another_host_there_is_no_rank_0_to_show() -> None:
    views = parse(["script.py"]).views
    assert views.of(rank=8, local_rank=0, local_world_size=8, stream="stdout") == HIDDEN
    assert views.of(rank=8, local_rank=0, local_world_size=8, stream="stderr") == errors("[rank 8] ")


def test_n_is_nproc_per_node() -> None:
    assert parse(["-n", "3", "script.py", "-n", "5"]).torchrun.nproc_per_node == "3"
    assert parse(["script.py"]).torchrun.nproc_per_node == "1"


@pytest.mark.parametrize(
    ("flags", "timeout_s", "settings"),
    [
        (["--rdzv-timeout", "30"], 30, {"timeout": "30"}),
        ([], 900, {}),
        (["--rdzv-conf", "timeout=7", "--rdzv-timeout", "30"], 7, {"timeout": "7"}),
        (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0", "--rdzv-timeout", "30"],
            30,
            {"timeout": "30", "join_timeout": "30", "read_timeout": "30"},
        ),
    ],
)
def test_where_nodes_meet(flags: list[str], timeout_s: float, settings: dict[str, str]) -> None:
    arguments = parse(["--nnodes", "2", "--node-rank", "1", "--master-addr", "host0", *flags, "script.py"])
    assert arguments.meeting is not None
    assert arguments.meeting.timeout_s == timeout_s
    assert arguments.meeting.endpoint == ("host0:29400" if "c10d" in flags else "host0:29500")
    assert arguments.meeting.node == (None if "c10d" in flags else 1)
    given = dict(pair.split("=") for pair in filter(None, arguments.torchrun.rdzv_conf.split(",")))
    assert given == settings
    assert parse(["script.py"]).meeting is None


def test_help_begins_with_examples_and_our_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.index("ringrun -n 4 train.py") < text.index("--console") < text.index("--nnodes NNODES")
    with pytest.raises(SystemExit):
        parse(["--version"])
    assert re.fullmatch(r"ringdp \S+, torch \S+, Python \S+\n", capsys.readouterr().out)


def test_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [make_run_folder(log_dir=None, script="a/train.py", several_hosts=False) for _ in range(3)]
    assert len({folder.path for folder in made}) == 3
    assert all(folder.path.is_absolute() and "_train" in folder.shown.partition("logs/")[2] for folder in made)
    given = make_run_folder(log_dir=Path("mine"), script="train.py", several_hosts=False)
    assert given.path.parent == tmp_path / "mine"
    assert given.path.name.endswith("_train")
    none = make_run_folder(log_dir=Path("/dev/null"), script="train.py", several_hosts=False)
    remove_run_folder(none)
    assert not none.path.exists()
    remove_run_folder(given)
    assert given.path.exists()


def test_where_the_current_folder_cannot_be_written_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").write_text("a file is in the way")
    folder = make_run_folder(log_dir=None, script="train.py", several_hosts=False)
    assert "cannot write to ./logs" in folder.notice
    assert folder.path.is_dir()
    folder.path.rmdir()
