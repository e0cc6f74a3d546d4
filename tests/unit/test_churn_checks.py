"""What churn_checks.py finds after a job: nothing in a right history, and each thing that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.failures import churn_checks  # noqa: E402
from benchmarks.failures.churn_checks import Step, Told  # noqa: E402

RANKS, STEPS, LOST_IN = 3, 20, 7
VIEW = (2, "[0, 2]")
LINE = f"rank 1 was lost (killed); 2 of 3 ranks go on, as view 2; step {LOST_IN + 1} was made again without it; 0.1 s"


def history() -> list[Told]:
    """Of three ranks, of which one is killed in a step that the others make again."""
    told = []
    for place in range(RANKS):
        one = Told(place, pid=100 + place, ended=place != 1)
        for number in range(LOST_IN if place == 1 else STEPS):
            members = (0, 1, 2) if number < LOST_IN else (0, 2)
            first = sum(2.0**member for member in members) / len(members)
            gradients = churn_checks.mean_of(members, number)
            one.steps.append(Step(number, len(members), first, gradients, f"after {number}", float(number), 30))
        if place != 1:
            one.views.append(VIEW)
            one.lines.append(LINE)
        told.append(one)
    return told


def change(told: list[Told], place: int, number: int, **values: object) -> None:
    told[place].steps[number] = replace(told[place].steps[number], **values)  # type: ignore[arg-type]


def for_both(told: list[Told]) -> None:
    for place in (0, 2):
        change(told, place, 9, gradients="else")


def test_a_checkpoint_made_again_says_nothing_of_its_step() -> None:
    told = history()
    for place in (0, 2):
        told[place].lines[0] = LINE.replace(f"step {LOST_IN + 1}", f"the checkpoint of step {LOST_IN}")
    assert churn_checks.wrong(told, "plain", (0, 2)) == []


def test_a_right_history() -> None:
    assert churn_checks.wrong(history(), "plain", (0, 2)) == []


WRONG: dict[str, tuple[Callable[[list[Told]], object], str]] = {
    "other_parameters": (lambda told: change(told, 2, 9, parameters="else"), "other bits for places 0 and 2"),
    "bits_of_the_dead": (lambda told: change(told, 1, 3, gradients="else"), "other bits for places 0 and 1"),
    "a_step_left_out": (lambda told: told[1].steps.pop(2), "place 1 left out a step"),
    "one_is_behind": (lambda told: told[2].steps.pop(), "place 2 lived and made 19 of 20 steps"),
    "no_end": (lambda told: setattr(told[0], "ended", False), "end: False"),
    "another_view": (lambda told: told[2].views.append((3, "[2]")), "place 0 went through"),
    "no_line": (lambda told: told[2].lines.clear(), "wrote 0 lines of 1 changes"),
    "the_line_says_it_counts": (
        lambda told: told[0].lines.__setitem__(0, LINE.replace("was made again", "counts")),
        "and its step is the mean of",
    ),
    "nobody's_mean": (lambda told: change(told, 0, 9, first=9.75), "is the mean of places ()"),
    "who_was_lost_comes_back": (lambda told: change(told, 0, 9, first=7 / 3), "is the mean of places (0, 1, 2)"),
    "not_the_mean": (for_both, "is not exactly the mean of (0, 2)"),
    "a_metric": (lambda told: told[0].means.update({4: 4.5}), "the mean of place 0 in step 4 is 4.5"),
    "descriptors": (lambda told: change(told, 0, 19, descriptors=40), "had 30 descriptors, and 40 at its end"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    told = history()
    breaks, words = WRONG[what]
    breaks(told)
    problems = churn_checks.wrong(told, "plain", (0, 2))
    assert any(words in problem for problem in problems), problems


def test_the_end_of_a_record_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    words = ["begins\t42\t1.0", f"step\t0\t3\t{(7 / 3).hex()}\tg\tp\t2.0\t30", "view\t2\t[0, 2]", "step\t1\t3"]
    (tmp_path / "record-0").write_text("\n".join(words))
    told = churn_checks.read(tmp_path, 0)
    assert (told.pid, len(told.steps), told.views, told.ended) == (42, 1, [VIEW], False)
    assert churn_checks.members_of(told.steps[0].first, 3) == (0, 1, 2)
