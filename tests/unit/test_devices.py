"""ringdp/job/devices.py: which GPU is whose, and when NCCL carries CUDA tensors. No GPU is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError
from ringdp.job import devices
from ringdp.job.devices import NCCL_BESIDE_RING, Choice, VisibleDevices, choose, gpu_of


def on_gpus(*seen: Sequence[str], choice: str = "") -> list[VisibleDevices]:
    """Ranks of one host that see these GPUs."""
    return [VisibleDevices("a", rank, "cuda", list(gpus), None, True, choice) for rank, gpus in enumerate(seen)]


def on_cpu(rank: VisibleDevices) -> VisibleDevices:
    return dataclasses.replace(rank, kind="cpu", gpus=[])


def numbers(ranks: list[VisibleDevices]) -> list[int | None]:
    return [gpu_of(ranks, rank) for rank in range(len(ranks))]


# --- which GPU


def test_each_local_rank_has_its_own() -> None:
    ranks = on_gpus(["A", "B"], ["A", "B"])
    assert numbers(ranks) == [0, 1]
    assert numbers([ranks[0], on_cpu(ranks[1])]) == [0, None]


def test_a_device_that_was_asked_for_is_taken_or_named() -> None:
    ranks = [dataclasses.replace(one, asked=0) for one in on_gpus(["A", "B"], ["A", "B"])]
    assert numbers(ranks) == [0, 0]
    ranks[1] = dataclasses.replace(ranks[1], asked=2)
    with pytest.raises(InvalidArgumentError, match="rank 1 on a asked for device cuda:2, and its torch sees 2 CUDA"):
        gpu_of(ranks, 1)


def test_one_shown_alone_is_number_0() -> None:
    assert numbers(on_gpus(["A"], ["B"])) == [0, 0]


def test_fewer_devices_than_ranks_are_shared_in_turn() -> None:
    assert numbers(on_gpus(*[["A", "B"]] * 5)) == [0, 1, 0, 1, 0]


# --- which backend


def test_nccl_where_each_rank_has_a_gpu() -> None:
    for ranks in (on_gpus(["A", "B"], ["A", "B"]), on_gpus(["A"], ["B"]), on_gpus(["A"])):
        assert choose(ranks, None) == Choice(NCCL_BESIDE_RING, "each rank has a GPU of its own")
    assert choose(on_gpus(["A"], ["B"], choice="nccl"), None).reason == "RINGDP_CUDA=nccl"


def test_ranks_on_cpus_have_no_choice() -> None:
    ranks = [on_cpu(one) for one in on_gpus(["A"], ["B"], choice="nccl")]
    assert choose(ranks, None) == Choice("ring", "")


OBSTACLES = [
    (on_gpus(["A"], ["B"], ["A"]), "ranks 0 and 2 on a share GPU A"),
    (on_gpus(*[["A"]] * 3), "ranks 0, 1 and 2 on a share GPU A"),
    (on_gpus(*[["A", "B"]] * 4), r"ranks 0 and 2 on a share GPU A \(and so do others, 2 GPUs in all\)"),
    ([*on_gpus(["A"]), on_cpu(on_gpus(["A"], ["B"])[1])], "rank 1 on a computes on the CPU"),
    (
        [dataclasses.replace(one, nccl=one.local_rank != 1) for one in on_gpus(["A"], ["B"])],
        "the torch of rank 1 on a was built without NCCL",
    ),
]


@pytest.mark.parametrize("ranks, words", OBSTACLES)
def test_what_nccl_would_refuse_goes_over_ring_or_is_named(ranks: list[VisibleDevices], words: str) -> None:
    choice = choose(ranks, None)
    assert (choice.backend, choice.wanted, choice.measure) == ("ring", False, False)
    auto = [dataclasses.replace(one, choice="auto") for one in ranks]
    assert choose(auto, None) == choice
    demanded = [dataclasses.replace(one, choice="nccl") for one in ranks]
    with pytest.raises(InvalidArgumentError, match=f"RINGDP_CUDA=nccl and {words}; NCCL would refuse them: start at"):
        choose(demanded, None)


def test_two_hosts_in_name_that_see_one_gpu_share_it() -> None:
    first, second = on_gpus(["A"], ["A"])
    ranks = [first, dataclasses.replace(second, host="b", local_rank=0)]
    assert choose(ranks, None).reason == "ranks 0 and 1 on a share GPU A"


def test_ring_on_demand() -> None:
    assert choose(on_gpus(["A"], ["B"], choice="ring"), None) == Choice("ring", "RINGDP_CUDA=ring")


def test_auto_measures_where_both_could_serve() -> None:
    assert choose(on_gpus(["A"], ["B"], choice="auto"), None).measure
    assert not choose(on_gpus(["A"], choice="auto"), None).measure, "one rank alone has nothing to measure"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_was_passed_wins_unless_nccl_cannot(backend: str) -> None:
    assert choose(on_gpus(["A"], ["B"], choice="ring"), backend) == Choice(backend, "")
    shared = on_gpus(["A"], ["A"])
    assert choose(shared, "gloo") == Choice("gloo", "")
    assert choose(shared, "cpu:nccl,cuda:gloo").backend == "cpu:nccl,cuda:gloo"
    with pytest.raises(InvalidArgumentError, match=f"backend='{backend}' and ranks 0 and 1 on a share GPU A; NCCL"):
        choose(shared, backend)


@pytest.mark.parametrize(
    "kind, nccl, wish, expected",
    [("cuda", True, "", NCCL_BESIDE_RING), ("cuda", True, "ring", "ring"), ("cuda", False, "", "ring"),
     ("cpu", True, "nccl", "ring"), ("cuda", True, "auto", NCCL_BESIDE_RING)],
)  # fmt: skip
def test_the_default_of_libraries_that_make_the_group(
    monkeypatch: pytest.MonkeyPatch, kind: str, nccl: bool, wish: str, expected: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setenv("RINGDP_CUDA", wish)
    assert devices.default_backend(kind) == expected
