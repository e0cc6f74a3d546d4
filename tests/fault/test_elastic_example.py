"""An example under kills has the loss curve of a script that drops the same ranks at the same steps, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault import elastic_example_jobs as jobs
from tests.fault.elastic_example_jobs import STEPS, Curve, Loss
from tests.helpers import need
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
need("sklearn.datasets", "scikit-learn")


def curves(folder: Path, losses: tuple[Loss, ...], *, elastic: bool) -> list[Curve]:
    """Of the ranks that are left at the end."""
    own = folder / ("elastic" if elastic else "scripted")
    own.mkdir()
    outcomes = run_outcomes(jobs.train, str(own), losses, elastic=elastic, world_size=3, backend=None)
    gone = {loss.place for loss in losses}
    for outcome in outcomes:
        if elastic and outcome.rank in gone:
            assert "died with code -9" in (outcome.text or "")
        else:
            assert outcome.text is None, outcome.text
    return [outcome.value for outcome in outcomes if outcome.rank not in gone]


@pytest.mark.parametrize(
    "losses",
    [
        (Loss(1, 7),),
        (Loss(0, 3, late=True), Loss(1, 4)),
        pytest.param((Loss(2, 5), Loss(0, 11, late=True)), marks=pytest.mark.slow),
    ],
    ids=["one", "rank_0_then_another", "another_then_rank_0"],
)
def test_the_loss_curve_is_that_of_a_script_that_drops_the_same_ranks(tmp_path: Path, losses: tuple[Loss, ...]) -> None:
    scripted = curves(tmp_path, losses, elastic=False)[0]
    assert len(scripted.losses) == STEPS
    for survivor in curves(tmp_path, losses, elastic=True):
        assert survivor == scripted
