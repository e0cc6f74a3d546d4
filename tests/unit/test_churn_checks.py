"""What churn_checks.py finds after a job: nothing in a right history, and each thing that is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.failures import churn_checks  # noqa: E402
from benchmarks.failures.churn_checks import Step, Told  # noqa: E402
from benchmarks.failures.churn_rank import SAMPLES  # noqa: E402

RANKS, STEPS, LOST_IN = 3, 20, 7
VIEW = (2, "[0, 2]")
LINE = f"rank 1 was lost (killed); 2 of 3 ranks go on, as view 2; step {LOST_IN + 1} was made again without it; 0.1 s"

mean_of = functools.cache(churn_checks.mean_of)


@pytest.fixture(autouse=True)
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(churn_checks, "mean_of", mean_of)


def history() -> list[Told]:
    """Of three ranks, of which one is killed in a step that the others make again."""
    told = []
    for place in range(RANKS):
        one = Told(place, pid=100 + place, ended=place != 1)
        for number in range(LOST_IN if place == 1 else STEPS):
            members = (0, 1, 2) if number < LOST_IN else (0, 2)
            first = sum(2.0**member for member in members) / len(members)
            gradients = mean_of(members, number)
            one.steps.append(Step(number, len(members), first, gradients, f"after {number}", float(number), 30, 7))
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
    words = ["begins\t42\t1.0", f"step\t0\t3\t{(7 / 3).hex()}\tg\tp\t2.0\t30\t7", "view\t2\t[0, 2]", "step\t1\t3"]
    (tmp_path / "record-0").write_text("\n".join(words))
    told = churn_checks.read(tmp_path, 0)
    assert (told.pid, len(told.steps), told.views, told.ended) == (42, 1, [VIEW], False)
    assert churn_checks.members_of(told.steps[0].first, 3) == (0, 1, 2)


# Samples and what is owed: a job of three ranks that make the steps of two epochs; rank 1 dies in LOST_IN.

BATCH = SAMPLES // 10
COMES_AGAIN = list(range(LOST_IN * BATCH + 20, LOST_IN * BATCH + 40))


def topk() -> list[Told]:
    """As `history`; the lost rank's samples of its last step come at the end of the epoch."""
    told = history()
    steps = [(0, list(range(step * BATCH, (step + 1) * BATCH))) for step in range(10)]
    steps[LOST_IN] = (0, [sample for sample in steps[LOST_IN][1] if sample not in COMES_AGAIN])
    steps += [(0, COMES_AGAIN), *((1, list(range(step * BATCH, (step + 1) * BATCH))) for step in range(9))]
    for one in told:
        for step in one.steps:
            members = [0, 1, 2] if step.number < LOST_IN else [0, 2]
            epoch, samples = steps[step.number]
            one.batches[step.number] = epoch, samples[members.index(one.place) :: len(members)]
            one.ledgers[step.number] = epoch, samples, members
            one.owed[step.number] = 10.0 + one.place, 4.0 * step.number, 6.0 + sum(members) / len(members)
    return told


def commit_early(told: list[Told]) -> None:
    """Rank 0 owes what it has left out of the step that was made again, too."""
    gradient, owed, mean = told[0].owed[LOST_IN]
    told[0].owed[LOST_IN] = gradient, owed + 3.0, mean


def deal_twice(told: list[Told]) -> None:
    for place in (0, 2):
        told[place].ledgers[10] = 0, [*COMES_AGAIN, 5], [0, 2]
    told[0].batches[10] = 0, [*told[0].batches[10][1], 5]


def drop(told: list[Told]) -> None:
    for place in (0, 2):
        told[place].ledgers[10] = 0, COMES_AGAIN[:-1], [0, 2]
        told[place].batches[10] = 0, [sample for sample in told[place].batches[10][1] if sample != COMES_AGAIN[-1]]


OF_TOP_K: dict[str, tuple[Callable[[list[Told]], object], str]] = {
    "residual_committed_early": (commit_early, "in step 7 the ranks owe"),
    "a_sample_twice": (deal_twice, "epoch 0 has samples twice: [5]"),
    "a_sample_dropped": (drop, "epoch 0 is without 1 samples, and the lines name 0"),
    "a_batch_of_another_step": (
        lambda told: told[2].batches.update({3: told[2].batches[4]}),
        "the mean of step 3 has samples",
    ),
    "other_samples_on_one": (lambda told: told[2].ledgers.update({3: (0, [1], [0])}), "place 2 had other samples"),
}


def test_a_right_history_with_samples() -> None:
    assert churn_checks.wrong(topk(), "topk", (0, 2)) == []
    told = topk()
    drop(told)
    told[2].lines.append(
        "epoch 0: 1 samples of batches 7 to 7, which went to rank 1, are in no step: no batch was left"
    )
    assert churn_checks.wrong(told, "topk", (0, 2)) == []


@pytest.mark.parametrize("what", OF_TOP_K)
def test_what_is_wrong_with_samples_is_found(what: str) -> None:
    told = topk()
    breaks, words = OF_TOP_K[what]
    breaks(told)
    problems = churn_checks.wrong(told, "topk", (0, 2))
    assert any(words in problem for problem in problems), problems


# Jobs in which ranks come: places are pids.


def coming() -> list[Told]:
    """Two processes; a third one joins before step 40, and has the view with it."""
    told = [Told(pid, pid=pid, started=1.0, ended=True) for pid in (10, 11, 12)]
    for one in told:
        one.views.append((2, "[0, 1, 2]"))
        for number in range(40 if one.pid == 12 else 1, 141):
            size = 2 if number < 40 else 3
            one.steps.append(Step(number, size, 0.0, "g", f"after {number}", number * 0.1, 30, 7))
            one.ledgers[number] = (
                (number - 1) // 60,
                [(number - 1) % 60 * 10 + it for it in range(10)],
                list(range(size)),
            )
            one.audit[number] = one.ledgers[number][1][(one.pid - 10) :: size]
    return told


def come_again(told: list[Told], **counts: int) -> None:
    """A rank is lost and another one comes, and process 10 has more of something."""
    for number in range(79, 89):
        change(told, 0, number, size=2)
    for number in range(89, 140):
        change(told, 0, number, **counts)


OF_COMING: dict[str, tuple[Callable[[list[Told]], object], str]] = {
    "other_bits": (lambda told: change(told, 2, 9, parameters="else"), "other bits for places 10 and 12"),
    "a_step_left_out": (lambda told: told[2].steps.pop(3), "place 12 left out a step"),
    "no_end": (lambda told: setattr(told[1], "ended", False), "process 11 lived and made 140 of 140 steps"),
    "one_is_behind": (lambda told: told[1].steps.pop(), "process 11 lived and made 139 of 140 steps"),
    "another_view": (lambda told: told[2].views.__setitem__(0, (2, "[0, 2]")), "view 2 has [0, 2] for process 12"),
    "a_view_left_out": (lambda told: told[0].views.append((4, "[0]")), "process 10 went through views [2, 4]"),
    "two_lines": (
        lambda told: told[0].lines.extend(["rank 1 was lost (killed); as view 3; 0.1 s"] * 2),
        "process 10 wrote two lines of the views ['3']",
    ),
    "audit": (lambda told: told[0].audit.update({50: [3]}), "the mean of step 50 has samples"),
    "descriptors": (
        lambda told: come_again(told, descriptors=40),
        "process 10 of 3 had 30 descriptors, and 40 later",
    ),
    "threads": (
        lambda told: come_again(told, threads=17),
        "process 10 of 3 had 7 threads, and 17 later",
    ),
}


def test_a_right_history_of_ranks_that_come() -> None:
    assert churn_checks.wrong_where_ranks_come(coming(), "job", (10, 11, 12)) == []


@pytest.mark.parametrize("what", OF_COMING)
def test_what_is_wrong_where_ranks_come_is_found(what: str) -> None:
    told = coming()
    breaks, words = OF_COMING[what]
    breaks(told)
    problems = churn_checks.wrong_where_ranks_come(told, "job", (10, 11, 12))
    assert any(words in problem for problem in problems), problems


def coming_in_rounds() -> list[Told]:
    """The same with rounds of six steps, each of which has 60 samples: an epoch is ten of them."""
    told = coming()
    for one in told:
        one.ledgers.clear()
        one.audit.clear()
        for number in range(7 if one.pid == 12 else 1, 24):
            samples = [(number - 1) % 10 * 60 + it for it in range(60)]
            one.ledgers[number] = ((number - 1) // 10, samples, [0, 1] if number < 7 else [0, 1, 2])
    return told


OF_ROUNDS_THAT_COME: dict[str, tuple[Callable[[list[Told]], object], str]] = {
    "other_samples": (
        lambda told: told[2].ledgers.update({9: (0, [1], [0, 1, 2])}),
        "place 12 had other samples in round 9",
    ),
    "a_round_without_some": (
        lambda told: [one.ledgers.update({4: (0, list(range(180, 230)), [0, 1])}) for one in told],
        "2 epochs are without 10 samples, and the lines name 0",
    ),
    "dealt_twice": (
        lambda told: [one.ledgers.update({23: (2, [7] * 60, [0, 1, 2])}) for one in told],
        "samples [7] are in more than 3 rounds",
    ),
}


@pytest.mark.parametrize("what", [None, *OF_ROUNDS_THAT_COME])
def test_samples_of_rounds_where_ranks_come(what: str | None) -> None:
    told = coming_in_rounds()
    breaks, words = OF_ROUNDS_THAT_COME[what] if what else (lambda told: None, "")
    breaks(told)
    problems = churn_checks.wrong_where_ranks_come(told, "job-rounds", (10, 11, 12))
    assert any(words in problem for problem in problems) if what else problems == []


def test_a_pause_is_without_the_time_for_which_ranks_were_stopped() -> None:
    told = coming()
    for number in range(60, 140):
        change(told, 0, number, at=told[0].steps[number].at + 5.0)
    (longest, at, process), *others = churn_checks.pauses(told, [(6.5, 8.5)])
    assert (round(longest, 3), round(at, 3), process) == (3.1, 6.0, 10)
    assert all(seconds < 0.2 for seconds, _, _ in others)


# Rounds of two sites: places 0 and 2, and 1 and 3.


def rounds() -> list[Told]:
    """Place 1 is lost, which its site notices in a step, and all in the next round."""
    told = []
    for place in range(4):
        one = Told(place, pid=place + 1, ended=place != 1, site=place % 2)
        for number in range(LOST_IN if place == 1 else STEPS):
            site = (place,) if place == 3 and number >= LOST_IN else (place % 2, place % 2 + 2)
            first = sum(2.0**member for member in site) / len(site)
            gradients = mean_of(site, number)
            one.steps.append(Step(number, 4, first, gradients, f"site {place % 2} after {number}", number / 10, 30, 7))
            if number % 6 == 5:
                one.rounds[number // 6 + 1] = f"round {number}", "0 1 2 3" if number < LOST_IN else "0 2 3"
        if place == 3:
            one.views.append((2, "[3]"))
            one.lines.append("rank 1 was lost (killed); 1 of 2 ranks go on, as view 2; step 8 was made again")
        if place != 1:
            one.views.append((2, "[0, 2, 3]"))
            one.lines.append("rank 1 was lost (killed); 3 of 4 ranks go on, as view 2; DiLoCo was made again")
        told.append(one)
    return told


OF_ROUNDS: dict[str, tuple[Callable[[list[Told]], object], str]] = {
    "other_bits": (lambda told: told[2].rounds.update({2: ("else", "0 2 3")}), "round 2 ended with other bits"),
    "a_round_left_out": (lambda told: told[2].rounds.pop(1), "place 2 left out a round: [2, 3]"),
    "who_was_lost_comes_back": (
        lambda told: told[2].rounds.update({3: ("round 17", "0 1 2 3")}),
        "round 3 of place 2 has members 0 1 2 3",
    ),
    "other_bits_in_a_site": (lambda told: change(told, 2, 9, parameters="else"), "other bits for places 0 and 2"),
    "a_mean_of_another_site": (lambda told: change(told, 2, 9, first=1.5), "is the mean of places"),
    "no_line": (lambda told: told[3].lines.pop(), "place 3 wrote 1 lines of 2 changes"),
    "another_view": (lambda told: told[2].views.__setitem__(0, (2, "[0, 1, 2]")), "place 2 went through"),
}


def test_a_right_history_of_rounds() -> None:
    assert churn_checks.wrong(rounds(), "rounds", (0, 2, 3)) == []


@pytest.mark.parametrize("what", OF_ROUNDS)
def test_what_is_wrong_with_rounds_is_found(what: str) -> None:
    told = rounds()
    breaks, words = OF_ROUNDS[what]
    breaks(told)
    problems = churn_checks.wrong(told, "rounds", (0, 2, 3))
    assert any(words in problem for problem in problems), problems
