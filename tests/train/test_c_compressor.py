"""RingDP and hooks with a compressor from a shared library: in the core, by codes that are exchanged, and in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp.compression import EF21, Int8, load
from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import ddp_hook
from ringdp.job import placement as rank_devices
from tests.c_libraries import build
from tests.train import compressed_training as training
from tests.train.harness import backends, ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("c"), "train_int8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without what may be missing, and with codes that are longer."""
    return str(build(tmp_path_factory.mktemp("c"), "train_plain", "NO_FEEDBACK", "NO_ADD", "HEADER=40"))


def trained(compressor: Any, in_core: bool | None = None) -> list[str]:
    model = RingDP(training.wide(), compression=compressor, bucket_cap_mb=0.004)
    digests = training.train(model, range(5))
    if in_core is not None:
        assert model._compression is not None
        assert model._compression.in_core(0) is in_core
    return digests


def as_int8(path: str, error_feedback: Any, native: bool, exchange: bool) -> list[str]:
    with training.codes_exchanged(exchange):
        mine = trained(load(path, error_feedback=error_feedback), native)
    if dist.get_backend() == "ring":  # gloo adds exact gradients, those of biases, in an order of its own
        assert mine == trained(Int8(error_feedback=error_feedback))
    return mine


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("which", ["library", "plain"])
def test_in_the_core_it_has_the_bits_of_int8(
    which: str, error_feedback: bool, world_size: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(which)
    digests = run_ranks(as_int8, path, error_feedback, True, False, world_size=world_size, backend="ring")
    assert all(one == digests[0] for one in digests)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("exchange", [False, True])
def test_elsewhere_too(plain: str, exchange: bool, backend: str) -> None:
    native = exchange or backend == "ring"
    digests = run_ranks(as_int8, plain, True, native, exchange, world_size=2, backend=backend)
    assert digests[0] == digests[1]


def test_other_error_feedback_goes_by_the_hook(library: str) -> None:
    run_ranks(as_int8, library, EF21(), False, False, world_size=2, backend="ring")


def on_ddp(path: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(training.wide(), bucket_cap_mb=0.004)
    model.register_comm_hook(*ddp_hook(load(path, error_feedback=True), model=model))
    for step in range(3):
        model.zero_grad()
        training.loss_of(model, step).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("backend", backends())
def test_on_torchs_ddp(plain: str, backend: str) -> None:
    first, second = run_ranks(on_ddp, plain, world_size=2, backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def resumes(path: str) -> None:
    def make() -> tuple[RingDP, torch.optim.Optimizer]:
        model = RingDP(training.wide(), compression=load(path, error_feedback=True))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = make()
    training.train(model, range(3), optimizer)
    states = [model.state_dict(), optimizer.state_dict(), model.compression_state_dict()]
    states = [torch.load(_file(state), weights_only=True) for state in states]
    entry = states[2]["ranks"][str(dist.get_rank())]["0.weight"]
    assert entry["compressor"].startswith("CCompressor('train_plain', ")
    assert bool(entry["residual"].any())
    went_on = training.train(model, range(3, 6), optimizer)
    again, its_optimizer = make()
    again.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    again.load_compression_state_dict(states[2])
    assert training.train(again, range(3, 6), its_optimizer) == went_on


def _file(thing: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("backend", backends())
def test_what_it_remembers_is_saved(plain: str, backend: str) -> None:
    run_ranks(resumes, plain, world_size=2, backend=backend)


def disagrees(paths: list[str]) -> None:
    RingDP(training.wide(), compression=load(paths[dist.get_rank()]))


def disagrees_in_a_hook(paths: list[str]) -> None:
    model = DistributedDataParallel(training.wide())
    model.register_comm_hook(*ddp_hook(load(paths[dist.get_rank()]), model=model))
    training.loss_of(model, 0).backward()


@pytest.mark.parametrize("disagree", [disagrees, disagrees_in_a_hook])
@pytest.mark.parametrize("backend", backends())
def test_ranks_with_different_libraries_hear_of_both(
    backend: str, disagree: Callable[[list[str]], None], tmp_path: Path
) -> None:
    """One name, one source, built differently."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    paths = [str(build(tmp_path / str(i), f"differs_{backend}", f"HEADER={i}")) for i in range(2)]
    for outcome in run_outcomes(disagree, paths, world_size=2, backend=backend):
        assert isinstance(outcome.error, ringdp.MismatchError)
        text = str(outcome.error)
        assert text.count(f"CCompressor('differs_{backend}', ") == 2
        digests = {word.split("sha256=")[1].split(",")[0] for word in text.split("CCompressor(")[1:]}
        assert len(digests) == 2
        assert "rank 0" in text
        assert "rank 1" in text


def overflows(path: str) -> list[bool | None]:
    model = RingDP(training.wide(), compression=load(path, error_feedback=True))
    finite = []
    for step in range(4):
        model.zero_grad()
        loss = training.loss_of(model, step)
        (loss * torch.inf if step == 2 and dist.get_rank() == 1 else loss).backward()
        finite.append(model.reducer.finite())
        if step == 2:
            assert model.module[0].weight.grad is not None
            assert not bool(model.module[0].weight.grad.isfinite().all())
    return finite


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("which", ["library", "plain"])
def test_an_infinity_of_one_rank_is_seen_by_all(which: str, backend: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    for finite in run_ranks(overflows, path, world_size=2, backend=backend):
        assert finite == [True, True, False, True]


def breaks_down(path: str) -> None:
    trained(load(path))


@pytest.mark.parametrize("backend", backends())
def test_a_function_that_fails_is_an_error_in_words(tmp_path: Path, backend: str) -> None:
    path = str(build(tmp_path, f"breaks_{backend}", "FAILS=-5", "FAILS_FROM=1000"))
    for outcome in run_outcomes(breaks_down, path, world_size=2, backend=backend):
        assert "compress returned -5 for" in str(outcome.error)


def beside_kernels(path: str) -> list[str]:
    """As where a rank's tensors are on a GPU: the core's own codecs go there, a library's do not."""
    with mock.patch.object(rank_devices.Placement, "all_on_cpu", False):
        rules = [("3.weight", Int8(error_feedback=True))]
        model = RingDP(training.wide(), compression=load(path, error_feedback=True), rules=rules)
        digests = training.train(model, range(4))
        assert model._compression is not None
        names = [one.name for one in model._compression.parameters]
        assert model._compression.in_core(names.index("3.weight"))
        assert model._compression.in_hook(names.index("0.weight"))
    return digests


def test_gpus_have_no_part_in_it(library: str) -> None:
    first, second = run_ranks(beside_kernels, library, world_size=2, backend="gloo")
    assert first == second
