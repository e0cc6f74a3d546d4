"""ringdp/config/variables.py: what the environment may say, and what is answered where it cannot be meant."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringdp import config
from ringdp.config import LaunchEnvironment, RingConfig, environments, launch_environment, variables
from ringdp.config.environments import dmlc, hydra
from ringdp.errors import InvalidArgumentError, SystemResourceError
from tests.helpers import need

core: Any = need("tests.core._core", "ringdp's extension, built with `make build`,")

SECRET = bytes(range(32))
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-42@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def secret_file(folder: Path, content: str = SECRET.hex() + "\n", mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_nothing_set_gives_the_defaults() -> None:
    assert RingConfig.from_environment({"PATH": "/bin", "RINGDP_IFACE": ""}) == RingConfig()


def test_every_variable_is_read(tmp_path: Path) -> None:
    table = tmp_path / "tuning.json"
    table.write_text('{"ringdp_tuning": 1, "layouts": {"one_host": {"fold_sent_bytes": 1}}}')
    (tmp_path / "door").write_text("41000 3 250\n")
    settings = RingConfig.from_environment(
        {
            "RINGDP_SECRET_FILE": secret_file(tmp_path),
            "RINGDP_DOOR": str(tmp_path),
            "RINGDP_TLS": "1",
            "RINGDP_TLS_CERT": "/etc/rank.pem",
            "RINGDP_TLS_KEY": "/etc/rank.key",
            "RINGDP_TLS_CA": "/etc/ca.pem",
            "RINGDP_HOST_ID": "left",
            "RINGDP_SITE": "paris",
            "RINGDP_IFACE": "eth0",
            "RINGDP_ADVERTISE": "203.0.113.7",
            "RINGDP_PORT_RANGE": "29600-29699",
            "RINGDP_TRANSPORT": "TCP",
            "RINGDP_STREAMS": "4",
            "RINGDP_CONGESTION": "Cubic",
            "RINGDP_CHECKSUM": "1",
            "RINGDP_FULL_MESH_RANKS": "64",
            "RINGDP_RATE": "1gbit",
            "RINGDP_SPIN_US": "0",
            "RINGDP_CONNECT_TIMEOUT": "2.5",
            "RINGDP_STALL_NOTICE": "0.5",
            "RINGDP_HOST_TIMEOUT": "30",
            "RINGDP_HEAL": "0.5",
            "RINGDP_TUNING": str(table),
            "RINGDP_DUMP_DIR": str(tmp_path / "dumps"),
            "RINGDP_LOG_LEVEL": "info",
            "TORCHELASTIC_RESTART_COUNT": "3",
        }
    )
    assert settings.as_dict() == {
        "secret": SECRET,
        "tls": True,
        "tls_cert": "/etc/rank.pem",
        "tls_key": "/etc/rank.key",
        "tls_ca": "/etc/ca.pem",
        "tls_library": "libssl.so.3",
        "host_id": "left",
        "dump_dir": str(tmp_path / "dumps"),
        "site": "paris",
        "host_name": os.uname().nodename,
        "iface": "eth0",
        "advertise": "203.0.113.7",
        "port_range": (29600, 29699),
        "transport": "tcp",
        "streams": 4,
        "congestion": "cubic",
        "checksum": True,
        "full_mesh_ranks": 64,
        "rate_bytes_per_s": 125_000_000,
        "spin_us": 0,
        "connect_timeout_ms": 2500,
        "stall_notice_ms": 500,
        "host_silence_ms": 30_000,
        "heal_ms": 500,
        "epoch": 3,
        "several_hosts": False,
        "door": (str(tmp_path), 41000, 3, 250),
        "table": {"one_host.fold_sent_bytes": 1},
        "table_source": f"RINGDP_TUNING={table}",
    }
    read_elsewhere = {"RINGDP_CUDA", "RINGDP_LOG_LEVEL", "RINGDP_GRADIENT_POOL"}
    read_elsewhere |= {
        "RINGDP_REPORT_EVERY",
        "RINGDP_REDUCE_ALONE",
        "RINGDP_METRICS_DIR",
        "RINGDP_TENSORBOARD",
        "RINGDP_TIMELINE",
        "RINGDP_ELASTIC",
        "RINGDP_JOIN",
        "RINGDP_MIN_RANKS",
        "RINGDP_MAX_RANKS",
        "RINGDP_RANK_PROCESS",
    }
    assert set(variables._READERS) | read_elsewhere == set(config.VARIABLES), "a variable without a reader"


def test_how_many_ranks_an_elastic_job_may_have() -> None:
    given = {"RINGDP_MIN_RANKS": "2", "RINGDP_MAX_RANKS": "8"}
    assert (config.min_ranks({}), config.max_ranks({})) == (1, None)
    assert (config.min_ranks(given), config.max_ranks(given)) == (2, 8)
    for least, most, words in [("0", "", "at least 1"), ("3", "2", "RINGDP_MAX_RANKS=2 is below"), ("", "x", "whole")]:
        with pytest.raises(InvalidArgumentError, match=words):
            config.max_ranks({"RINGDP_MIN_RANKS": least, "RINGDP_MAX_RANKS": most})


def test_the_secret_is_not_shown(tmp_path: Path) -> None:
    settings = RingConfig.from_environment({"RINGDP_SECRET_FILE": secret_file(tmp_path)})
    for text in (repr(settings), repr(settings.as_dict()), str(settings.as_dict())):
        assert SECRET.hex() not in text
        assert repr(SECRET) not in text


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "many"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
    ],
)
def test_whether_there_are_several_hosts(variables: dict[str, str], expected: bool) -> None:
    assert RingConfig.from_environment(variables).several_hosts is expected


@pytest.mark.parametrize(
    "text", ["eth0", "eth,ib0", "10.0.0.0/8", "fd00::/8,=eth0", "^docker", "^docker,^br-", "10.1.2.3"]
)
def test_interfaces_that_can_be_named(text: str) -> None:
    assert RingConfig.from_environment({"RINGDP_IFACE": text}).iface == text


@pytest.mark.parametrize(
    "text, words",
    [
        ("eth0,,eth1", "empty item"),
        ("^", "empty item"),
        ("eth0,^eth1", "mixes"),
        ("10.0.0.0/33", "a network looks like"),
        ("eth0/8", "a network looks like"),
    ],
)
def test_interfaces_that_cannot(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"RINGDP_IFACE.*{words}"):
        RingConfig.from_environment({"RINGDP_IFACE": text})


@pytest.mark.parametrize("text, expected", [("29600", (29600, 29600)), ("1 - 65535", (1, 65535)), ("5:6", (5, 6))])
def test_port_range_forms(text: str, expected: tuple[int, int]) -> None:
    assert RingConfig.from_environment({"RINGDP_PORT_RANGE": text}).port_range == expected


@pytest.mark.parametrize(
    "text, bytes_per_s",
    [
        ("1gbit", 125_000_000),
        ("2.5Gbit", 312_500_000),
        ("100 Mbit/s", 12_500_000),
        ("500kbit", 62_500),
        ("80000bit", 10_000),
        ("125MB/s", 125_000_000),
        ("1.25 GB/s", 1_250_000_000),
        ("64kB/s", 64_000),
    ],
)
def test_rate_forms(text: str, bytes_per_s: int) -> None:
    assert RingConfig.from_environment({"RINGDP_RATE": text}).rate_bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    "variable, text",
    [
        ("RINGDP_RATE", "fast"),
        ("RINGDP_RATE", "1g"),
        ("RINGDP_RATE", "1000"),
        ("RINGDP_RATE", "-1gbit"),
        ("RINGDP_RATE", "1gbps"),
        ("RINGDP_RATE", "125mb/s"),
        ("RINGDP_RATE", "125MiB/s"),
        ("RINGDP_RATE", "0gbit"),
        ("RINGDP_RATE", "1bit"),
        ("RINGDP_RATE", "infbit"),
        ("RINGDP_RATE", "99999gbit"),
        ("RINGDP_STREAMS", "0"),
        ("RINGDP_STREAMS", "33"),
        ("RINGDP_STREAMS", "many"),
        ("RINGDP_STREAMS", "-1"),
        ("RINGDP_CONGESTION", "bbr; reboot"),
        ("RINGDP_TLS", "yes"),
        ("RINGDP_TLS", "1"),  # without a secret
        ("RINGDP_TLS_CERT", "/etc/rank.pem"),  # without TLS
        ("RINGDP_CHECKSUM", "yes"),
        ("RINGDP_CHECKSUM", "2"),
        ("RINGDP_CHECKSUM", "-1"),
        ("RINGDP_FULL_MESH_RANKS", "0"),
        ("RINGDP_FULL_MESH_RANKS", "few"),
        ("RINGDP_PORT_RANGE", "many"),
        ("RINGDP_PORT_RANGE", "9-3"),
        ("RINGDP_PORT_RANGE", "0-3"),
        ("RINGDP_PORT_RANGE", "1-65536"),
        ("RINGDP_SPIN_US", "a lot"),
        ("RINGDP_SPIN_US", "-1"),
        ("RINGDP_CONNECT_TIMEOUT", "soon"),
        ("RINGDP_CONNECT_TIMEOUT", "0"),
        ("RINGDP_CONNECT_TIMEOUT", "inf"),
        ("RINGDP_CONNECT_TIMEOUT", "nan"),
        ("RINGDP_STALL_NOTICE", "-1"),
        ("RINGDP_HOST_TIMEOUT", "3"),
        ("RINGDP_HEAL", "-1"),
        ("RINGDP_HEAL", "soon"),
        ("RINGDP_HEAL", "0.01"),
        ("RINGDP_TRANSPORT", "udp"),
        ("RINGDP_HOST_ID", "two words"),
        ("RINGDP_IFACE", "x" * 513),
        ("RINGDP_ADVERTISE", "a\nb"),
        ("TORCHELASTIC_RESTART_COUNT", "twice"),
    ],
)
def test_an_impossible_value_names_its_variable(variable: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=variable):
        RingConfig.from_environment({variable: text})


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), (" ", config.CHECKSUM_BY_DEFAULT)])
def test_checksums_are_on_off_or_what_they_are_by_default(text: str, on: bool) -> None:
    assert RingConfig.from_environment({"RINGDP_CHECKSUM": text}).checksum is on


def test_the_transports_are_those_of_the_core() -> None:
    names = [it["name"] for it in core.registered_transports()]
    assert [RingConfig(transport=name).transport for name in names] == names
    with pytest.raises(InvalidArgumentError, match=f"one of auto, {', '.join(names)}, not 'pigeon'"):
        RingConfig(transport="pigeon")
    with pytest.raises(InvalidArgumentError, match=r"must be auto, .* or .*, not 'pigeon'") as refused:
        core.Runtime(core.MemoryStore(), 0, 1, transport="pigeon")
    assert all(name in str(refused.value) for name in names)


def test_fields_given_in_code_are_checked_too() -> None:
    with pytest.raises(InvalidArgumentError, match="secret must be 32 bytes, not 5"):
        RingConfig(secret=b"short")
    with pytest.raises(dataclasses.FrozenInstanceError):
        RingConfig().spin_us = 3  # type: ignore[misc]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_secret_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"mode {mode:04o}.*chmod 600"):
        config.read_secret(secret_file(tmp_path, mode=mode))


@pytest.mark.parametrize("content", ["", "#7!", SECRET.hex()[:-1], SECRET.hex() + "0", "zz" * 32, "ab " * 32])
def test_a_malformed_secret_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidArgumentError, match="64 hexadecimal") as caught:
        config.read_secret(secret_file(tmp_path, content))
    assert not content or content not in str(caught.value)


def test_a_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (tmp_path, fifo, Path("/dev/null")):
        with pytest.raises(InvalidArgumentError, match="not a regular file"):
            config.read_secret(str(path))
    with pytest.raises(SystemResourceError, match=r"No such file.*openssl rand"):
        config.read_secret(str(tmp_path / "none"))


@pytest.mark.parametrize("name, near", [("RINGDP_IFACES", "RINGDP_IFACE"), ("RINGDP_PORTS", "RINGDP_PORT_RANGE")])
def test_a_misspelt_variable_is_named_with_the_nearest(name: str, near: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} is not .* did you mean .*\\b{near}\\b"):
        RingConfig.from_environment({name: "x"})


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("RINGDP_METRICS", "did you mean RINGDP_METRICS_DIR?"),
        ("RINGDP_LOGLEVEL", "did you mean RINGDP_LOG_LEVEL?"),
        ("RINGDP_TRANSPRT", "did you mean RINGDP_TRANSPORT?"),
        ("RINGDP_COMPRESSION", "did you mean RingDP(compression=…)?"),
        ("RINGDP_DEBUG", "docs/reference/settings.md has all"),
        ("RINGDP_FOO", "docs/reference/settings.md has all"),
    ],
)
def test_only_a_name_that_is_near_is_guessed(name: str, guess: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} is not a variable ringdp knows; {re.escape(guess)}$"):
        RingConfig.from_environment({name: "x"})


@pytest.fixture
def ringdp_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("ringdp")
    before = logger.level, list(logger.handlers), logger.propagate
    yield logger
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]
    logger.propagate = before[2]


def test_log_level(ringdp_logger: logging.Logger) -> None:
    ringdp_logger.propagate = False  # pytest's own handlers would count as the user's
    config.apply_log_level({})
    assert ringdp_logger.level == logging.NOTSET
    assert [handler.level for handler in ringdp_logger.handlers] == [logging.WARNING]
    config.apply_log_level({"RINGDP_LOG_LEVEL": "Debug"})
    config.apply_log_level({"RINGDP_LOG_LEVEL": "info"})
    assert ringdp_logger.level == logging.INFO
    assert len(ringdp_logger.handlers) == 1
    with pytest.raises(InvalidArgumentError, match="debug, info, warning, error"):
        config.apply_log_level({"RINGDP_LOG_LEVEL": "loud"})


def console_of(ringdp_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the console shows of a program that has set up no logging. Called in a test: before it pytest would add
    handlers of its own."""
    ringdp_logger.propagate = False  # pytest's own handlers would count as the user's
    ringdp_logger.handlers[:] = []
    config.apply_log_level({})
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    return shown


def test_each_line_begins_with_our_name_and_the_rank_where_it_is_another_one(
    ringdp_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = console_of(ringdp_logger, monkeypatch)
    log = logging.getLogger("ringdp.report")
    log.warning("step 10: rank 1 is slow\nRemedy: less work")
    config.apply_log_level({}, rank=2)
    log.warning("a warning")
    log.warning("rank 2 (host a) has waited\nfor rank 1 (host b)")
    log.info("not shown")
    assert console.getvalue().splitlines() == [
        "ringdp: step 10: rank 1 is slow",
        "ringdp: Remedy: less work",
        "ringdp: rank 2: a warning",
        "ringdp: rank 2 (host a) has waited",
        "ringdp: rank 2: for rank 1 (host b)",
    ]


def test_no_line_takes_more_than_two_of_a_console(
    ringdp_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = console_of(ringdp_logger, monkeypatch)
    config.apply_log_level({}, rank=3)
    words = [f"word{number}" for number in range(80)]
    logging.getLogger("ringdp.core").warning("%s", " ".join(words))
    lines = console.getvalue().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("ringdp: rank 3: ") and len(line) <= 2 * 128 for line in lines)
    assert " ".join(line.removeprefix("ringdp: rank 3: ") for line in lines).split() == words


def test_a_program_s_own_handlers_show_what_they_did(
    ringdp_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = console_of(ringdp_logger, monkeypatch)
    log = logging.getLogger("ringdp.report")
    handler = logging.StreamHandler(own := io.StringIO())
    log.addHandler(handler)
    try:
        log.warning("once")
    finally:
        log.removeHandler(handler)
    assert (own.getvalue(), console.getvalue()) == ("once\n", "")


def test_beside_a_bar_of_tqdm_a_line_is_fresh_and_the_bar_is_drawn_again(
    ringdp_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = console_of(ringdp_logger, monkeypatch)
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=10, file=console, ncols=40, mininterval=0) as bar:
        bar.update(3)
        logging.getLogger("ringdp.report").warning("a warning")
        bar.update(3)
    (line,) = [line for line in console.getvalue().split("\n") if "a warning" in line]
    before, _, shown = line.rpartition("\r")
    assert shown == "ringdp: a warning"
    assert before.rpartition("\r")[2].strip() == ""  # the bar was wiped out
    assert "60%" in console.getvalue().partition("a warning")[2]


def test_no_launcher() -> None:
    assert launch_environment({"PATH": "/bin", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_torchrun() -> None:
    expected = LaunchEnvironment(
        launcher="torchrun",
        rank=3,
        world_size=8,
        local_rank=1,
        local_world_size=2,
        init_method="tcp://10.0.0.1:29500",
    )
    assert launch_environment(TORCHRUN | OPEN_MPI) == expected, "torchrun's variables come first"
    elastic = launch_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert elastic == dataclasses.replace(expected, agent_store=True)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str) -> None:
    partial = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(InvalidArgumentError, match=f"lacks {missing}:"):
        launch_environment(partial)


def test_all_missing_variables_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"says MASTER_ADDR=h but lacks RANK, WORLD_SIZE, MASTER_PORT"):
        launch_environment({"MASTER_ADDR": "h"})
    with pytest.raises(InvalidArgumentError, match=r"says LOCAL_RANK=0 but lacks RANK"):
        launch_environment({"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"RANK": "-1"}, "rank -1 of 8"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "rank 0 of 0"),
        ({"RANK": "x"}, "RANK=x is not a whole number"),
        ({"LOCAL_RANK": "-2"}, "local rank -2"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not between"),
    ],
)
def test_an_impossible_place_is_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        launch_environment(TORCHRUN | change)


def test_open_mpi_on_one_host_needs_nothing_more() -> None:
    one = launch_environment(OPEN_MPI)
    other = launch_environment(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert one is not None
    assert other is not None
    assert (one.launcher, one.rank, one.world_size, one.local_rank) == ("mpirun", 1, 2, 1)
    assert one.init_method == other.init_method, "all ranks compute the same meeting point"
    assert one.init_method.startswith("tcp://127.0.0.1:")


def test_open_mpi_on_several_hosts_is_told_the_meeting_point() -> None:
    spread = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(InvalidArgumentError, match="MASTER_ADDR is not set: pass -x MASTER_ADDR"):
        launch_environment(spread)
    told = launch_environment(spread | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"})
    assert told is not None
    assert told.init_method == "tcp://[fd00::1]:29500"


def test_srun_on_one_node_needs_nothing_more() -> None:
    one = SRUN | {"SLURM_STEP_NODELIST": "gpu08"}
    places = [launch_environment(one | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in range(6)]
    assert [place and (place.rank, place.world_size, place.local_rank) for place in places] == [
        (r, 6, r) for r in range(6)
    ]
    assert len({place and place.init_method for place in places}) == 1
    first = places[0]
    assert first is not None
    assert (first.launcher, first.local_world_size) == ("srun", 6)
    assert first.init_method.startswith("tcp://127.0.0.1:")
    other = launch_environment(one | {"SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.init_method != first.init_method, "another step of the same job meets elsewhere"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[08-09]", "gpu08"),
        ("a,b", "a"),
        ("gpu[3,5-7],cpu1", "gpu3"),
        ("rack[1-2]-n[03-04]", "rack1-n03"),
        ("n1-[10-12]", "n1-10"),
    ],
)
def test_srun_on_several_hosts_meets_at_the_first_of_the_step(nodes: str, first: str) -> None:
    launch_node = {"SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9", "SLURM_SUBMIT_HOST": "login"}
    place = launch_environment(SRUN | launch_node | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": nodes})
    assert place is not None
    assert re.fullmatch(rf"tcp://{first}:2\d{{4}}", place.init_method)


def test_a_script_that_srun_did_not_start_is_told() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    told = environments.forgotten(batch)
    assert told is not None
    assert "one process in a Slurm job of 2 tasks" in told
    assert "srun python train.py" in told
    for other in (batch | {"SLURM_NTASKS": "1"}, SRUN, {"PATH": "/bin"}, batch | TORCHRUN):
        assert environments.forgotten(other) is None


@pytest.mark.parametrize("change", [{}, {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b"}])
def test_srun_on_several_nodes_is_told_the_meeting_point(change: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"several hosts.*MASTER_ADDR is not set: .*scontrol show hostnames"):
        launch_environment(SRUN | change | {"SLURM_DISTRIBUTION": "arbitrary"})  # rank 0 may be anywhere
    told = launch_environment(SRUN | change | {"MASTER_ADDR": "gpu08", "MASTER_PORT": "29500"})
    assert told is not None
    assert (told.rank, told.world_size, told.local_rank) == (5, 6, 2)
    assert told.init_method == "tcp://gpu08:29500"
    derived = launch_environment(SRUN | change | {"MASTER_ADDR": "gpu08"})
    assert derived is not None
    assert derived.init_method.startswith("tcp://gpu08:2"), "the port is computed from the job's number"


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        ({"SLURM_NTASKS_PER_NODE": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "4"}, None),
        ({"SLURM_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, 4),
        ({"SLURM_TASKS_PER_NODE": "many", "SLURM_NODEID": "0"}, None),
    ],
)
def test_how_many_ranks_slurm_put_on_this_node(variables: dict[str, str], expected: int | None) -> None:
    place = launch_environment(SRUN | {"MASTER_ADDR": "gpu08"} | variables)
    assert place is not None
    assert place.local_world_size == expected


def test_srun_without_the_number_of_tasks_of_the_step() -> None:
    """As some versions set them: the allocation's number then."""
    variables = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"}
    with pytest.raises(InvalidArgumentError, match="lacks SLURM_NTASKS"):
        launch_environment(variables)
    place = launch_environment(variables | {"SLURM_NTASKS": "6", "MASTER_ADDR": "gpu08"})
    assert place is not None
    assert place.world_size == 6


def test_hydra_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra, "_ancestors", lambda _: iter([(12, "sh"), (11, "hydra_pmi_proxy"), (10, "mpiexec")]))
    place = launch_environment(HYDRA)
    assert place is not None
    assert (place.launcher, place.rank, place.world_size) == ("mpiexec", 1, 2)
    assert (place.local_rank, place.local_world_size) == (1, 2)
    assert place.init_method.startswith("tcp://127.0.0.1:")
    monkeypatch.setattr(hydra, "_ancestors", lambda _: iter([]))
    with pytest.raises(InvalidArgumentError, match="MASTER_PORT is not set: pass -genv MASTER_ADDR"):
        launch_environment(HYDRA)


def test_hydra_on_several_hosts_is_told_the_meeting_point() -> None:
    spread = HYDRA | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    with pytest.raises(InvalidArgumentError, match=r"several hosts.*MASTER_ADDR.*-genv MASTER_ADDR"):
        launch_environment(spread)
    told = launch_environment(spread | {"MASTER_ADDR": "h0", "MASTER_PORT": "29500"})
    assert told is not None
    assert told.init_method == "tcp://h0:29500"


def test_mxnets_start_scripts() -> None:
    variables = {
        "DMLC_ROLE": "worker",
        "DMLC_TASK_ID": "1",
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "3",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "9091",
    }
    place = launch_environment(variables)
    assert place is not None
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("dmlc", 1, 3, None)
    assert place.init_method == "tcp://10.0.0.1:9091"
    assert dmlc.as_node(variables) == {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "9091",
    }
    told = launch_environment(variables | {"DMLC_WORKER_ID": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"})
    assert told is not None
    assert (told.rank, told.init_method) == (2, "tcp://h0:29500")
    with pytest.raises(InvalidArgumentError, match="lacks DMLC_PS_ROOT_PORT"):
        launch_environment({name: it for name, it in variables.items() if name != "DMLC_PS_ROOT_PORT"})
    with pytest.raises(InvalidArgumentError, match="set DMLC_WORKER_ID"):
        launch_environment({name: it for name, it in variables.items() if name != "DMLC_TASK_ID"})
    with pytest.raises(InvalidArgumentError, match="is not worker, server or scheduler"):
        launch_environment(variables | {"DMLC_ROLE": "boss"})


def test_the_place_of_mxnets_servers_is_behind_its_workers() -> None:
    variables = {
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "2",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "9091",
    }
    for role, rank in (("worker", 1), ("server", 3)):
        found = dmlc.with_servers(variables | {"DMLC_ROLE": role, "DMLC_WORKER_ID": "1"})
        assert found is not None
        place, servers = found
        assert (place.rank, place.world_size, place.init_method, servers) == (rank, 5, "tcp://10.0.0.1:9091", 2)
    for other in ({}, {"DMLC_ROLE": "scheduler"}, {"DMLC_ROLE": "worker", "DMLC_NUM_SERVER": "0"}):
        assert dmlc.with_servers(variables | other) is None
    with pytest.raises(InvalidArgumentError, match="DMLC_NUM_SERVER=two"):
        dmlc.with_servers({"DMLC_ROLE": "server", "DMLC_NUM_SERVER": "two"})


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_mxnets_servers_and_schedulers_end_at_once(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ({}, {"OMPI_COMM_WORLD_SIZE": "2"}):  # also where mpirun started it
        with pytest.raises(SystemExit) as ended:
            launch_environment({"DMLC_ROLE": role, **more})
        assert ended.value.code == 0
        assert f"DMLC_ROLE={role}: none is needed" in capsys.readouterr().err


def test_the_ancestors_of_a_process() -> None:
    found = list(hydra._ancestors(os.getpid()))
    assert found[0][0] == os.getppid()
    assert all(name for _, name in found)
    assert list(hydra._ancestors(2**30)) == []


def test_host_identity_is_stable_and_tells_names_apart() -> None:
    assert config.host_identity() == config.host_identity()
    assert config.host_identity("a") != config.host_identity("b")
