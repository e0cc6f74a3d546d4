"""What is counted of sparse codes: densities of a rank's choice and of all ranks' together, and what was left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.compression import DGC, EF21, Int4, RandomK, TopK
from ringdp.compression.exchange import BucketSlice, Coder, Layout, Sparsity, States, Tally
from ringdp.ddp.compression.quality import expected_residual
from ringdp.testing.simulation import together

PART = 1024  # elements, of which a hundredth are ten


class OwnedPlaces:
    """A user's own sparse method, by owners, who encode the union."""

    fixed_size = False
    aggregate = "owner"

    def compress(self, x: Tensor, info: Any) -> tuple[Tensor, ...]:
        index = x.nonzero().view(-1)
        return index.int(), x[index]

    def decompress(self, payload: tuple[Tensor, ...], info: Any) -> Tensor:
        return torch.zeros(info.numel).index_put((payload[0].long(),), payload[1])

    def entries(self, payload: tuple[Tensor, ...]) -> int:
        return payload[0].numel()


class GatheredPlaces(OwnedPlaces):
    aggregate = "gather"


class Rank:
    """Keeps its states and its tally from step to step."""

    def __init__(self, rank: int, ranks: int, compressor: Any, numel: int) -> None:
        self.states, self.tally = States(), Tally()
        self._rank, self._ranks, self._step = rank, ranks, 0
        self._layout = Layout([BucketSlice("w", (numel,), 0, numel, compressor)], ranks, torch.device("cpu"))

    def begin(self, gradient: Tensor, factor: float) -> Any:
        self.tally.begin()
        coder = Coder(self.states, self._rank, self._ranks, self._step, factor, tally=self.tally)
        self._step += 1
        return self._layout.average(gradient.clone(), coder, self._ranks)


def steps(compressor: Any, gradients: list[list[Tensor]], *, measures: bool = True, factor: float = 1.0) -> list[Rank]:
    ranks = [Rank(rank, len(gradients[0]), compressor, gradients[0][0].numel()) for rank in range(len(gradients[0]))]
    for of_step in gradients:
        for rank in ranks:
            rank.tally.measures = measures
        together([rank.begin(gradient, factor) for rank, gradient in zip(ranks, of_step, strict=True)])
        for rank in ranks:
            rank.states.commit(True)
    return ranks


def counted(ranks: list[Rank]) -> list[Sparsity]:
    return [rank.tally.items()["w"] for rank in ranks]


def spikes(rank: int, ranks: int, *, apart: bool) -> Tensor:
    """Of each part ten elements that are 1, the other 1,014 are 1/16: the same ten on all ranks, or none in common."""
    x = torch.full((ranks, PART), 1 / 16)
    begin = 30 * rank if apart else 0
    x[:, begin : begin + 10] = 1.0
    return x.view(-1)


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("feedback", [True, False, DGC(0.9), EF21()], ids=str)
def test_top_k_of_known_choices(feedback: Any, ranks: int, apart: bool, measures: bool) -> None:
    gradients = [[spikes(rank, ranks, apart=apart) for rank in range(ranks)]]
    for one in counted(steps(TopK(0.01, error_feedback=feedback), gradients, measures=measures)):
        assert (one.numel, one.encoded, one.chosen) == (ranks * PART, ranks * PART, ranks * 10)
        assert one.density == 10 / PART
        assert one.union == ranks * 10 * (ranks if apart else 1)
        assert one.union_density == pytest.approx(10 * (ranks if apart else 1) / PART)
        assert one.union_over_chosen == pytest.approx(ranks if apart else 1)
        rest = 1014 / 256
        assert one.dropped_mass == (pytest.approx(rest / (10 + rest)) if measures else None)


@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_what_waited_counts_as_what_was_to_be_sent(factor: float) -> None:
    gradients = [spikes(rank, 2, apart=False) * factor for rank in range(2)]
    gradients = [torch.where(it == factor, 4 * it, it) for it in gradients]  # 16 steps' worth of the others
    both = counted(steps(TopK(0.01), [gradients, gradients], factor=factor))
    rest = 1014 / 64  # of 2/16 each: this step's and the last one's
    assert [one.dropped_mass for one in both] == [pytest.approx(rest / (160 + rest))] * 2
    unscaled = counted(steps(TopK(0.01, error_feedback=DGC(0.0)), [gradients, gradients], factor=factor))
    assert [one.dropped_mass for one in unscaled] == [pytest.approx(rest / (160 + rest))] * 2


@pytest.mark.parametrize("feedback", [True, False])
def test_random_k_is_the_same_on_all_ranks(feedback: bool) -> None:
    for one in counted(steps(RandomK(0.1, error_feedback=feedback), [[torch.ones(1000), -torch.ones(1000)]])):
        assert (one.density, one.union_density, one.union_over_chosen) == (0.1, 0.1, 1.0)
        assert one.dropped_mass == pytest.approx(0.9)


def test_a_users_own_method_is_counted_by_its_entries() -> None:
    gradients = [torch.zeros(4096) for _ in range(2)]
    gradients[0][:100] = 1.0
    gradients[1][2000:2200] = 1.0
    for gathered in counted(steps(GatheredPlaces(), [gradients])):
        assert gathered.union is None
        assert gathered.union_density is gathered.union_over_chosen is None
        assert gathered.dropped_mass == 0.0
    assert [one.chosen for one in counted(steps(GatheredPlaces(), [gradients]))] == [100, 200]
    owned = counted(steps(OwnedPlaces(), [gradients]))
    assert [one.union for one in owned] == [300, 300]
    assert sum(one.encoded for one in owned) == 4096  # each rank the other's part alone


def test_nothing_is_counted_of_codes_without_entries() -> None:
    assert [rank.tally.items() for rank in steps(Int4(), [[torch.ones(4096)] * 2])] == [{}, {}]


def test_of_nothing_the_shares_are_zero() -> None:
    for one in counted(steps(TopK(0.01), [[torch.zeros(PART)] * 2])):
        assert (one.chosen, one.density, one.union_density, one.dropped_mass) == (0, 0.0, 0.0, 0.0)
        assert one.union_over_chosen is None


def test_a_coarse_code_may_have_a_long_residual() -> None:
    assert expected_residual(0.01) < 0.21
    assert expected_residual(0.9) == pytest.approx(2 * 0.9**0.5 / 0.1)
    assert expected_residual(1.0) == float("inf")
