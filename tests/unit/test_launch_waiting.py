"""What a launcher says while the other nodes have not come."""

from __future__ import annotations

import datetime
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringdp.launcher import waiting
from ringdp.launcher.arguments import Meeting, parse
from ringdp.launcher.waiting import Waiting
from tests.fault.launch_jobs import wait_until

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"FIRST_S": 0.05, "EVERY_S": 0.1, "UNREACHABLE_S": 0.1}.items():
        monkeypatch.setattr(waiting, name, seconds)


def meeting(*flags: str) -> Meeting:
    found = parse([*flags, "script.py"]).meeting
    assert found is not None
    return found


def static(port: int, node: int, nodes: int = 3) -> Meeting:
    return meeting(
        "--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_an_address_that_cannot_be_reached_is_told_with_what_was_tried() -> None:
    port, told = free_port(), list[str]()
    watch = Waiting(static(port, node=1, nodes=2), told.extend)
    watch.begin()
    wait_until(lambda: any("cannot reach" in line for line in told), "word of the address", 10)
    watch.end()
    assert told[0].startswith(f"node 1 of 2 waits for node 0 at 127.0.0.1:{port}, since 0.")
    assert told[0].endswith("of at most 15 min 00 s (--rdzv-timeout)")
    (tried,) = [line for line in told if "cannot reach" in line]  # once
    assert tried == f"cannot reach 127.0.0.1:{port}: 127.0.0.1 port {port}: Connection refused"
    assert any("--master-addr" in line for line in told)
    time.sleep(0.15)  # a round that had begun
    lines = len(told)
    time.sleep(0.3)
    assert len(told) == lines


def test_a_name_that_is_not_known() -> None:
    watch = Waiting(
        meeting("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "no-such-host.invalid"), print
    )
    (problem,) = watch.tried()
    assert problem.startswith("no-such-host.invalid: ")


def test_nodes_that_have_come_are_named() -> None:
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=10))
    watches = [Waiting(static(port, node), print) for node in (0, 2)]
    for watch in watches:
        watch.note_handler(SimpleNamespace(_store=server))
    assert watches[0].text() == f"node 0 of 3 waits for nodes 1, 2 at 127.0.0.1:{port}; here: node 0 ({HERE})"
    for watch, own in zip(reversed(watches), (2, 0), strict=True):
        both = f"here: node 0 ({HERE}), node 2 ({HERE})"
        assert watch.text() == f"node {own} of 3 waits for node 1 at 127.0.0.1:{port}; {both}"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [("4", "this node waits for 2 more"), ("2:4", "this node waits for more, up to 4")],
)
def test_elastic_nodes_are_counted(nodes: str, text: str) -> None:
    handler: Any = SimpleNamespace(
        _state_holder=SimpleNamespace(
            state=SimpleNamespace(participants={SimpleNode("box2"): 1, SimpleNode("box1"): 0})
        )
    )
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29999")
    watch = Waiting(meeting("--nnodes", nodes, *where), print)
    watch.note_handler(handler)
    assert watch.text() == f"{text} at 127.0.0.1:29999; here: box1, box2"
    watch.note_handler(object())  # of a torch that keeps it elsewhere
    assert watch.text() == "this node waits for the other nodes, 4 in all, at 127.0.0.1:29999"


class SimpleNode:
    def __init__(self, addr: str) -> None:
        self.addr = addr
