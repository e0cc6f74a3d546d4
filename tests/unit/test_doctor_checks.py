"""What the doctor's checks of a host say, by made-up files of /proc and /sys and by numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from ringdp.tools.doctor import registry
from ringdp.tools.doctor.checks import machine, network, software, wide_area
from ringdp.tools.doctor.finding import Finding, Verdict
from ringdp.tools.doctor.host import Host, Thresholds
from tests.helpers import need

need("ringdp._C", "ringdp's extension, built with `make build`,")

MIB = 1 << 20


def tree(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def verdicts(findings: Iterable[Finding]) -> list[str]:
    return [one.verdict.value for one in findings]


def only(findings: Iterable[Finding]) -> Finding:
    [found] = findings
    return found


def test_every_check_says_something_in_a_container_that_hides_proc_and_sys(tmp_path: Path) -> None:
    found = registry.run_checks(Host(root=tmp_path, environ={}))
    assert {one.check for one in found} >= {"versions", "settings", "processor", "memory", "limits", "network", "ports"}
    assert not [one for one in found if "this check failed" in one.sentence]
    assert all(one.remedy for one in found if one.verdict is Verdict.PROBLEM)


def test_a_check_that_fails_is_a_finding_and_the_others_are_made(caplog: pytest.LogCaptureFixture) -> None:
    def broken(host: Host) -> Iterable[Finding]:
        raise KeyError("speed")

    with caplog.at_level(logging.DEBUG, "ringdp.doctor"):
        found = registry.run_checks(Host(), {"broken": broken, "limits": machine.limits})
    assert found[0].check == "broken"
    assert found[0].verdict is Verdict.PROBLEM
    assert "KeyError: 'speed'" in found[0].sentence
    assert found[1].check == "limits"
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("root", [True, False])
def test_group_limits_of_both_versions(tmp_path: Path, root: bool) -> None:
    """The smallest on the way up; inside a container the path of /proc is not mounted, and the mount itself counts."""
    at = "" if root else "pod/a/"
    two = tree(tmp_path / "two", **{"proc/self/cgroup": "0::/pod/a\n", f"sys/fs/cgroup/{at}memory.max": "1000"})
    assert Host(root=two).cgroup_limit("memory", "memory.max", "memory.limit_in_bytes") == 1000
    tree(two, **{"sys/fs/cgroup/pod/memory.max": "500", "sys/fs/cgroup/memory.max": "max"})
    assert Host(root=two).cgroup_limit("memory", "memory.max", "memory.limit_in_bytes") == 500
    group = "4:memory:/a\n3:cpu,cpuacct:/b\n"
    one = tree(tmp_path / "one", **{"proc/self/cgroup": group, "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "700"})
    assert Host(root=one).cgroup_limit("memory", "memory.max", "memory.limit_in_bytes") == 700
    tree(one, **{"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712"})
    assert Host(root=one).cgroup_limit("memory", "memory.max", "memory.limit_in_bytes") is None


def test_cores_against_ranks_and_quota(tmp_path: Path) -> None:
    assert verdicts(machine.cores(8, 8, None, 4)) == ["ok"]
    crowded = only(machine.cores(2, 2, None, 4))
    assert crowded.verdict is Verdict.NOTE
    assert "start 2 ranks" in crowded.remedy
    low, _ = machine.cores(8, 8, 1.5, 1)
    assert "quota gives 1.5 of the 8 cores" in low.sentence
    root = tree(tmp_path, **{"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"})
    found = list(machine.processor(Host(root=root, cores=4, environ={})))
    assert found[0].facts["quota"] == 0.5


def test_numa_nodes_and_threads(tmp_path: Path) -> None:
    node = "sys/devices/system/node"
    root = tree(
        tmp_path, **{f"{node}/node0/cpulist": "0-7", f"{node}/node1/cpulist": "8-15", f"{node}/node2/cpulist": ""}
    )
    found = only(machine.nodes(Host(root=root)))
    assert "2 NUMA nodes (node0 has cores 0-7, node1 has cores 8-15)" in found.sentence
    host = Host(environ={"OMP_NUM_THREADS": "4"}, cores=8, local_ranks=4)
    assert "OMP_NUM_THREADS=4 on 4 ranks is more than the 8 cores" in only(machine.computing_threads(host)).sentence
    assert verdicts(machine.computing_threads(Host(environ={"OMP_NUM_THREADS": "two"}))) == ["problem"]
    assert verdicts(machine.computing_threads(Host(environ={"OMP_NUM_THREADS": "4"}, cores=8, local_ranks=2))) == []


def test_memory_and_what_loaders_need() -> None:
    text = "MemTotal:       1000 kB\nMemAvailable:    50 kB\nHugePages_Total:       0\nSwapTotal: 10 kB\n"
    found = machine.meminfo(text)
    assert found == {"MemTotal": 1024000, "MemAvailable": 51200, "SwapTotal": 10240}
    little, limited = machine.amounts(found, 512_000)
    assert little.verdict is Verdict.NOTE
    assert "the control group allows 500 KiB" in limited.sentence
    assert verdicts(machine.amounts({}, None)) == []
    docker = only(machine.of_data_loaders((64 * MIB, 64 * MIB), None))
    assert docker.verdict is Verdict.NOTE
    assert "--shm-size" in docker.remedy
    assert verdicts(machine.of_data_loaders((300 * MIB, 300 * MIB), None)) == ["ok"]
    assert verdicts(machine.of_data_loaders((300 * MIB, 300 * MIB), 400 * MIB)) == ["problem"]
    assert verdicts(machine.of_data_loaders(None, None)) == ["note"]


def test_huge_pages() -> None:
    assert machine.bracketed("always [madvise] never") == "madvise"
    assert verdicts(machine.huge_pages("always madvise [never]", None)) == ["note"]
    assert verdicts(machine.huge_pages("[always] madvise never", "always [never]")) == ["ok"]
    assert verdicts(machine.huge_pages(None, None)) == []


def test_limits() -> None:
    assert verdicts(machine.descriptors(1024, 4096, 2, None)) == ["ok"]
    few = only(machine.descriptors(256, 4096, 2, None))
    assert few.verdict is Verdict.PROBLEM
    assert "ulimit -n" in few.remedy
    assert verdicts(machine.descriptors(1024, 4096, 1024, None)) == ["problem"]
    assert verdicts(machine.descriptors(1024, 4096, 2, 4096)) == ["problem"]
    assert verdicts(machine.descriptors(350, 4096, 2, None)) == ["note"]
    assert verdicts(machine.descriptors(-1, -1, 10_000, 10_000)) == ["ok"]
    assert verdicts(machine.lockable(65536, has_rdma=False)) == ["ok"]
    assert verdicts(machine.lockable(65536, has_rdma=True)) == ["note"]
    assert verdicts(machine.lockable(-1, has_rdma=True)) == ["ok"]
    assert verdicts(machine.startable(100)) == ["note"]
    assert verdicts(machine.startable(None)) == []


@pytest.mark.parametrize(
    ("addresses", "verdict"),
    [
        (["127.0.1.1"], "note"),
        (["127.0.0.1", "::1"], "note"),
        (["10.0.0.5"], "ok"),
        (["127.0.1.1", "10.0.0.5"], "ok"),
        (["fe80::1%eth0"], "ok"),
        ("Name or service not known", "note"),
    ],
)
def test_a_name_that_stands_for_loopback(addresses: list[str] | str, verdict: str) -> None:
    assert verdicts(network.resolved("node1", addresses)) == [verdict]


def card(name: str, ip: str, **more: object) -> network.Row:
    usual = {"prefix_bits": 24, "loopback": False, "running": True, "mbit_per_s": None, "mtu": 1500}
    return {"name": name, "ip": ip, **usual, "wireless": False, "half_duplex": False, **more}


def test_interfaces_and_why_they_are_used(tmp_path: Path) -> None:
    loopback, eth, docker = (
        card("lo", "127.0.0.1", loopback=True),
        card("eth0", "10.0.0.5"),
        card("docker0", "172.17.0.1"),
    )
    used = [("eth0", "10.0.0.5"), ("docker0", "172.17.0.1")]
    lo, first, bridge = network.described([loopback, eth, docker], used, "")
    assert "loopback serves this host only" in lo.sentence
    assert "used between hosts, number 1 of 2 (it is up)" in first.sentence
    assert bridge.verdict is Verdict.NOTE
    assert bridge.remedy.startswith("RINGDP_IFACE=^docker0 ")
    _, _, left_out = network.described([loopback, eth, docker], used[:1], "eth0")
    assert "left out by RINGDP_IFACE=eth0" in left_out.sentence
    for more in ({"running": False}, {"wireless": True}, {"half_duplex": True}, {"mtu": 576}):
        assert verdicts(network.described([card("eth0", "10.0.0.5", **more)], used[:1], "")) == ["note"]
    folder = "sys/class/net/eth0"
    root = tree(tmp_path, **{f"{folder}/speed": "-1\n", f"{folder}/mtu": "9000\n", f"{folder}/duplex": "half\n"})
    found = network.attributes(Host(root=root), "eth0")
    assert found == {"mbit_per_s": None, "mtu": 9000, "wireless": False, "half_duplex": True}
    assert network.attributes(Host(root=root), "eth1")["mtu"] is None


def test_a_slow_card_before_a_fast_one() -> None:
    slow, fast = card("eth0", "10.0.0.5", mbit_per_s=1000), card("ib0", "10.1.0.5", mbit_per_s=100_000)
    used = [("eth0", "10.0.0.5"), ("ib0", "10.1.0.5")]
    found = only(network.order([slow, fast], used))
    assert "eth0 (1 Gbit/s) is tried before ib0 (100 Gbit/s)" in found.sentence
    assert found.remedy == "RINGDP_IFACE=ib0,eth0 on every host"
    assert list(network.order([slow, fast], used[::-1])) == []
    assert list(network.order([slow, card("ib0", "10.1.0.5")], used)) == []  # whose speed nobody knows


def test_the_core_lists_and_chooses_interfaces() -> None:
    rows = network.every()
    assert ("lo", "127.0.0.1") in {(row["name"], row["ip"]) for row in rows}
    chosen = network.selected("=lo")
    assert not isinstance(chosen, str)
    assert {row["name"] for row in chosen} == {"lo"}
    wrong = network.selected("nothere7")
    assert isinstance(wrong, str)
    assert "RINGDP_IFACE names no interface that is up: 'nothere7'" in wrong


def test_ports() -> None:
    assert network.why_not("127.0.0.1", 0) is None
    assert network.why_not("192.0.2.77", 0) is not None
    assert verdicts(network.any_port(["192.0.2.77"], None)) == ["problem"]
    assert verdicts(network.of_range(29600, 29601, [29600], 2)) == ["problem"]
    assert verdicts(network.of_range(29600, 29601, [29600, 29601], 2)) == ["ok"]
    assert verdicts(network.of_range(600, 601, [600, 601], 2)) == ["note"]


def test_wide_area_links() -> None:
    assert wide_area.largest("4096\t131072\t6291456") == 6291456
    assert wide_area.largest(None) is None
    assert wide_area.carries_bytes_per_s(6 * MIB, 0.1) == pytest.approx(31_457_280)
    for rate, trip in ((125e6, 0.1), (12.5e6, 0.3), (1.25e9, 0.05)):
        size = wide_area.buffer_for(rate, trip)
        assert wide_area.carries_bytes_per_s(size, trip) >= rate > wide_area.carries_bytes_per_s(size / 2, trip)
    small = only(wide_area.buffers(6 * MIB, 4 * MIB))
    assert "168 Mbit/s" in small.sentence
    assert "net.ipv4.tcp_rmem='4096 131072 67108864'" in small.remedy
    assert verdicts(wide_area.buffers(64 * MIB, 64 * MIB)) == ["ok"]
    assert verdicts(wide_area.control("bbr", ["cubic", "bbr"], ["bbr"])) == ["ok"]
    may_not = only(wide_area.control("cubic", ["reno", "cubic", "bbr"], ["reno", "cubic"]))
    assert "users may not choose bbr (allowed: reno cubic)" in may_not.sentence
    assert "tcp_allowed_congestion_control='reno cubic bbr'" in may_not.remedy
    assert "modprobe tcp_bbr" in only(wide_area.control("cubic", ["reno", "cubic"], ["cubic"])).remedy

    def switches(window_scaling: int) -> list[str]:
        found = wide_area.switches(
            window_scaling=window_scaling, mtu_probing=1, slow_start_after_idle=0, qdisc="fq", control="bbr"
        )
        return verdicts(found)

    assert switches(1) == []
    assert switches(0) == ["note"]


def test_clocks() -> None:
    assert verdicts(machine.synchronised(machine.UNSYNCHRONISED)) == ["note"]
    assert verdicts(machine.synchronised(0)) == ["ok"]
    assert verdicts(machine.synchronised(None)) == []
    assert verdicts(machine.source("hpet")) == ["note"]
    assert verdicts(machine.source("kvm-clock")) == []
    assert isinstance(machine.kernel_status(), int | None)


def test_gpus_that_torch_cannot_use() -> None:
    def found(**more: object) -> list[str]:
        usual = {"built_for": "13.0", "has_driver": True, "count": 2, "nccl": "2.27.3", "visible": None}
        values = usual | more
        return verdicts(software.gpus(values.pop("built_for"), **values))  # type: ignore[arg-type]

    assert found() == ["ok"]
    assert found(built_for=None, count=0) == ["note"]
    assert found(count=0, visible="") == ["note"]
    assert found(built_for=None, has_driver=False, count=0) == ["ok"]


@pytest.mark.filterwarnings("ignore:RINGDP_IFACES")
def test_settings_that_cannot_be_used_or_mean_nothing() -> None:
    host = Host(environ={"RINGDP_IFACES": "eth0", "RINGDP_SPIN_US": "many", "RINGDP_SECRET_FILE": "", "HOME": "/root"})
    found = list(software.settings(host))
    assert verdicts(found) == ["problem", "problem", "ok"]
    assert "RINGDP_SPIN_US=many" in found[0].sentence
    assert "write RINGDP_IFACE," in found[1].remedy
    assert software.chosen(host) == {"RINGDP_IFACES": "eth0", "RINGDP_SPIN_US": "many"}
    secret = Host(environ={"RINGDP_SECRET_FILE": "/tmp/secret"})
    assert "RINGDP_SECRET_FILE" not in software.chosen(secret)


def test_versions_name_the_processor(tmp_path: Path) -> None:
    root = tree(tmp_path, **{"proc/cpuinfo": "processor : 0\nmodel name\t: AMD  EPYC 7\n"})
    assert software.processor_name(Host(root=root)) == "AMD EPYC 7"
    assert software.processor_name(Host(root=tmp_path / "empty")) is None


def test_thresholds_reach_the_checks(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    wanted = Thresholds(min_shared_memory_bytes=1 << 60, min_descriptors=1 << 40)
    found = registry.run_checks(Host(root=tmp_path, environ={}, thresholds=wanted))
    assert [one.check for one in found if one.verdict is Verdict.PROBLEM] == ["memory", "limits"]
