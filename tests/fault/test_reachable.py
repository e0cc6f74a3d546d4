"""Ranks on hosts whose networks are not what they seem: at which addresses they meet, and what they say if at none."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from tests.fault.faults import sampled
from tests.fault.hosts import Lab, Outcome, RankServer, RankSpec, one_on_each, why_not

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as made:
        yield made


def meet(
    server: RankServer,
    lab: Lab,
    folder: Path,
    *,
    hosts_file: str = "",
    per_rank: dict[int, dict[str, str]] | None = None,
    world: int = 2,
    **variables: str,
) -> list[Outcome]:
    """Ranks on the hosts in turn; they meet in a file, so that only what they find out themselves has to work."""
    specs = [
        RankSpec(
            rank,
            world,
            space=lab.spaces[rank % len(lab.spaces)],
            host_name=f"h{rank % len(lab.spaces)}",
            hosts_file=hosts_file.replace("ME", f"h{rank % len(lab.spaces)}"),
            variables=variables | (per_rank or {}).get(rank, {}),
            method=f"file://{folder}/store",
        )
        for rank in range(world)
    ]
    return server.run(specs, folder)


def expect_met(outcomes: list[Outcome], network: str, within_s: float = 3.0) -> None:
    assert [it.text for it in outcomes] == [""] * len(outcomes)
    total = sum(range(1, len(outcomes) + 1))
    for it in outcomes:
        assert it.value == total
        assert it.seconds < within_s
        assert it.peers
        assert all(peer.startswith(network) for peer in it.peers), it.peers
        assert it.listening  # for connections that break


def expect_unreachable(outcomes: list[Outcome], *words: str, within_s: float = 10.0) -> None:
    for rank, it in enumerate(outcomes):
        assert it.error == "HandshakeError", it
        assert it.seconds < within_s
        assert it.peer == 1 - rank
        for word in ("rank 1 (host h1", "cannot reach rank 0 (host h0", "RINGDP_IFACE", "RINGDP_ADVERTISE",
                     "RINGDP_PORT_RANGE", *words):  # fmt: skip
            assert word in it.text, it.text


def test_a_name_that_means_loopback_and_docker0_on_both_hosts(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    """As on many a Debian with Docker: the host's own name is 127.0.1.1, and docker0 is up with the same address."""
    for host in (0, 1):
        lab.bridge(host, "docker0", "172.17.0.1/16")
    lab.link("eth0", ["10.1.0.{}/24"])
    outcomes = meet(server, lab, tmp_path, hosts_file="127.0.0.1 localhost\n127.0.1.1 ME\n")
    expect_met(outcomes, "10.1.0.")


def test_an_interface_that_leads_nowhere(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    """The first in the list, with a carrier, and with a route that swallows packets for the other's address."""
    for host in (0, 1):
        lab.ip(host, "link add dead0 type veth peer name deaf0")
        lab.ip(host, f"addr add 10.9.{host}.1/24 dev dead0")
        lab.ip(host, "link set dead0 up")
        lab.ip(host, "link set deaf0 up")
    lab.link("eth0", ["10.1.0.{}/24"])
    lab.ip(1, "route add 10.9.0.0/24 dev dead0")
    lab.ip(0, "route add 10.9.1.0/24 dev dead0")
    expect_met(meet(server, lab, tmp_path), "10.1.0.")


def test_ranks_of_one_host_among_several(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.link("eth0", ["10.1.0.{}/24"])
    expect_met(meet(server, lab, tmp_path, world=4), "10.1.0.")


def test_ipv6_only(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.link("eth0", ["fd00:1::{}/64"])
    expect_met(meet(server, lab, tmp_path), "fd00:1::")


def test_ipv4_dropped_and_ipv6_open(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.link("eth0", ["10.1.0.{}/24", "fd00:1::{}/64"])
    lab.drop_incoming(0, "eth0", "1-65534")
    lab.ip(0, "-6 rule del pref 10")
    expect_met(meet(server, lab, tmp_path), "fd00:1::")


def test_a_firewall_that_drops_and_ports_that_it_lets_through(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.link("eth0", ["10.1.0.{}/24", "fd00:1::{}/64"])
    lab.drop_incoming(0, "eth0", "1-29599")
    for family in ("-4", "-6"):
        lab.ip(0, f"{family} rule add pref 11 iif eth0 ipproto tcp dport 29700-65534 blackhole")
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
    closed = meet(server, lab, tmp_path / "closed", RINGDP_PORT_RANGE="40000-40009")
    expect_unreachable(closed, "10.1.0.1:40000 (Connection timed out", "[fd00:1::1]:40000 (Connection timed out")
    assert closed[0].text.split(";")[0].endswith(closed[1].text.split(";")[0])  # one story
    expect_met(meet(server, lab, tmp_path / "open", RINGDP_PORT_RANGE="29600-29699"), "")


@pytest.mark.parametrize(
    "how", ["no answer", *(pytest.param(it, marks=pytest.mark.slow) for it in ("unreachable", "firewall"))]
)
def test_one_pair_of_ranks_cannot_reach_each_other(server: RankServer, tmp_path: Path, how: str) -> None:
    """Ranks 1 and 2. The others are connected to everybody, and neither return from init nor tell another story."""
    with Lab(4) as lab:
        for number, (one, other) in enumerate(combinations(range(4), 2)):
            lab.link(f"eth{number}", [f"10.1.{number}.{{}}/24"], hosts=(one, other))
        blocked = list(combinations(range(4), 2)).index((1, 2))
        if how == "firewall":
            lab.drop_incoming(1, f"eth{blocked}", "1-65534")
        elif how == "no answer":  # rank 2's packets arrive, the answers do not
            lab.ip(1, f"route add blackhole 10.1.{blocked}.2/32")
        else:
            lab.ip(2, f"route add unreachable 10.1.{blocked}.1/32")
        outcomes = meet(server, lab, tmp_path, world=4)
    ended = [it.at for it in outcomes]
    for it in outcomes:
        assert it.error == "HandshakeError", it
        assert it.seconds < 10.0
        assert "rank 2 (host h2" in it.text
        assert "cannot reach rank 1 (host h1" in it.text
        assert f"10.1.{blocked}.1:" in it.text
        assert ("No route to host" if how == "unreachable" else "no answer for") in it.text
        assert "RINGDP_IFACE" in it.text
    assert len({it.text[it.text.index("rank 2 (host h2") :] for it in outcomes}) == 1  # word for word
    assert [it.peer for it in outcomes] == [1, 2, 1, 1]
    assert max(ended) - min(ended) < 2.0


def run_late(
    server: RankServer, lab: Lab, folder: Path, body: Callable[[RankSpec, Outcome], None], **variables: str
) -> list[Outcome]:
    """A rank on each host, in a job in which pairs connect when they first need it."""
    variables["RINGDP_FULL_MESH_RANKS"] = "1"
    return server.run(one_on_each(lab, folder, f"{__name__}:{body.__name__}", variables), folder)


def add_for_a_while(spec: RankSpec, outcome: Outcome) -> None:
    """Rings, which need no pair of ranks that is not connected from the start."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    outcome.at = time.monotonic()
    while time.monotonic() < outcome.at + 20.0:
        dist.all_reduce(torch.ones(300_000))
        time.sleep(0.05)


def test_a_pair_that_is_not_connected_from_the_start_cannot_reach_each_other(
    server: RankServer, tmp_path: Path
) -> None:
    """Ranks 1 and 4 of six: found in the background, before anything is to go between them, and told to all."""
    with Lab(6) as lab:
        lab.switch("10.1.0.{}/24")
        lab.ip(1, "route add blackhole 10.1.0.5/32")  # rank 4's packets arrive, the answers do not
        outcomes = run_late(server, lab, tmp_path, add_for_a_while)
    for it in outcomes:
        assert it.error == "HandshakeError", it
        assert it.seconds < 10.0
        assert "rank 4 (host h4" in it.text
        assert "cannot reach rank 1 (host h1" in it.text
        assert "10.1.0.2:" in it.text
        assert "no answer for" in it.text
        assert "RINGDP_IFACE" in it.text
    assert max(it.at for it in outcomes) - min(it.at for it in outcomes) < 2.0


def send_to_a_higher_rank(spec: RankSpec, outcome: Outcome) -> None:
    import torch
    import torch.distributed as dist

    import ringdp

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    for anybody in (False, True):
        data = torch.full((50_000,), float(spec.rank))
        if spec.rank == 2:
            dist.send(data, 5, tag=int(anybody))
        if spec.rank == 5:
            time.sleep(0.5)
            dist.recv(data, None if anybody else 2, tag=int(anybody))
            assert bool((data == 2.0).all())
    outcome.value = ringdp.traffic().bytes_sent
    dist.barrier()
    dist.destroy_process_group()


def test_a_higher_rank_that_cannot_be_reached_connects_itself(server: RankServer, tmp_path: Path) -> None:
    """Rank 5 of six is behind a firewall that lets nothing in: it connects itself when it waits for a message."""
    with Lab(6) as lab:
        lab.switch("10.1.0.{}/24")
        lab.drop_incoming(5, "eth0", "29600-29699")
        outcomes = run_late(server, lab, tmp_path, send_to_a_higher_rank, RINGDP_PORT_RANGE="29600-29699")
    assert [it.text for it in outcomes] == [""] * 6
    assert outcomes[2].value > 2 * 200_000


@pytest.mark.slow  # as long as the firewall above, of which it says the same
def test_no_way_between_the_hosts(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    """Each has a network of its own; the address of the other is unknown to the kernel, which says so at once."""
    lab.bridge(0, "lan0", "10.8.0.1/24")
    lab.bridge(1, "lan0", "10.8.1.1/24")
    expect_unreachable(meet(server, lab, tmp_path), "10.8.0.1:", "(Network is unreachable")


@pytest.mark.parametrize(
    "spec", sampled(["eth1", "10.2.0.0/16", "^eth0,docker", "10.2.0.1,10.2.0.2", "nothing0,=eth1"], 2)
)
def test_the_interface_can_be_chosen(server: RankServer, lab: Lab, tmp_path: Path, spec: str) -> None:
    lab.link("eth0", ["10.1.0.{}/24"])
    lab.link("eth1", ["10.2.0.{}/24"])
    expect_met(meet(server, lab, tmp_path, RINGDP_IFACE=spec), "10.2.0.")


def test_an_interface_that_is_not_there(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.link("eth0", ["10.1.0.{}/24"])
    outcomes = meet(server, lab, tmp_path, per_rank={1: {"RINGDP_IFACE": "ib0"}})
    assert [it.error for it in outcomes] == ["HandshakeError", "SystemResourceError"]
    for it in outcomes:
        assert it.seconds < 3.0
        assert (
            "RINGDP_IFACE names no interface that is up: 'ib0'; there are eth0 (10.1.0.2), lo (127.0.0.1), lo (::1)"
            in it.text
        )


RELAY = """
import asyncio, sys
async def main(port):
    async def serve(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("10.5.0.1", 29600)
        async def pump(source, sink):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)
    server = await asyncio.start_server(serve, "10.1.0.2", port)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main(int(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("advertised", "port"), sampled([("gate", 29600), ("10.1.0.2", 29600), ("10.1.0.2:30000", 30000)], 2)
)
def test_an_advertised_address(server: RankServer, tmp_path: Path, advertised: str, port: int) -> None:
    """As in a container whose port is forwarded: the address it has itself leads nowhere from outside."""
    with Lab(3) as lab:
        lab.link("inner", ["10.5.0.{}/24"], hosts=(0, 2))
        lab.link("eth0", ["10.1.0.{}/24"], hosts=(1, 2))
        lab.spaces, gate = lab.spaces[:2], lab.spaces[2]
        command = ["ip", "netns", "exec", gate, sys.executable, "-c", RELAY, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
            try:
                assert relay.stdout is not None
                assert relay.stdout.readline() == "ready\n"
                variables = {0: {"RINGDP_ADVERTISE": advertised, "RINGDP_PORT_RANGE": "29600"}}
                outcomes = meet(server, lab, tmp_path, hosts_file="10.1.0.2 gate\n", per_rank=variables)
            finally:
                relay.kill()
        lab.spaces.append(gate)
    assert [it.text for it in outcomes] == ["", ""]
    assert [it.value for it in outcomes] == [3.0, 3.0]
    assert outcomes[1].peers == ["10.1.0.2"]


def test_a_wrong_advertised_address_is_only_one_of_those_tried(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    lab.link("eth0", ["10.1.0.{}/24"])
    outcomes = meet(server, lab, tmp_path, per_rank={0: {"RINGDP_ADVERTISE": "no-such-name.invalid"}})
    expect_met(outcomes, "10.1.0.", within_s=6.0)
