"""ringdp/job/process_group.py and the package's import: joining, leaving, and every way to get it wrong.

What concerns joining runs on gloo, so that it tells what `init` does from what the ring does.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import ringdp
from ringdp import _C
from ringdp.config import VARIABLES, RingConfig
from ringdp.errors import HandshakeError, InvalidArgumentError, InvalidStateError, MismatchError, RingTimeoutError
from ringdp.job import backend, job_store, process_group
from tests.forked import Program
from tests.helpers import free_port

LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMIX_|SLURM_|TORCHELASTIC_|RINGDP_)")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*VARIABLES, *os.environ]:
        if LAUNCHER.match(name):
            monkeypatch.delenv(name, raising=False)
    yield
    ringdp.shutdown()


def run(code: str, *, expect: int = 0, **variables: str) -> str:
    """Run Python code in a process of its own without a launcher's variables; its output, both streams."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=without_launcher() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return finish(process, expect=expect)


def start(code: str, **variables: str) -> Program:
    """As `run` does, but it has imported torch and ringdp before."""
    number = int(variables.get("RANK", "0"))
    return Program(textwrap.dedent(code), environ=without_launcher() | variables, origin=number)


def without_launcher() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    return {"OMP_NUM_THREADS": "1"} | clean


def finish(process: subprocess.Popen[str] | Program, *, expect: int = 0) -> str:
    output = process.communicate(timeout=60)[0]
    assert process.returncode == expect, output
    return output


def listening_ports() -> set[str]:
    """Local addresses this process listens on, TCP over IPv4 and IPv6."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


# --- a world of one


@pytest.mark.parametrize("backend", ["gloo", "ring"])
def test_without_a_launcher_it_is_a_world_of_one(backend: str) -> None:
    assert not ringdp.is_initialized()
    ringdp.init(backend)
    assert ringdp.is_initialized()
    assert dist.is_initialized()
    assert (ringdp.rank(), ringdp.world_size(), ringdp.local_rank()) == (0, 1, 0)
    assert dist.get_backend() == backend
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    ringdp.shutdown()
    assert not ringdp.is_initialized()
    ringdp.shutdown()


def test_a_world_of_one_on_ring_listens_nowhere() -> None:
    before = listening_ports()
    ringdp.init("ring")
    assert listening_ports() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_the_default_without_cuda_is_ring_on_the_cpu() -> None:
    ringdp.init()
    assert dist.get_backend() == "ring"
    assert ringdp.device() == torch.device("cpu")
    ringdp.shutdown()
    with pytest.raises(InvalidArgumentError, match="sees no CUDA device"):
        ringdp.init(device="cuda")


def test_a_second_call_is_refused_until_shutdown() -> None:
    ringdp.init("gloo")
    with pytest.raises(InvalidStateError, match=r"called before in this process \(rank 0 of 1\).*shutdown"):
        ringdp.init("gloo")
    ringdp.shutdown()
    ringdp.init("gloo")


def test_a_process_group_of_torch_is_used_as_it_is() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(InvalidStateError, match=r"backend gloo.*leave out ringdp.init\(\)"):
        ringdp.init()
    assert (ringdp.rank(), ringdp.world_size(), ringdp.local_rank()) == (0, 1, 0)
    assert ringdp.device() == torch.device("cpu")


def test_destroying_torchs_group_counts_as_leaving() -> None:
    ringdp.init("gloo")
    dist.destroy_process_group()
    assert not ringdp.is_initialized()
    with pytest.raises(InvalidStateError, match=r"ringdp.local_rank\(\) needs ringdp.init\(\)"):
        ringdp.local_rank()
    ringdp.init("gloo")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(InvalidStateError, match=r"torch.distributed is initialised already"):
        ringdp.init("gloo")


@pytest.mark.parametrize("name", ["rank", "world_size", "local_rank", "device"])
def test_who_and_where_need_init(name: str) -> None:
    with pytest.raises(InvalidStateError, match=rf"ringdp.{name}\(\) needs ringdp.init"):
        getattr(ringdp, name)()


# --- arguments


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"rank": 0}, "world_size is missing"),
        ({"world_size": 2}, "rank is missing"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": -1, "world_size": 2}, "rank -1 of 2"),
        ({"rank": 0, "world_size": 2}, "has no address of the job's store"),
        ({"rank": 0, "world_size": 2, "init_method": "pigeon://here"}, "init_method=pigeon://here cannot be used"),
        ({"rank": 0, "world_size": 2, "init_method": "tcp://here"}, "init_method=tcp://here cannot be used"),
        ({"init_method": "tcp://127.0.0.1:1"}, "needs rank and world_size"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"timeout": "3"}, "timeout must be a number of seconds or a timedelta, not '3'"),
        ({"timeout": None}, "timeout must be a number"),
        ({"timeout": True}, "timeout must be a number"),
        ({"timeout": float("nan")}, "timeout must be a number"),
        ({"timeout": 1e300}, "timeout must be seconds below"),
        ({"rank": "0", "world_size": 1}, "rank must be a whole number, not rank='0'"),
        ({"rank": 0, "world_size": 1.5}, "world_size must be a whole number"),
        ({"rank": True, "world_size": 2}, "rank must be a whole number"),
        ({"init_method": ""}, "init_method must be a text"),
        ({"timeout": timedelta(seconds=-1)}, "timeout must be above 0"),
        ({"device": "meta"}, "device must be cpu or cuda"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        ringdp.init("gloo", **arguments)  # type: ignore[arg-type]
    assert not ringdp.is_initialized()


def test_a_setting_that_cannot_be_read_is_told_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at that address: each rank speaks for itself."""
    monkeypatch.setenv("RINGDP_STALL_NOTICE", "abc")
    with pytest.raises(InvalidArgumentError, match="RINGDP_STALL_NOTICE=abc"):
        ringdp.init(rank=1, world_size=2, init_method="tcp://127.0.0.1:1", timeout=60)


def test_a_partial_environment_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(InvalidArgumentError, match="lacks WORLD_SIZE, MASTER_PORT"):
        ringdp.init("gloo")


def test_explicit_arguments_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")  # alone it would be an error
    ringdp.init("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:1")
    assert ringdp.rank() == 0


def test_a_name_must_not_be_empty() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a name"), ringdp.named(""):
        pass


# --- several ranks

TWO_RANKS = """
    import torch, torch.distributed as dist, ringdp
    ringdp.init("ring")
    total = torch.full([1000], float(ringdp.rank() + 1))
    before = ringdp.traffic()
    dist.all_reduce(total)
    after = ringdp.traffic()
    print("rank", ringdp.rank(), "of", ringdp.world_size(), "local", ringdp.local_rank(), "total", total[999].item())
    print("sent", after.bytes_sent - before.bytes_sent, "received", after.bytes_received - before.bytes_received)
    try:
        for name in ("left", "right") if ringdp.rank() == 0 else ("right", "left"):
            with ringdp.named(name):
                dist.all_reduce(torch.ones(3))
    except ringdp.MismatchError as error:
        print("swapped:", error.name, error.peer)
"""


def hello_of(backend: str | None) -> process_group._Hello:
    return process_group._hello(backend, "cpu", None, None, RingConfig())


def meet_as_threads(hellos: list[process_group._Hello]) -> list[process_group._Hello]:
    """Every rank meets the others; all of them read the same."""
    store, size, both = HashStore(), len(hellos), threading.Barrier(len(hellos))
    settings: dict[str, Any] = {
        "timeout": timedelta(seconds=20),
        "first_notice_s": 10.0,
        "config": RingConfig().as_dict(),
    }

    def meet(rank: int) -> list[str]:
        pending = _C.PendingMesh(store=store, rank=rank, size=size, hello=hellos[rank].encode(), **settings)
        both.wait(20)
        pending.close()
        return pending.hellos()

    with ThreadPoolExecutor(size) as ranks:
        for texts in ranks.map(meet, range(size)):
            assert [process_group._Hello.decode(text, rank=r) for r, text in enumerate(texts)] == hellos
    return hellos


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp"},
        {"transport": "tcp", "checksum": True},
        {"transport": "tcp", "tls": True, "secret": b"s" * 32},
        {"transport": "shm"},
    ],
)
def test_who_leaves_after_meeting_says_goodbye_to_who_goes_on(options: dict[str, Any]) -> None:
    store, both = HashStore(), threading.Barrier(2)
    settings: dict[str, Any] = {
        "config": RingConfig(**options).as_dict(),
        "timeout": timedelta(seconds=20),
    }

    def meet(rank: int) -> str:
        pending = _C.PendingMesh(store=store, rank=rank, size=2, hello="", first_notice_s=10.0, **settings)
        both.wait(20)
        if rank == 1:
            pending.close("it chose another backend")
            return ""
        group: Any = _C.create_process_group(
            store=store, rank=0, size=2, group_id="g", global_ranks=[], pending=pending, **settings
        )
        with pytest.raises(RuntimeError) as caught:
            group.barrier().wait()
        group.shutdown()
        return str(caught.value)

    with ThreadPoolExecutor(2) as ranks:
        text, _ = ranks.map(meet, range(2))
    assert "lost rank 1 " in text
    assert "it left the job: it chose another backend" in text


def test_two_ranks_meet_through_the_launchers_environment() -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(TWO_RANKS, RANK=str(r), LOCAL_RANK=str(r), **shared) for r in range(2)]
    for number, process in enumerate(ranks):
        output = finish(process)
        assert f"rank {number} of 2 local {number} total 3.0" in output
        for direction in ("sent", "received"):
            count = int(re.search(rf"{direction} (\d+)", output)[1])  # type: ignore[index]
            assert 4000 <= count <= 4400, "the tensor once, and a few frame headers"
        assert f"swapped: {('left', 'right')[number]} {1 - number}" in output


def test_ranks_of_mp_spawn_count_their_local_ranks() -> None:
    hosts = ["left", "right", "right", "left", "right"]
    met = meet_as_threads([dataclasses.replace(hello_of("gloo"), host_id=host) for host in hosts])
    assert [one.local_rank for one in process_group._devices_of(met)] == [0, 0, 1, 1, 2]
    told = [dataclasses.replace(hello, local_rank=7) for hello in met[:1]]
    assert [one.local_rank for one in process_group._devices_of([*told, *met[1:]])] == [7, 0, 1, 1, 2]


def test_open_mpis_variables_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", f"test-{free_port()}")
    ringdp.init("gloo")
    assert (ringdp.rank(), ringdp.world_size(), ringdp.local_rank()) == (0, 1, 0)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_whoever_never_comes_is_named(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_store, "FIRST_NOTICE_S", 0.2)
    where = f"{tmp_path}/meet" if scheme == "file" else f"127.0.0.1:{free_port()}"
    with pytest.raises(RingTimeoutError, match=r"after 2 s: it waited for ranks 1, 2 of 3, which never came") as caught:
        ringdp.init("gloo", rank=0, world_size=3, init_method=f"{scheme}://{where}", timeout=2)
    assert caught.value.peer == 1
    assert "rank 0 of 3 waits for ranks 1, 2 to join" in caplog.text
    assert not ringdp.is_initialized()


def test_a_store_that_is_not_there_is_explained() -> None:
    with pytest.raises(HandshakeError, match=r"rank 1 of 2 could not reach the job's store.*does rank 0 run"):
        ringdp.init("gloo", rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{free_port()}", timeout=1)


def test_a_taken_port_is_explained() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HandshakeError, match="the port is taken"):
            ringdp.init("gloo", rank=0, world_size=2, init_method=f"tcp://127.0.0.1:{port}", timeout=5)


def test_ranks_that_chose_differently_are_named() -> None:
    met = meet_as_threads([hello_of("gloo"), hello_of("gloo"), hello_of("ring")])
    with pytest.raises(MismatchError, match=r"rank 0 on \S+ has backend gloo, rank 2 on \S+ has ring") as caught:
        process_group._require_agreement(met)
    assert caught.value.peer == 2
    process_group._require_agreement(met[:2])
    on_gpu = [dataclasses.replace(hello, device="cuda") for hello in met]
    with pytest.raises(MismatchError, match=r"has device cpu, rank 1 on \S+ has cuda: pass device='cpu'"):
        process_group._require_agreement([met[0], on_gpu[1]])
    process_group._require_agreement([met[2], on_gpu[2]])  # ring takes both
    other_wish = dataclasses.replace(met[1], cuda_choice="ring")
    with pytest.raises(MismatchError, match=r"rank 1 on .* has ring: set RINGDP_CUDA alike"):
        process_group._require_agreement([met[0], other_wish])


def test_a_hello_in_other_words_is_a_mismatch() -> None:
    for text in ("\xff", "[]", '{"host_id": 1}'):
        with pytest.raises(MismatchError, match="rank 7 sent a record that this version cannot parse"):
            process_group._Hello.decode(text, rank=7)


# --- ranks with GPUs, which torch pretends to see; gloo stands in NCCL's place

GPU_RANKS = """
    import logging, os, types, torch, torch.distributed as dist
    torch.cuda.is_available = lambda: True
    shown = os.environ["GPUS_OF_RANK_" + os.environ["RANK"]].split()
    torch.cuda.device_count = lambda: len(shown)
    torch.cuda.get_device_properties = lambda number: types.SimpleNamespace(uuid=shown[number])
    torch.cuda.set_device = print
    dist.is_nccl_available = lambda: True

    import ringdp
    from ringdp.job import devices
    devices.NCCL_BESIDE_RING = "cpu:ring,cuda:gloo"
    race, ours = devices.race, float(os.environ.get("OURS_MS", 0))
    if ours:
        devices._all_reduce_seconds = lambda kind, tensor: ours / 1e3 if kind == "cpu" else 2e-3
    devices.race = lambda device: race(torch.device("cpu"))
    logging.basicConfig(level=logging.INFO)
    ringdp.init(device=os.environ.get("DEVICE_OF_RANK_" + os.environ["RANK"]))
    total = torch.ones(1000)
    dist.all_reduce(total)
    print("total", total[999].item(), "device", ringdp.device(), "backend", dist.get_backend_config())
    print("prefer", dist.get_backend(), "sent", ringdp.traffic().bytes_sent > 0)
"""


def on_two_gpu_ranks(first: str, second: str, *, expect: int = 0, **variables: str) -> list[str]:
    """The outputs of two ranks that see these GPUs."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"GPUS_OF_RANK_0": first, "GPUS_OF_RANK_1": second} | variables
    ranks = [start(GPU_RANKS, RANK=str(r), LOCAL_RANK=str(r), **shared) for r in range(2)]
    return [finish(process, expect=expect) for process in ranks]


def test_a_gpu_for_each_rank_is_left_to_nccl() -> None:
    for rank, output in enumerate(on_two_gpu_ranks("A B", "A B")):
        assert f"total 2.0 device cuda:{rank} backend cpu:ring,cuda:gloo" in output
        assert output.count("go over NCCL: each rank has a GPU of its own") == (rank == 0), "said once"


def test_ranks_that_share_a_gpu_use_ring_and_say_so() -> None:
    for rank, output in enumerate(on_two_gpu_ranks("A", "A")):
        assert "total 2.0 device cuda:0 backend" in output
        assert "prefer ring" in output
        warning = r"WARNING:ringdp.process_group:CUDA tensors go over ring, .*: ranks 0 and 1 on \S+ share GPU A\n"
        assert len(re.findall(warning, output)) == (rank == 0)


def test_ranks_that_share_a_gpu_are_named_where_nccl_was_demanded() -> None:
    for output in on_two_gpu_ranks("A", "A", RINGDP_CUDA="nccl", expect=1):
        assert "InvalidArgumentError: RINGDP_CUDA=nccl and ranks 0 and 1 on" in output
        assert "share GPU A; NCCL would refuse them" in output


def test_a_rank_on_the_cpu_and_one_on_a_gpu_are_one_job() -> None:
    first, second = on_two_gpu_ranks("A", "B", DEVICE_OF_RANK_1="cpu")
    assert "total 2.0 device cuda:0" in first
    assert re.search(r"WARNING:.* go over ring, .*: rank 1 on \S+ computes on the CPU", first)
    assert "total 2.0 device cpu" in second


@pytest.mark.parametrize("ours, winner", [("1", "ring"), ("3", "NCCL")])
def test_auto_keeps_what_is_faster_for_the_slowest_rank(ours: str, winner: str) -> None:
    outputs = on_two_gpu_ranks("A", "B", RINGDP_CUDA="auto", OURS_MS=ours)
    for rank, output in enumerate(outputs):
        said = f"take 2 ms over NCCL and {ours} ms over ring, so CUDA tensors go over {winner}"
        assert output.count(said) == (rank == 0)
        assert "total 2.0 device cuda:0" in output
        assert ("cuda:gloo" in output) == (winner == "NCCL")
        assert "sent True" in output, "the ring still works"


def test_auto_measures_both_where_nobody_says_the_times() -> None:
    (first, _) = on_two_gpu_ranks("A", "B", RINGDP_CUDA="auto")
    times = re.search(r"16 MiB take (\S+) ms over NCCL and (\S+) ms over ring, so CUDA tensors go over (\S+)", first)
    assert times is not None, first
    theirs, ours = float(times[1]), float(times[2])
    assert min(theirs, ours) > 0
    assert times[3] == ("ring" if ours < theirs else "NCCL")


# --- leaving without saying so, and importing


def test_a_script_that_forgets_shutdown_ends_cleanly() -> None:
    output = run("import ringdp; ringdp.init('ring'); print('done')")
    assert output == "done\n", output


def test_an_exception_is_all_a_failing_script_shows() -> None:
    output = run("import ringdp; ringdp.init('ring'); raise ValueError('mine')", expect=1)
    assert output.rstrip().endswith("ValueError: mine"), output


def test_a_forked_child_leaves_the_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ringdp.init("gloo")
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        process_group._shutdown_at_exit()
    assert ringdp.is_initialized()
    process_group._shutdown_at_exit()
    assert not ringdp.is_initialized()


def test_importing_ringdp_registers_ring_without_loading_the_extension() -> None:
    run("""
        import sys, ringdp, torch, torch.distributed as dist
        assert dist.Backend.RING == "ring"
        cuda = ["cuda"] if torch.backends.cuda.is_built() else []
        assert dist.Backend.backend_capability["ring"] == ["cpu", *cuda]
        assert "ringdp._C" not in sys.modules
        ringdp._autoload.register()
        assert dist.Backend.backend_list.count("ring") == 1
    """)


BROKEN = """
    import sys, types
    broken = types.ModuleType("ringdp._build")
    def check(): raise ImportError("built for another torch: build it again")
    broken.check = check
    sys.modules["ringdp._build"] = broken
"""


def test_a_wrong_build_is_told_at_import() -> None:
    output = run(BROKEN + "\n    import ringdp", expect=1)
    assert "ImportError: built for another torch: build it again" in output


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A folder for PYTHONPATH that makes torch find our entry point, whether ringdp is installed or not."""
    info = tmp_path / "entry_of_ringdp-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-of-ringdp\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nringdp-test = ringdp._autoload:register\n")
    return os.pathsep.join([str(tmp_path), str(Path(ringdp.__file__).parents[1])])


def test_importing_torch_alone_registers_ring(installed: str) -> None:
    run(
        """
        import sys, torch
        assert torch.distributed.Backend.RING == "ring"
        loaded = {name for name in sys.modules if name.startswith("ringdp.")}
        names = {"_autoload", "_build_info", "_early", "errors", "job", "job.backend", "stories"}
        assert loaded == {f"ringdp.{name}" for name in names}
        """,
        PYTHONPATH=installed,
    )


def test_a_wrong_build_does_not_break_torch_and_is_told_on_use(installed: str) -> None:
    output = run(
        BROKEN
        + """
    import torch
    import ringdp
    try:
        ringdp.init
    except ImportError as error:
        print("on use:", error)
    try:
        torch.distributed.init_process_group("ring", store=torch.distributed.HashStore(), rank=0, world_size=1)
    except ImportError as error:
        print("by torch:", error)
    """,
        PYTHONPATH=installed,
    )
    assert "on use: built for another torch" in output
    assert "by torch: built for another torch" in output


def test_the_entry_point_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringdp import _autoload

    def refuse() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(backend, "register_backend", refuse)
    _autoload.register()


def test_other_systems_are_told_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match="Linux only, and this is darwin"):
        ringdp._check()


def test_the_public_names_are_there() -> None:
    assert set(ringdp.__all__) <= set(dir(ringdp))
    for name in ringdp.__all__:
        assert getattr(ringdp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ringdp.nothing  # type: ignore[attr-defined]  # noqa: B018


def public_objects() -> Iterator[Any]:
    for name in ringdp.__all__:
        one = getattr(ringdp, name)
        yield one
        names = getattr(one, "__all__", ()) if inspect.ismodule(one) else vars(one) if inspect.isclass(one) else ()
        yield from (getattr(one, name) for name in names if not name.startswith("_"))


def test_the_help_of_public_names_has_no_paths() -> None:
    """`help(ringdp.RingDP)` is read where the repository is not."""
    path = re.compile(r"\b(?:docs|ringdp|tests|examples)/[\w/-]+\.(?:md|py)\b")
    found = {path.search(inspect.getdoc(one) or "") for one in public_objects()} - {None}
    assert [match[0] for match in found if match] == []


def test_a_store_that_cannot_be_reached_is_told_of_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_store, "FIRST_NOTICE_S", 0.2)
    port = free_port()
    with pytest.raises(HandshakeError, match=f"rank 1 of 2 could not reach the job's store .*{port}"):
        ringdp.init(rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{port}", timeout=1.5)
    lines = [it.getMessage() for it in caplog.records if "waits for the job's store" in it.getMessage()]
    assert lines
    assert f"rank 1 of 2 waits for the job's store at 127.0.0.1:{port}: [Errno 111] Connection refused" in lines[0]
