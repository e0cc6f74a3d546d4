"""What benchmarks/failures/elastic_peers.py says of the step after a loss, and of a peer that is not there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.failures import elastic_peers  # noqa: E402


def survivors(means: list[list[float]], own: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {"ended": 10.0 + rank, "lost": rank, "means": torch.tensor(mean), "own": torch.tensor(gradient)}
        for rank, (mean, gradient) in enumerate(zip(means, own, strict=True))
    ]


def test_a_mean_of_the_survivors_is_exact() -> None:
    found = elastic_peers.read(survivors([[2.0, -4.0]] * 2, [[1.0, -8.0], [3.0, 0.0]]), killed=9.0)
    assert found == elastic_peers.Loss(seconds=2.0, lost=1, equal=True, off=0.0)


def test_a_mean_over_the_lost_rank_too_and_unequal_means_are_seen() -> None:
    assert elastic_peers.read(survivors([[1.5]] * 2, [[1.0], [3.0]]), killed=9.0).off == 0.25
    found = elastic_peers.read(survivors([[2.0], [2.0 + 2**-22]], [[1.0], [3.0]]), killed=9.0)
    assert not found.equal
    assert 0 < found.off < 1e-6


def test_a_peer_that_is_not_installed_gets_a_row_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_peers, "find_spec", lambda name: None)
    for peer in elastic_peers.PEERS[1:]:
        row = elastic_peers.loss_row(peer, "small", 4, 3, 1)
        assert row[0] == "small"
        assert row[1].startswith(peer.package)
        assert row[1].endswith(peer.settings)
        assert "pip install" in row[2]
