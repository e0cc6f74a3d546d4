"""RINGDP_TUNING: what the file may say, that it decides what runs, and that all ranks must have the same."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest

from ringdp.config import RingConfig, tuning
from ringdp.errors import HandshakeError, InvalidArgumentError, SystemResourceError
from tests.forked import Program
from tests.helpers import need

if TYPE_CHECKING:
    from tests.core import _core

    core = _core
else:
    core = need("tests.core._core", "ringdp's extension, built with `make build`,")


def write(folder: Path, name: str = "tuning.json", **layouts: Mapping[str, int]) -> str:
    path = folder / name
    path.write_text(json.dumps({"ringdp_tuning": 1, "machine": "a test", "layouts": layouts}))
    return str(path)


def test_the_file_is_read_into_limits_and_costs(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    layouts = {"one_host": {"fold_sent_bytes": 4096}, "one_rank_per_host": {"direct_gather_bytes": 0}}
    path.write_text(json.dumps({"ringdp_tuning": 1, "layouts": layouts, "costs": {"gamma_ns_per_byte": 1}}))
    found = RingConfig.from_environment({"RINGDP_TUNING": str(path)})
    assert found.tuning.limits == {"one_host.fold_sent_bytes": 4096, "one_rank_per_host.direct_gather_bytes": 0}
    assert found.tuning.costs == {"gamma_ns_per_byte": 1.0}
    assert found.as_dict()["table"] == found.tuning.limits
    assert found.as_dict()["table_source"] == f"RINGDP_TUNING={path}"
    assert RingConfig.from_environment({}).as_dict()["table_source"] == "built in"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is not JSON"),
        ([], "the file must hold a JSON object"),
        ({}, "ringdp_tuning must be 1, not null"),
        ({"ringdp_tuning": 2}, "ringdp_tuning must be 1, not 2"),
        ({"ringdp_tuning": 1, "layout": {}}, "layout is not known; allowed are ringdp_tuning"),
        ({"ringdp_tuning": 1, "layouts": 5}, "layouts must be an object with some of one_host"),
        ({"ringdp_tuning": 1, "layouts": {"two": {}}}, "layouts.two is not known; allowed are one_host"),
        (
            {"ringdp_tuning": 1, "layouts": {"one_host": {"fold": 1}}},
            "layouts.one_host.fold is not known; allowed are fold_two_ranks_bytes",
        ),
        (
            {"ringdp_tuning": 1, "layouts": {"one_host": {"fold_sent_bytes": -1}}},
            "layouts.one_host.fold_sent_bytes must be a whole number of bytes, 0 to 2**50, not -1",
        ),
        ({"ringdp_tuning": 1, "layouts": {"one_host": {"fold_sent_bytes": 1.5}}}, "not 1.5"),
        ({"ringdp_tuning": 1, "layouts": {"one_host": {"fold_sent_bytes": True}}}, "not true"),
        ({"ringdp_tuning": 1, "layouts": {"one_host": {"fold_sent_bytes": 2**51}}}, f"not {2**51}"),
        (
            {"ringdp_tuning": 1, "layouts": {"one_host": {"direct_ranks": -1}}},
            "layouts.one_host.direct_ranks must be a whole number of ranks, 0 to 2**20, not -1",
        ),
        ({"ringdp_tuning": 1, "layouts": {"one_host": {"direct_ranks": 2**21}}}, f"not {2**21}"),
        (
            {"ringdp_tuning": 1, "uplinks": ["1gbit"]},
            "uplinks must be an object with the rates of two hosts or more, not [",
        ),
        (
            {"ringdp_tuning": 1, "uplinks": {"a": "1gbit"}},
            "uplinks must be an object with the rates of two hosts or more",
        ),
        ({"ringdp_tuning": 1, "uplinks": {"a": "1gbit", "b": 1e9}}, "uplinks.b must be a rate as 1gbit, 100mbit"),
        (
            {"ringdp_tuning": 1, "uplinks": {"a": "0mbit", "b": "1gbit"}},
            "uplinks.a must be a rate as 1gbit, 100mbit or",
        ),
        ({"ringdp_tuning": 1, "uplinks": {"a": "9999999gbit", "b": "1gbit"}}, 'not "9999999gbit"'),
        (
            {"ringdp_tuning": 1, "uplinks": {"a b": "1gbit", "c": "1gbit"}},
            """uplinks has "a b", which is not a host's name""",
        ),
        ({"ringdp_tuning": 1, "costs": {"alpha": 1}}, "costs.alpha is not known; allowed are alpha_local_us"),
        ({"ringdp_tuning": 1, "costs": {"alpha_local_us": "fast"}}, 'must be a number, 0 or more, not "fast"'),
    ],
)
def test_what_is_wrong_names_file_key_and_what_is_allowed(document: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(InvalidArgumentError, match=re.escape(words)) as caught:
        RingConfig.from_environment({"RINGDP_TUNING": str(path)})
    assert f"RINGDP_TUNING={path}" in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemResourceError, match=r"RINGDP_TUNING=.*nowhere.json cannot be read: .*benchmarks tune"):
        RingConfig.from_environment({"RINGDP_TUNING": str(tmp_path / "nowhere.json")})


def test_measured_links_go_into_a_file_that_keeps_what_else_it_says(tmp_path: Path) -> None:
    path = Path(write(tmp_path, one_host={"fold_sent_bytes": 4096}))
    for _ in range(2):  # the second time there are some
        tuning.write_uplinks(str(path), {"a": 118.3e6, "b": 11.8e6}, "what is not said of a file that is there")
    found = tuning.read(str(path))
    assert found.limits == {"one_host.fold_sent_bytes": 4096, "uplink.a": 118_300_000, "uplink.b": 11_800_000}
    assert json.loads(path.read_text())["machine"] == "a test"
    path.write_text("{}")
    with pytest.raises(InvalidArgumentError, match="ringdp_tuning must be 1"):
        tuning.write_uplinks(str(path), {"a": 1e6, "b": 1e6}, "")
    assert path.read_text() == "{}"
    tuning.write_uplinks(str(tmp_path / "new.json"), {"a": 1e6, "b": 2e6}, "two hosts")
    assert tuning.read(str(tmp_path / "new.json")).limits == {"uplink.a": 1_000_000, "uplink.b": 2_000_000}


def test_python_and_the_core_know_the_same_limits() -> None:
    assert set(core.built_in_table()) == {f"{layout}.{limit}" for layout in tuning.LAYOUTS for limit in tuning.LIMITS}
    with pytest.raises(InvalidArgumentError, match=r"no 'one_host\.fold'"):
        core.all_reduce_algorithm(2, "float32", 4, table={"one_host.fold": 1})


@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        ([0, 0, 0], "one_host"),
        ([0, 1, 2], "one_rank_per_host"),
        ([0, 0, 1], "several_ranks_per_host"),
        ([0, 1, 0, 1], "several_ranks_per_host"),
    ],
)
def test_a_limit_holds_for_its_layout_alone(hosts: list[int], layout: str) -> None:
    for name in tuning.LAYOUTS:
        table = {f"{name}.fold_sent_bytes": 2**40}
        taken = core.all_reduce_algorithm(len(hosts), "float32", 2**30, table=table, hosts=hosts)
        assert (taken == "fold") == (name == layout)


def sums(tables: list[dict[str, int]], host_ids: list[str], sources: list[str] | None = None) -> list[bytes]:
    """What each rank, a thread with its own Runtime, gets from an all-reduce whose order of summation shows."""
    size, store = len(host_ids), core.MemoryStore()

    def run(rank: int) -> bytes:
        runtime = core.Runtime(
            store,
            rank,
            size,
            timeout_ms=10_000,
            host_id=host_ids[rank],
            table=tables[rank],
            table_source=sources[rank] if sources else "built in",
        )
        group = core.Group(runtime, "g", list(range(size)), timeout_ms=10_000)
        x = numpy.random.default_rng(rank).standard_normal(100_000).astype(numpy.float32)
        group.all_reduce(x, "float32").wait()
        group.close()
        runtime.shut_down()
        return x.tobytes()

    with ThreadPoolExecutor(size) as pool:
        return [it.result(timeout=30) for it in [pool.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize(
    ("host_ids", "layout"),
    [("aaa", "one_host"), ("abc", "one_rank_per_host"), ("abb", "several_ranks_per_host")],
)
def test_the_table_of_the_layout_decides_the_bits(host_ids: str, layout: str) -> None:
    """Three ranks: a fold adds in rank order, the ring rotated, two levels each host first."""
    x = [numpy.random.default_rng(rank).standard_normal(100_000).astype(numpy.float32) for rank in range(3)]
    in_rank_order = ((x[0] + x[1]) + x[2]).tobytes()
    hosts = list(host_ids)
    folded = sums([{f"{layout}.fold_sent_bytes": 2**40}] * 3, hosts)
    assert set(folded) == {in_rank_order}
    others = {f"{name}.fold_sent_bytes": 2**40 for name in tuning.LAYOUTS if name != layout}
    assert in_rank_order not in sums([others | {f"{layout}.fold_sent_bytes": 0}] * 3, hosts)


def test_different_numbers_of_ranks_are_refused_like_sizes() -> None:
    with pytest.raises(HandshakeError, match=r"one_host\.direct_ranks=16 at rank 0 \(built in\).*=8 at rank 1"):
        sums([{}, {"one_host.direct_ranks": 8}], ["", ""])


def test_different_tables_are_refused_with_ranks_values_and_files() -> None:
    mine, theirs = {"one_host.fold_sent_bytes": 4096}, {"one_host.fold_sent_bytes": 8192}
    with pytest.raises(HandshakeError) as caught:
        sums([mine, theirs], ["", ""], ["built in", "RINGDP_TUNING=/etc/b.json"])
    words = str(caught.value)
    assert "one_host.fold_sent_bytes=4096 at rank 0 (built in)" in words
    assert "one_host.fold_sent_bytes=8192 at rank 1 (RINGDP_TUNING=/etc/b.json)" in words
    assert "one_rank_per_host" not in words  # what is equal is left out


RANK = """
import logging, os, sys, torch, torch.distributed as dist, ringdp
ringdp.init("ring", timeout=20)
x = torch.ones(50_000)
dist.all_reduce(x)
if len(sys.argv) > 1:  # the file changes while the job runs
    open(os.environ["RINGDP_TUNING"], "w").write('{"ringdp_tuning": 1}')
    try:
        dist.new_group([0, 1])
    except ValueError as error:
        print("refused:", error)
ringdp.shutdown()
"""


def run_ranks(folder: Path, files: list[str | None], *, words: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Exit code and output of a process per entry of `files`, with that RINGDP_TUNING."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RINGDP_", "OMPI_", "SLURM_"))}
    processes: list[Program] = []
    for rank, file in enumerate(files):
        own = {"RANK": str(rank), "WORLD_SIZE": str(len(files)), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RINGDP_LOG_LEVEL": "info"}
        code = textwrap.dedent(RANK).replace(
            'init("ring"', f'init("ring", rank={rank}, world_size={len(files)}, init_method="file://{folder}/store"'
        )
        env = clean | own | ({"RINGDP_TUNING": file} if file else {})
        processes.append(Program(code, *words, environ=env, origin=rank))
    outputs = [it.communicate(timeout=60)[0] for it in processes]
    return [(it.wait(), output) for it, output in zip(processes, outputs, strict=True)]


@pytest.fixture
def extension() -> None:
    need("ringdp._C", "ringdp's extension, built with `make build`,")


@pytest.mark.usefixtures("extension")
def test_rank_0_says_once_what_runs_and_why(tmp_path: Path) -> None:
    file = write(tmp_path, one_host={"fold_two_ranks_bytes": 65536})
    (code, first), (other_code, second) = run_ranks(tmp_path, [file, file])
    assert (code, other_code) == (0, 0), first + second
    line = (
        "(layout one_host): fold up to 64 KiB, ring above; float16 and bfloat16: fold up to 64 KiB, pairwise above; "
        f"table: RINGDP_TUNING={file}"
    )
    assert re.sub(r"\nringdp: [-0-9]+ \S+ ringdp\.core INFO: (?!rank)", " ", first).count(line) == 1, first
    assert "layout" not in second


@pytest.mark.usefixtures("extension")
def test_init_refuses_different_tables_on_every_rank(tmp_path: Path) -> None:
    file = write(tmp_path, one_host={"fold_two_ranks_bytes": 65536})
    for code, output in run_ranks(tmp_path, [None, file]):
        assert code == 1
        assert "one_host.fold_two_ranks_bytes=65536 at rank 1 (RINGDP_TUNING=" in output
        assert "HandshakeError" in output


@pytest.mark.usefixtures("extension")
def test_a_group_made_after_the_file_has_changed_is_refused(tmp_path: Path) -> None:
    files = [write(tmp_path, f"{rank}.json", one_host={"fold_two_ranks_bytes": 65536}) for rank in range(2)]
    for code, output in run_ranks(tmp_path, list(files), words=("change",)):
        assert code == 0, output
        assert "refused: " in output
        assert "leave RINGDP_TUNING and its file as they were" in output
