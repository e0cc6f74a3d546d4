"""TLS between ranks, with a relay in the middle that reads along, flips, cuts, repeats and reorders; and ranks that
cannot have it, or have other certificates."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import ringdp
from ringdp.config import RingConfig, variables
from ringdp.errors import PeerLostError, RingError, SystemResourceError
from tests.contract.core_ranks import ALWAYS_SMALL, NEVER_SMALL
from tests.fault import elastic_jobs
from tests.fault.elastic_jobs import Told
from tests.fault.elastic_join_jobs import Jobs
from tests.fault.elastic_oracle import compare
from tests.fault.faults import Faults
from tests.fault.hosts import Outcome, RankServer, RankSpec
from tests.fault.relay import Change, Job, nothing
from tests.fault.test_elastic_join import one_comes_and_one_leaves
from tests.helpers import need_command

SECRET = b"s" * 32
SET_UP = 1024  # bytes of a connection, after which it carries frames or TLS's records at the latest
SOON_S = 8.0
WORDS = b"what nobody else may read"


def met(size: int, change: Change = nothing, **options: Any) -> Job:
    return Job(size, change, **{"secret": SECRET, "tls": True, **options})


def numbers(rank: int, count: int, step: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng([rank, step]).standard_normal(count, np.float32)


def sums(ranks: Job, table: Any, count: int, steps: int = 1) -> list[list[bytes]]:
    """By rank: the bits of each step's sum."""
    groups = ranks.groups(table)

    def one(rank: int) -> list[bytes]:
        out = []
        for step in range(steps):
            data = numbers(rank, count, step)
            groups[rank].all_reduce(data, "float32").wait()
            out.append(data.tobytes())
        return out

    return ranks.each(one)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_are_those_of_a_job_without_it(size: int, streams: int) -> None:
    for table, count in ((ALWAYS_SMALL, 1), (ALWAYS_SMALL, 10_007), (NEVER_SMALL, 300_001)):
        told = []
        for tls in (False, True):
            with met(size, tls=tls, streams=streams) as ranks:
                told.append(sums(ranks, table, count, 3))
                name = "tcp, TLS 1.3" if tls else "tcp"
                others = [{peer: name for peer in range(size) if peer != rank} for rank in range(size)]
                assert [it.transports() for it in ranks.runtimes] == others
        assert told[0] == told[1]


@pytest.mark.parametrize("tls", [False, True])
def test_nothing_can_be_read_on_the_wire(tls: bool) -> None:
    with met(2, tls=tls) as ranks:
        groups = ranks.groups(NEVER_SMALL)

        def send(rank: int) -> None:
            data = np.frombuffer(WORDS * 40_000 if rank == 0 else bytes(len(WORDS) * 40_000), np.uint8).copy()
            groups[rank].broadcast(data, "uint8", root=0).wait()
            assert data.tobytes() == WORDS * 40_000

        ranks.each(send)
        assert ranks.relay is not None
        assert (WORDS in ranks.relay.seen[0]) == (not tls)
        assert len(ranks.relay.seen[0]) > len(WORDS) * 40_000


class Once:
    """A change of the bytes from `at` on of what `sender` sends: once on a connection, on `connections` of them."""

    def __init__(self, what: str, at: int, sender: int, connections: int = 2) -> None:
        self.what, self.at, self.sender, self.connections = what, at, sender, connections
        self.done: set[int] = set()

    def __call__(self, number: int, sender: int, before: int, data: bytes) -> bytes | None:
        place = max(self.at - before, 0)
        least = 2 if self.what == "exchange" else 1
        if sender != self.sender or number in self.done or len(data) < place + least:
            return data
        if len(self.done) == self.connections:
            return data
        self.done.add(number)
        if self.what == "flip":
            return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        if self.what == "repeat":
            return data + data
        if self.what == "leave out":
            return data[:place]
        if self.what == "exchange":
            middle = (place + len(data)) // 2
            return data[:place] + data[middle:] + data[place:middle]
        return None


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("at", [SET_UP, 20_000, 1_500_000])
@pytest.mark.parametrize("what", ["flip", "repeat", "leave out", "exchange", "cut"])
def test_a_change_on_the_way_is_found_and_the_job_goes_on(what: str, at: int, sender: int) -> None:
    """The connection is made again, and what was lost is sent again: also what the other host had acknowledged."""
    change = Once(what, at, sender)
    with met(2, change) as ranks:
        told = sums(ranks, NEVER_SMALL, 200_003, 12)
        assert len(change.done) == 2
        assert ranks.relay is not None
        assert ranks.relay.connections >= 3
    with met(2, tls=False) as ranks:
        assert told == sums(ranks, NEVER_SMALL, 200_003, 12)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("at", [SET_UP, 5_000_000])
@pytest.mark.parametrize("protection", ["TLS", "a door"])
def test_what_a_host_on_the_way_had_acknowledged_is_sent_again(
    protection: str, at: int, sender: int, tmp_path: Path
) -> None:
    """The relay's host takes what it can before it is cut; a door's launchers do the same, without TLS too."""
    cut = Once("cut", at, sender, connections=1)

    def change(number: int, who: int, before: int, data: bytes) -> bytes | None:
        if before + len(data) > at and who == sender and not cut.done:
            time.sleep(0.3)
        return cut(number, who, before, data)

    options: dict[str, Any] = {"tls": True} if protection == "TLS" else {"tls": False, "door": str(tmp_path)}
    with met(2, change, **options) as ranks:
        groups, messages = ranks.groups(NEVER_SMALL), [numbers(sender, 100_000, step) for step in range(40)]

        def one(rank: int) -> list[bytes]:
            if rank == sender:
                works = [groups[rank].send(it, "float32", 1 - sender) for it in messages]
                got = []
            else:
                got = [np.zeros(100_000, np.float32) for _ in messages]
                works = [groups[rank].receive(it, "float32", sender) for it in got]
            for work in works:
                work.wait()
            return [it.tobytes() for it in got]

        assert ranks.each(one)[1 - sender] == [it.tobytes() for it in messages]
        assert cut.done


@pytest.mark.parametrize("at", [SET_UP, 100_000])
def test_changes_without_end_name_the_peer_and_say_tls(at: int) -> None:
    change = Once("flip", at, 0, connections=1 << 30)
    with met(2, change, heal_ms=500) as ranks:
        groups = ranks.groups(NEVER_SMALL)
        begin = time.monotonic()

        def one(rank: int) -> RingError | None:
            try:
                for step in range(100):
                    groups[rank].all_reduce(numbers(rank, 200_003, step), "float32").wait()
            except RingError as error:
                return error
            return None

        errors = ranks.each(one)
        assert time.monotonic() - begin < SOON_S
        for rank, error in enumerate(errors):
            assert isinstance(error, PeerLostError), error
            assert error.peer == 1 - rank
        assert any("TLS: " in str(error) for error in errors), errors
        assert ranks.relay is not None
        assert ranks.relay.connections < 1000  # it does not spin


# Processes.


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(os.urandom(32).hex())
    path.chmod(0o600)
    return str(path)


def add_up(spec: RankSpec, outcome: Outcome) -> None:
    import torch

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    ones = torch.full((300_000,), float(spec.rank + 1))
    dist.all_reduce(ones)
    assert bool((ones == 3).all())
    assert set(ringdp.transports().values()) == {"tcp, TLS 1.3"}
    dist.destroy_process_group()


def two(server: RankServer, folder: Path, of: Callable[[int], dict[str, str]]) -> list[Outcome]:
    method = f"file://{folder}/store"
    specs = [
        RankSpec(r, 2, variables={"RINGDP_TRANSPORT": "tcp", **of(r)}, method=method, body=f"{__name__}:add_up")
        for r in range(2)
    ]
    return server.run(specs, folder)


def test_ranks_that_differ_are_named(server: RankServer, tmp_path: Path, secret: str) -> None:
    for it in two(server, tmp_path, lambda rank: {"RINGDP_SECRET_FILE": secret, "RINGDP_TLS": "01"[rank]}):
        assert it.error == "HandshakeError", it
        assert "RINGDP_TLS differs: no TLS at rank 0, TLS with the job's secret at rank 1" in it.text


def test_without_a_secret_file_it_is_refused(server: RankServer, tmp_path: Path) -> None:
    for it in two(server, tmp_path, lambda _: {"RINGDP_TLS": "1"}):
        assert it.error == "InvalidArgumentError", it
        assert "RINGDP_TLS: tls needs the job's secret in a file on every host (RINGDP_SECRET_FILE" in it.text


def test_without_openssl_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "TLS_LIBRARY", "libssl.so.none")
    words = r"needs OpenSSL's libssl\.so\.none: .*; install OpenSSL 3 on this host"
    with pytest.raises(SystemResourceError, match=words):
        dist.init_process_group(
            "ring", store=HashStore(), rank=0, world_size=1, pg_options=RingConfig(tls=True, secret=SECRET)
        )
    assert not dist.is_initialized()


# Certificates.


class Authority:
    """Signs certificates; the files are in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self.folder, self.name = folder, name
        self.file = folder / "ca.pem"
        new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
        self.run(*new, "-subj", f"/CN={name}", "-keyout", "ca.key", "-out", "ca.pem")

    def run(self, *words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def sign(self, name: str, *, days: int = 2) -> dict[str, str]:
        """The variables of a rank with a certificate of this name, which begins now."""
        key = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"]
        self.run(*key, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        serial = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days)]
        self.run("x509", "-req", "-in", f"{name}.csr", *serial, "-out", f"{name}.pem")
        paths = {"CERT": f"{name}.pem", "KEY": f"{name}.key", "CA": "ca.pem"}
        return {f"RINGDP_TLS_{what}": str(self.folder / path) for what, path in paths.items()}


@pytest.mark.parametrize("what", ["right", "expired", "other authority", "key of another"])
def test_certificates(server: RankServer, tmp_path: Path, secret: str, what: str) -> None:
    need_command("openssl", "openssl")
    ours, others = Authority(tmp_path / "ours", "ours"), Authority(tmp_path / "others", "others")
    of = [ours.sign("rank0"), ours.sign("rank1", days=-1 if what == "expired" else 2)]
    if what == "other authority":
        of[1] = others.sign("rank1") | {"RINGDP_TLS_CA": str(ours.file)}
    if what == "key of another":
        of[1]["RINGDP_TLS_KEY"] = of[0]["RINGDP_TLS_KEY"]
    variables = {"RINGDP_SECRET_FILE": secret, "RINGDP_TLS": "1", "RINGDP_CONNECT_TIMEOUT": "5"}
    begin = time.monotonic()
    outcomes = two(server, tmp_path, lambda rank: variables | of[rank])
    assert time.monotonic() - begin < 2 * SOON_S
    if what == "right":
        assert [it.text for it in outcomes] == ["", ""]
    elif what == "key of another":
        assert outcomes[1].error == "InvalidArgumentError"
        assert re.search(r"RINGDP_TLS_KEY=\S+rank0.key cannot be used: key values mismatch", outcomes[1].text)
    else:
        words = "certificate has expired" if what == "expired" else "unable to get local issuer certificate"
        assert outcomes[0].error == "PeerLostError", outcomes[0]
        assert re.search(rf"rank 1 \(host .*the certificate of the other end: {words}", outcomes[0].text)
        assert "RINGDP_TLS_CA" in outcomes[0].text
        assert re.search(r"rank 0 \(host .*", outcomes[1].text), outcomes[1]


# What is made of connections.


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    for name, value in {"RINGDP_SECRET_FILE": secret, "RINGDP_TLS": "1", "RINGDP_TRANSPORT": "tcp"}.items():
        monkeypatch.setenv(name, value)


def train_with_tls(folder: str, *arguments: Any, **options: Any) -> Told:
    """The job without elasticity, with which it is compared, has none."""
    if options.get("elastic", True):
        os.environ |= {"RINGDP_TLS": "1", "RINGDP_SECRET_FILE": f"{folder}/secret"}
        assert RingConfig.from_environment().tls
    return elastic_jobs.train(folder, *arguments, **options)


@pytest.mark.usefixtures("secret")
def test_an_elastic_job_loses_a_rank(tmp_path: Path) -> None:
    told = compare(tmp_path, 3, Faults().kill(1, 1, "first bucket"), train_with_tls, transport="tcp")
    assert all(one.sizes[-1] == 2 for one in told.values())


@pytest.mark.usefixtures("everywhere")
def test_an_elastic_job_gets_a_newcomer(tmp_path: Path) -> None:
    job = Jobs(tmp_path, step_s=0.02)
    try:
        one_comes_and_one_leaves(job)
    finally:
        job.close()
