"""The sentences about ranks with different numbers of batches, from the errors of the core and the reducer."""

from __future__ import annotations

import pytest

from ringdp import stories
from ringdp.errors import from_core, with_story

WHERE = " (step 13, bucket 0: bias, weight)"
LOST = (
    "rank 0 (host box) lost rank 1 (host box, pid 7) during all_reduce #17 (float32[59], AVG) 'bucket 0: bias, weight',"
    " waiting for rank 1 (host box, pid 7; 0 of 236 bytes received): Connection closed by peer: it left the job: {};"
    " look at that rank's own log for the reason"
)
MISMATCH = (
    "ranks disagree about operation #17: rank {0} (host box, pid 6) does {1}, rank {2} (host box, pid 7) does {3}; call"
    " the same operations with the same shapes and dtypes in the same order on every rank"
)
BUCKET, METRIC = "all_reduce(float32[59], AVG) 'bucket 0: bias, weight'", "all_reduce(float32[1], SUM)"
CAUSE = "the ranks have different numbers of batches, or rank 1 left its loop early. Use DistributedSampler,"
CALLS = "the ranks have different numbers of batches, or rank 1 alone makes that call. Use DistributedSampler,"


@pytest.mark.parametrize(
    ("goodbye", "words"),
    [
        ("its program ended after 12 steps", "rank 1's program ended after 12 steps while rank 0 makes step 13: "),
        ("it called ringdp.shutdown() after 1 step", "rank 1 called ringdp.shutdown() after 1 step while rank 0 makes"),
        ("its process group was destroyed after 12 steps", "rank 1 left its process group after 12 steps while rank 0"),
    ],
)
def test_a_rank_without_batches_that_left(goodbye: str, words: str) -> None:
    text = with_story(LOST.format(goodbye) + WHERE, 0)
    assert text.startswith(words)
    assert f" makes step 13: {CAUSE} drop_last=True, or `with model.join():` (rank 0 (host box) lost rank 1" in text
    assert with_story(text, 0) == text  # once


@pytest.mark.parametrize(
    "goodbye",
    [
        "its program ended by ValueError: no batch after 12 steps",
        "its program ended",
        "its program ended after 13 steps",  # it has made this step, too
        "it called ringdp.shutdown() after KeyError: 3",
    ],
)
def test_other_goodbyes_say_nothing_about_batches(goodbye: str) -> None:
    text = LOST.format(goodbye) + WHERE
    assert with_story(text, 0) == text
    assert with_story(LOST.format("its program ended after 12 steps"), 0).startswith("rank 0 (host box) lost")


def test_what_another_rank_has_found_is_told_of_the_rank_that_raises() -> None:
    text = LOST.format("its program ended after 12 steps") + " (reported by rank 0 (host box, pid 6))" + WHERE
    assert with_story(text, 3).startswith("rank 1's program ended after 12 steps while rank 3 makes step 13")


def test_a_metric_behind_the_loop_meets_a_bucket() -> None:
    text = MISMATCH.format(0, BUCKET, 1, METRIC)
    here, there = with_story(text + WHERE, 0, 12), with_story(text + " (reported by rank 0 (host box, pid 6))", 1, 12)
    assert here.startswith(f"rank 1 calls {METRIC} while rank 0 makes step 13: {CALLS}")
    assert there.startswith(f"rank 1 calls {METRIC} after 12 steps while rank 0 makes a further step: {CALLS}")
    both = stories.unequal_of_all({0: f"MismatchError: {here}", 1: f"MismatchError: {there}"})
    assert both is not None
    assert both.sentence().startswith(f"rank 1 calls {METRIC} after 12 steps while rank 0 makes step 13: {CALLS}")


def test_a_function_that_has_returned_meets_a_bucket() -> None:
    text = MISMATCH.format(0, BUCKET, 1, f"barrier '{stories.RETURNED}'")
    assert with_story(text + WHERE, 0).startswith("rank 1's function returned while rank 0 makes step 13: ")


@pytest.mark.parametrize("calls", [(BUCKET, BUCKET.replace("59", "60")), (METRIC, "barrier")])
def test_two_buckets_or_none_say_nothing_about_batches(calls: tuple[str, str]) -> None:
    text = MISMATCH.format(0, calls[0], 1, calls[1]) + WHERE
    assert with_story(text, 0, 12) == text


def test_an_error_of_the_core_has_its_class_fields_and_story() -> None:
    error = from_core("MismatchError", MISMATCH.format(0, BUCKET, 1, METRIC), 12, rank=1, peer=0, name="loss")
    assert (type(error).__name__, error.rank, error.peer, error.name) == ("MismatchError", 1, 0, "loss")
    assert str(error).startswith(f"rank 1 calls {METRIC} after 12 steps")


def test_how_a_process_ended() -> None:
    assert stories.ended(3) == "ended with exit code 3"
    assert stories.ended(-9) == "was killed by SIGKILL (often: out of memory)"
    assert (
        stories.ended(-9, stories.out_of_memory(1, 2)) == "was killed by SIGKILL (out of memory: the kernel ended it)"
    )
    assert stories.ended(-70) == "was killed by signal 70"
    assert stories.out_of_memory(None, 2) == ""
