"""What the doctor does and says about ranks: the order of measurements, the matrix, who differs, the report."""

from __future__ import annotations

import argparse
import itertools
import json
import socket

import pytest

from ringdp.tools import option_types, starting
from ringdp.tools.doctor import report
from ringdp.tools.doctor.finding import Finding, Verdict, merged
from ringdp.tools.doctor.host import Thresholds
from ringdp.tools.doctor.ranks import comparison, edges
from ringdp.tools.doctor.ranks.edges import Edge, Matrix
from ringdp.tools.doctor.ranks.meeting import describe_ranks
from ringdp.tools.doctor.ranks.probe import Client, ProbeServer, split
from tests.helpers import need

need("ringdp._C", "ringdp's extension, built with `make build`,")

NO_WISHES = Thresholds()
TOKEN = bytes(16)


@pytest.mark.parametrize(
    "host_of", [(0,), (0, 1), (0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3, 4), (0, 1, 1, 2, 0), tuple(range(16))]
)
def test_every_pair_is_measured_once_and_no_two_share_a_host(host_of: tuple[int, ...]) -> None:
    order = edges.rounds(host_of)
    assert sorted(pair for pairs in order for pair in pairs) == list(itertools.combinations(range(len(host_of)), 2))
    for pairs in order:
        busy = [host for pair in pairs for host in {host_of[rank] for rank in pair}]
        assert len(busy) == len(set(busy))
    if len(set(host_of)) == len(host_of):
        assert len(order) <= 1.5 * len(host_of)  # side by side, and not one after the other


def matrix(host_of: tuple[int, ...], *, rates: dict[tuple[int, int], float] | None = None, **changes: object) -> Matrix:
    """All edges at 1 Gbit and 100 µs, but for those in `rates`; `changes` for edge 0 to 1."""
    found = {}
    for pair in itertools.permutations(range(len(host_of)), 2):
        edge = Edge(*pair, True, bytes_per_s=(rates or {}).get(pair, 125e6), latency_s=1e-4)
        found[pair] = Edge(**{**edge.__dict__, **changes}) if pair == (0, 1) else edge
    return Matrix(host_of, tuple(f"n{host}" for host in host_of), found)


def test_a_hosts_link_is_its_fastest_edge_in_the_slower_direction() -> None:
    rates = {(0, 2): 50e6, (1, 2): 10e6, (3, 2): 20e6}  # what host 1 gets
    assert matrix((0, 0, 1, 2), rates=rates).uplinks() == {"n0": 125e6, "n1": 50e6, "n2": 125e6}
    assert matrix((0, 0)).uplinks() == {}


def problems(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.verdict is Verdict.PROBLEM]


@pytest.mark.parametrize("back", [True, False])
def test_through_a_door_ranks_that_do_not_reach_each_other_are_relayed(back: bool) -> None:
    cut = matrix((0, 1, 2), reached=False, tried=("10.0.0.2:29600: timed out",))
    if not back:
        other = Edge(**{**cut.edges[1, 0].__dict__, "reached": False, "tried": ("10.0.0.1:29600: refused",)})
        cut = Matrix(cut.host_of, cut.names, {**cut.edges, (1, 0): other})
    found = list(edges.findings(cut, NO_WISHES, door=True))
    assert not problems(found)
    if back:
        assert found[0].verdict is Verdict.OK
        assert found[0].sentence.startswith("rank 0 (n0) does not reach rank 1 (n1), which dials it: 10.0.0.2:29600")
    else:
        assert found[0].verdict is Verdict.NOTE
        assert found[0].sentence == (
            "rank 0 (n0) and rank 1 (n1) are relayed through the door, since neither reaches the other:"
            " there 10.0.0.2:29600: timed out; back 10.0.0.1:29600: refused"
        )
    assert len([one for one in found if "reach" in one.sentence]) == 1


def test_a_slow_edge_is_named_with_its_direction() -> None:
    found = list(edges.findings(matrix((0, 1, 2), rates={(2, 1): 12.5e6}), NO_WISHES))
    [slow] = [one for one in found if one.verdict is Verdict.NOTE]
    assert (
        "the slowest edge between hosts is rank 2 (n2) to rank 1 (n1): 100 Mbit/s, the median is 1 Gbit/s"
        in slow.sentence
    )
    assert "the other direction has 1 Gbit/s" in slow.remedy
    assert not problems(found)
    assert all(one.verdict is Verdict.OK for one in edges.findings(matrix((0, 1, 2)), NO_WISHES))


def test_thresholds_are_about_links_between_hosts_where_there_are_some() -> None:
    wishes = Thresholds(min_bytes_per_s=100e6, max_latency_s=50e-6)
    two_hosts = matrix((0, 0, 1), rates={(0, 1): 1e6})  # slow inside the host
    found = problems(list(edges.findings(two_hosts, wishes)))
    assert len(found) == 1
    assert "at most 50 µs was asked for" in found[0].sentence
    found = problems(list(edges.findings(matrix((0, 0), rates={(0, 1): 1e6}), wishes)))
    assert "at least 800 Mbit/s were asked for" in found[0].sentence


def test_an_edge_that_is_cut_matters_where_the_higher_rank_dials() -> None:
    tried = ("10.0.0.2:29600: Connection refused",)
    one = Edge(0, 1, False, tried)
    two = Edge(1, 0, False, tried)
    whole = matrix((0, 1, 2))
    found = list(edges.findings(Matrix(whole.host_of, whole.names, {**whole.edges, (0, 1): one}), NO_WISHES))
    assert not problems(found)
    assert "rank 0 (n0) does not reach rank 1 (n1): 10.0.0.2:29600: Connection refused" in found[0].sentence
    found = problems(list(edges.findings(Matrix(whole.host_of, whole.names, {**whole.edges, (1, 0): two}), NO_WISHES)))
    assert "RINGDP_ADVERTISE" in found[0].remedy
    assert "cut" in edges.tables(Matrix(whole.host_of, whole.names, {**whole.edges, (1, 0): two}))[0]


def test_a_far_edge_is_told_what_tcp_needs() -> None:
    found = list(edges.findings(matrix((0, 1, 2), latency_s=0.08, bytes_per_s=10e6), NO_WISHES))
    [window] = [one for one in found if "apart" in one.sentence]
    assert "rank 0 (n0) and rank 1 (n1) are 80 ms apart" in window.sentence
    assert "tcp_rmem" in window.remedy


def test_clocks_are_compared_with_rank_0s() -> None:
    whole = matrix((0, 1, 2))
    apart = Edge(2, 0, True, clock_offset_s=-0.4, clock_error_s=1e-3)  # rank 0's is behind rank 2's
    near = Edge(0, 1, True, clock_offset_s=1e-3, clock_error_s=1e-4)
    found = list(edges._clocks(Matrix(whole.host_of, whole.names, {(2, 0): apart, (0, 1): near}), None))
    assert found[0].verdict is Verdict.NOTE
    assert "the clock of n2 is 400 ms ahead of that of n0, give or take 1 ms" in found[0].sentence
    [wrong] = edges._clocks(Matrix(whole.host_of, whole.names, {(2, 0): apart}), 0.1)
    assert wrong.verdict is Verdict.PROBLEM


def test_large_matrices_show_their_beginning() -> None:
    text = edges.tables(matrix(tuple(range(20))))[0]
    assert "the first 16 ranks of 20" in text
    assert "rank 15 (n15)" in text
    assert "rank 16" not in text


def test_who_differs_is_named() -> None:
    same = {"ringdp": "0.1.0", "kernel": "6.1", "cores": "8"}
    assert [one.verdict for one in comparison.findings([same] * 3)] == [Verdict.OK]
    other = [
        same,
        same,
        same | {"ringdp": "0.2.0"},
        same | {"kernel": "5.10"},
        same | {"RINGDP_SPIN_US": "0", "cores": "4"},
    ]
    by_name = {str(one.facts["name"]): one for one in comparison.findings(other)}
    assert by_name["ringdp"].verdict is Verdict.PROBLEM
    assert by_name["ringdp"].sentence == "ringdp differs: 0.2.0 on rank 2, 0.1.0 on ranks 0, 1, 3 and 4"
    assert by_name["kernel"].verdict is Verdict.OK
    assert by_name["cores"].verdict is Verdict.NOTE
    assert by_name["RINGDP_SPIN_US"].sentence == "RINGDP_SPIN_US differs: 0 on rank 4, not set on ranks 0, 1, 2 and 3"


def test_ranks_in_words() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([1, 2]) == "ranks 1 and 2"
    assert describe_ranks(list(range(40))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, … (40 of them)"


def test_findings_of_hosts_are_merged_and_told_apart() -> None:
    def of(sentence: str, check: str = "memory") -> Finding:
        return Finding(check, Verdict.NOTE, sentence, "do this")

    together = merged({"a": [of("same"), of("last", "clock")], "b": [of("only b"), of("same")], "c": [of("same")]})
    assert [(one.check, one.sentence, one.hosts) for one in together] == [
        ("memory", "same", ("a", "b", "c")),
        ("memory", "only b", ("b",)),
        ("clock", "last", ("a",)),
    ]
    text = report.text("title", together, hosts=("a", "b", "c"))
    assert "  note     same\n" in text
    assert "  note     b: only b\n           → do this" in text
    assert text.endswith("0 problems, 3 notes")
    assert report.exit_code(together) == 0
    assert report.exit_code([Finding("x", Verdict.PROBLEM, "bad", "mend it")]) == 1


def test_json_can_be_read_back() -> None:
    finding = Finding("memory", Verdict.NOTE, "small", "more", {"bytes": 3}, ("a",))
    told = json.loads(report.as_json({"ranks": 1}, [finding]))
    assert told["ok"] is True
    assert told["ringdp_doctor"] == 1
    assert Finding.from_dict(told["findings"][0]) == finding


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("1gbit", 125e6), ("900mbit", 112.5e6), ("100MB/s", 1e8), ("8bit", 1)]
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert option_types.rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["1", "1gb", "-1gbit", "0mbit", "fast"])
def test_what_is_not_a_rate(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
        option_types.rate(text)


def test_durations() -> None:
    assert [option_types.duration(text) for text in ("500us", "2ms", "1.5s")] == pytest.approx([5e-4, 2e-3, 1.5])
    with pytest.raises(argparse.ArgumentTypeError, match="'3' is not a time"):
        option_types.duration("3")


def test_flags_that_start_ranks() -> None:
    parser = argparse.ArgumentParser()
    starting.add_options(parser)
    assert starting.problem(parser.parse_args(["-n", "0"])) == "-n must be 1 or more, not 0"
    assert "both name hosts" in str(starting.problem(parser.parse_args(["-H", "a", "--hostfile", "b"])))
    assert "--ssh goes with -H" in str(starting.problem(parser.parse_args(["--ssh", "x"])))
    assert not starting.wanted(parser.parse_args([]))


def test_a_server_answers_who_knows_the_token() -> None:
    with ProbeServer(["127.0.0.1"], TOKEN) as server:
        [address] = server.addresses
        client = Client(TOKEN)
        assert client.reach([address], same_host=True).address == address
        found = client.latency(address)
        assert 0 < found.least_s <= found.median_s < 1
        assert abs(found.clock_offset_s) <= found.clock_error_s + 1e-3  # the same clock
        assert client.rate_from(address, 0.05) > 1e6
        stranger = Client(b"x" * 16).reach([address], same_host=True)
        assert stranger.address == ""
        assert address in stranger.tried[0]
    refused = client.reach([address], same_host=True)
    assert refused.tried == (f"{address}: Connection refused",)
    assert client.reach([address], same_host=False).tried == ()  # loopback of another host is not asked


def test_strangers_do_not_keep_the_server_busy() -> None:
    with ProbeServer(["127.0.0.1"], TOKEN) as server:
        idle = [socket.create_connection(split(server.addresses[0])) for _ in range(20)]
        try:
            assert Client(TOKEN).reach(server.addresses, same_host=True).address
        finally:
            for one in idle:
                one.close()
