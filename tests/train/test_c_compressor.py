"""RingDP and hooks with a compressor from a shared library: in the core, by codes that are exchanged, and in Python."""

from __future__ import annotations

import io
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringdp import Compression
from ringdp.compression import EF21, Int8, load
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import MismatchError
from ringdp.hooks import ddp_hook
from ringdp.job import placement as rank_devices
from tests.c_libraries import build
from tests.train import compressed_training as training
from tests.train.harness import backends, each, ring_is_built, run_ranks, same_everywhere

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


# "plain" lacks what is optional and has longer codes; 0 and 1 share a name and are built differently.
LIBRARIES = {
    "library": ("train_int8",),
    "plain": ("train_plain", "NO_FEEDBACK", "NO_ADD", "HEADER=40"),
    "0": ("differs", "HEADER=0"),
    "1": ("differs", "HEADER=1"),
    "breaks": ("breaks", "FAILS=-5", "FAILS_FROM=1000"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of each."""
    folder = tmp_path_factory.mktemp("c")
    for which in LIBRARIES:
        (folder / which).mkdir()
    return {which: str(build(folder / which, *of)) for which, of in LIBRARIES.items()}


def trained(compressor: Any, in_core: bool | None = None) -> list[str]:
    model = RingDP(training.wide(), compression=compressor, bucket_cap_mb=0.004)
    digests = training.train(model, range(5))
    if in_core is not None:
        assert model.ringdp_features[GradientCompression].attached("test").in_core(0) is in_core
    return digests


def it_has_the_bits_of_int8(path: str, error_feedback: Any, native: bool, exchange: bool = False) -> None:
    with training.codes_exchanged(exchange):
        mine = trained(load(path, error_feedback=error_feedback), native)
    if dist.get_backend() == "ring":  # gloo adds exact gradients, those of biases, in an order of its own
        assert mine == trained(Int8(error_feedback=error_feedback))
    assert same_everywhere(mine)


def it_serves_torchs_ddp(path: str) -> None:
    model = DistributedDataParallel(training.wide(), bucket_cap_mb=0.004)
    model.register_comm_hook(*ddp_hook(load(path, error_feedback=True), model=model))
    for step in range(3):
        model.zero_grad()
        training.loss_of(model, step).backward()
    assert same_everywhere(training.digest(training.gradients(model)))


def what_it_remembers_is_saved(path: str) -> None:
    def make() -> tuple[RingDP, torch.optim.Optimizer]:
        model = RingDP(training.wide(), compression=load(path, error_feedback=True))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    model, optimizer = make()
    training.train(model, range(3), optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), model.compression_state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    entry = states[2]["ranks"][str(dist.get_rank())]["0.weight"]
    assert entry["compressor"].startswith("CCompressor('train_plain', ")
    assert bool(entry["residual"].any())
    went_on = training.train(model, range(3, 6), optimizer)
    again, its_optimizer = make()
    again.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    again.load_compression_state_dict(states[2])
    assert training.train(again, range(3, 6), its_optimizer) == went_on


def an_infinity_of_one_rank_is_seen_by_all(path: str) -> None:
    model = RingDP(training.wide(), compression=load(path, error_feedback=True))
    for step in range(4):
        model.zero_grad()
        loss = training.loss_of(model, step)
        (loss * torch.inf if step == 2 and dist.get_rank() == 1 else loss).backward()
        assert model.reducer.overflow.finite() is (step != 2)
        if step == 2:
            assert model.module[0].weight.grad is not None
            assert not bool(model.module[0].weight.grad.isfinite().all())


def ranks_with_different_libraries_hear_of_both(paths: list[str]) -> None:
    mine = load(paths[dist.get_rank()])

    def in_a_hook() -> None:
        model = DistributedDataParallel(training.wide())
        model.register_comm_hook(*ddp_hook(mine, model=model))
        training.loss_of(model, 0).backward()

    for disagree in (lambda: RingDP(training.wide(), compression=mine), in_a_hook):
        with pytest.raises(MismatchError) as caught:
            disagree()
        text = str(caught.value)
        assert text.count("CCompressor('differs', ") == 2
        assert len({word.split("sha256=")[1].split(",")[0] for word in text.split("CCompressor(")[1:]}) == 2
        assert "rank 0" in text
        assert "rank 1" in text


def a_function_that_fails_is_an_error(path: str) -> None:
    with pytest.raises(Exception, match="compress returned -5 for"):
        trained(load(path))


@pytest.mark.parametrize("backend", backends())
def test_two_ranks(built: dict[str, str], backend: str) -> None:
    run_ranks(
        each,
        *(
            partial(it_has_the_bits_of_int8, built["plain"], True, exchange or backend == "ring", exchange)
            for exchange in (False, True)
        ),
        partial(it_serves_torchs_ddp, built["plain"]),
        partial(what_it_remembers_is_saved, built["plain"]),
        *(partial(an_infinity_of_one_rank_is_seen_by_all, built[which]) for which in ("library", "plain")),
        partial(ranks_with_different_libraries_hear_of_both, [built["0"], built["1"]]),
        partial(a_function_that_fails_is_an_error, built["breaks"]),
        world_size=2,
        backend=backend,
    )


def test_three_ranks(built: dict[str, str]) -> None:
    run_ranks(
        each,
        *(
            partial(it_has_the_bits_of_int8, built[which], error_feedback, True)
            for which in ("library", "plain")
            for error_feedback in (False, True)
        ),
        partial(it_has_the_bits_of_int8, built["library"], EF21(), False),  # goes by the hook
        world_size=3,
        backend="ring",
    )


def beside_kernels(path: str) -> None:
    """As where a rank's tensors are on a GPU: the core's own codecs go there, a library's do not."""
    with mock.patch.object(rank_devices.Placement, "all_on_cpu", False):
        rules = [("3.weight", Int8(error_feedback=True))]
        model = RingDP(training.wide(), compression=Compression(load(path, error_feedback=True), rules))
        digests = training.train(model, range(4))
        names = [one.name for one in model.ringdp_features[GradientCompression].attached("test").parameters]
        assert model.ringdp_features[GradientCompression].attached("test").in_core(names.index("3.weight"))
        assert model.ringdp_features[GradientCompression].attached("test").in_hook(names.index("0.weight"))
    assert same_everywhere(digests)


def test_gpus_have_no_part_in_it(built: dict[str, str]) -> None:
    run_ranks(beside_kernels, built["library"], world_size=2, backend="gloo")
