"""Lists of hosts, what the hosts say of themselves, and what a launcher of several makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdp.launcher import advice
from ringdp.launcher.arguments import parse
from ringdp.launcher.host_list import Host, parse_hosts, read_host_file
from ringdp.launcher.many_hosts import is_here, meeting_address, variables
from ringdp.launcher.tether import Hello


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1:4,node2:2", [Host("node1", 4), Host("node2", 2)]),
        ("me@node1, 10.0.0.2:3", [Host("me@node1"), Host("10.0.0.2", 3)]),
        ("[fe80::1]:4,fe80::2,[::1]", [Host("fe80::1", 4), Host("fe80::2"), Host("::1")]),
        ("a,b,a", [Host("a", 2), Host("b")]),
    ],
)
def test_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a:0", "a:-1", "a:", "a:many", "-oProxyCommand=x", "a b", "a;rm:2"])
def test_what_is_not_a_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"-H .*: (.* is not a host's name|the number of ranks must be 1 or more)"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# mine\nnode1 slots=4 max_slots=8\n\nnode2 slots=2 # slow\n", [Host("node1", 4), Host("node2", 2)]),
        ("node1:4\nnode2\n", [Host("node1", 4), Host("node2")]),
        ("n1\nn1\nn2\nn2\nn1\n", [Host("n1", 3), Host("n2", 2)]),  # PBS
        (
            "box1.lab 4 all.q@box1.lab UNDEFINED\nbox2.lab 2 all.q@box2.lab <NULL>\n",
            [Host("box1.lab", 4), Host("box2.lab", 2)],
        ),
    ],
)
def test_host_files(tmp_path: Path, text: str, hosts: list[Host]) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_host_file(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("node1\nnode2 slots=x\n", "line 2: the number of ranks must be 1 or more, not 'x'"),
        ("node1 slots 4\n", "line 1: 'slots' is not slots=NUMBER"),
    ],
)
def test_host_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_host_file(tmp_path / "hosts")


def test_the_command_line_is_split_at_the_script(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("ab" * 32)
    (tmp_path / "secret").chmod(0o600)
    own = ["-H", "a:2,b", "-x", "FOO", "--ssh=ssh -p 2", "--secret-file", str(tmp_path / "secret")]
    found = parse([*own, "-n", "3", "--max-restarts=1", "train.py", "-H", "x", "-n", "9"]).placement
    assert found is not None
    assert found.hosts == (Host("a", 2), Host("b", 3))
    assert found.flags == ("-n", "3", "--max-restarts=1")
    assert found.program == ("train.py", "-H", "x", "-n", "9")
    assert (found.script, found.variables, found.ssh) == ("train.py", ("FOO",), "ssh -p 2")
    module = parse(["-Ha", "-m", "pack.mod", "--lr", "1"]).placement
    assert module is not None
    assert module.script is None
    assert module.program == ("pack.mod", "--lr", "1")
    assert parse(["train.py", "-H", "x"]).placement is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-H", "a", "--nnodes", "2"], "leave out --nnodes"),
        (["-H", "a", "--rdzv-backend", "c10d"], "leave out --rdzv-backend"),
        (["-H", "a", "--hostfile", "x"], "give one of them"),
        (["--hostfile", "/no/such/file"], "No such file"),
        (["-x", "FOO"], "-x goes with -H or --hostfile"),
        (["-H", "a:x"], "must be 1 or more, not 'x'"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*flags, "train.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a:2:3", "[a:2]:3", "a;b:2", "-oProxyCommand=x", "a b", "a,,b", ""])
def test_what_is_not_a_host(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host's name"):
        parse_hosts(text)


def test_addresses_and_files_of_other_systems(tmp_path: Path) -> None:
    assert parse_hosts("fe80::1%eth0,[fd00::1]:2") == [Host("fe80::1%eth0"), Host("fd00::1", 2)]
    path = tmp_path / "hosts"
    path.write_bytes("\ufeffn1 slots=2\r\n# the rest\r\nfd00::2 slots=1\r\n".encode())
    assert read_host_file(path) == [Host("n1", 2), Host("fd00::2", 1)]
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="hosts is not a text file"):
        read_host_file(path)


def test_in_a_schedulers_job_its_hosts_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    found = parse(["train.py"]).placement
    assert found is not None
    assert found.hosts == (Host("n1", 2), Host("n2", 1))
    assert "PBS_NODEFILE names 2 hosts" in found.notice
    assert parse(["--nnodes", "2", "train.py"]).placement is None
    assert parse(["train.py"], on_a_node=True).placement is None
    (tmp_path / "nodes").write_text("n1\nn1\n")
    assert parse(["train.py"]).placement is None
    # As Sun Grid Engine writes it: host, slots, queue instance, processors.
    text = "n1.cluster 4 all.q@n1.cluster UNDEFINED\nn2.cluster 2 all.q@n2.cluster UNDEFINED\n"
    (tmp_path / "pe_hostfile").write_text(text)
    monkeypatch.delenv("PBS_NODEFILE")
    monkeypatch.setenv("PE_HOSTFILE", str(tmp_path / "pe_hostfile"))
    found = parse(["train.py"]).placement
    assert found is not None
    assert found.hosts == (Host("n1.cluster", 4), Host("n2.cluster", 2))
    assert "PE_HOSTFILE names 2 hosts" in found.notice


def hello(host: str = "box", address: str = "", seen: str = "", **named: object) -> Hello:
    given = {"problem": None, "versions": {"torch": "2.13.0"}, "port": 1234, **named}
    return Hello(host=host, address=address, seen=seen, **given)  # type: ignore[arg-type]


def test_where_the_hosts_meet() -> None:
    away = hello("n2", address="10.0.0.2", seen="10.0.0.9")
    assert meeting_address([hello("n1", address="10.0.0.1", seen="10.0.0.9"), away]) == "10.0.0.1"
    assert meeting_address([hello("me"), away]) == "10.0.0.9"  # this host, as the other sees it
    assert meeting_address([hello("me"), hello("me")]) == "127.0.0.1"
    assert meeting_address([hello("pod-0"), hello("pod-1")]) == "pod-0"  # without ssh
    assert is_here("localhost")
    assert is_here("127.0.0.7")
    assert not is_here("node1")


def test_variables() -> None:
    here = {"RINGDP_LOG_LEVEL": "info", "RINGDP_SECRET_FILE": "/x", "HOME": "/root", "FOO": "1", "NCCL_DEBUG": "INFO"}
    assert variables(here, ["FOO", "BAR=2=3"]) == {
        "RINGDP_LOG_LEVEL": "info",
        "NCCL_DEBUG": "INFO",
        "FOO": "1",
        "BAR": "2=3",
    }
    with pytest.raises(ValueError, match="-x BAZ: there is no such variable here; -x BAZ=VALUE sets one"):
        variables(here, ["BAZ"])


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("python: No module named ringdp.launch", 1, "is ringdp installed there"),
        ("me@n2: Permission denied (publickey).", 255, "without a password; once by hand: ssh-copy-id n2"),
        ("Host key verification failed", 255, "once by hand: ssh n2"),
        ("ssh: connect to host n2 port 22: Connection refused", 255, "cannot be reached: ssh: connect"),
    ],
)
def test_advice(output: str, code: int, said: str) -> None:
    assert said in advice.of_connection("n2", output, code)
