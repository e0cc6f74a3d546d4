"""What compression="auto" decides, on links and codecs that are made up: no clock, no network."""

from __future__ import annotations

import random

import pytest

from ringdp.ddp.compression.tuner import EXACT, Bucket, Line, LinkCosts, Step, Tuner, format_choice, proposal

NEAR = ("bf16", "int8")
BITS = {EXACT: 32.0, "bf16": 16.0, "int8": 8.13, "int4": 4.25, "topk": 0.5}


class World:
    """Two hosts, a backward of `compute_s` in which ten buckets get ready one after the other.

    `coding_ns` is what codes cost per element on the way, whatever the link; `noise` is of step times.
    """

    def __init__(self, gbit: float, compute_s: float = 0.1, numel: int = 1_000_000, noise: float = 0.0) -> None:
        self.gbit, self.compute_s, self.numel, self.noise = gbit, compute_s, numel, noise
        self.coding_ns = {EXACT: 0.0, "bf16": 0.5, "int8": 0.4, "int4": 0.5, "topk": 1.5}
        self.lies: dict[str, float] = {}  # how much slower codes are in steps than when they are measured
        self.random = random.Random(0)
        self.buckets = 10

    def lines(self, honest: bool = False) -> dict[str, Line]:
        found = {}
        for level, bits in BITS.items():
            per_element = max(bits / self.gbit, self.coding_ns[level]) * (self.lies.get(level, 1.0) if honest else 1.0)
            found[level] = Line(200e-6, per_element * 1e-9)
        return found

    def step(self, choice: tuple[str, ...]) -> Step:
        lines, now = self.lines(honest=True), 0.0
        launches = [self.compute_s * (i + 1) / self.buckets for i in range(self.buckets)]
        for launched, level in zip(launches, choice, strict=True):
            now = max(now, launched) + lines[level].seconds(self.numel)
        waits = max(now - self.compute_s, 0.0)
        first = launches[0]
        buckets = tuple(Bucket(self.numel, launched - first) for launched in launches)
        seconds = (self.compute_s + waits) * (1 + self.noise * self.random.uniform(-1, 1))
        return Step(seconds, waits, self.compute_s - first, buckets)

    def probe_s(self, levels: tuple[str, ...]) -> float:
        return sum(self.lines()[level].seconds(300_000) for level in (EXACT, *levels))


def drive(tuner: Tuner, world: World, windows: int, steps: int = 8) -> float:
    """Seconds that all of it took, links measured included."""
    total = 0.0
    for _ in range(windows):
        step = world.step(tuner.choice)
        total += step.seconds * steps
        tuner.window(step, steps)
        if tuner.wants_probe:
            total += world.probe_s(tuner.levels)
            tuner.measured(LinkCosts(world.lines()), world.probe_s(tuner.levels))
    return total


def tuner_for(levels: tuple[str, ...], world: World) -> Tuner:
    return Tuner(levels, world.buckets)


def exact_s(world: World, windows: int, steps: int = 8) -> float:
    return sum(world.step((EXACT,) * world.buckets).seconds * steps for _ in range(windows))


def test_a_slow_link_gets_the_shortest_code_that_is_allowed() -> None:
    world = World(gbit=0.1)
    for levels in [NEAR, (*NEAR, "int4"), (*NEAR, "int4", "topk")]:
        tuner = tuner_for(levels, world)
        drive(tuner, world, 6)
        assert levels[-1] in tuner.choice
        assert not {EXACT, *levels[:-2]} & set(tuner.choice)


def test_nothing_is_compressed_that_need_not_be() -> None:
    for world in [World(gbit=10), World(gbit=1, compute_s=5.0)]:
        tuner = tuner_for((*NEAR, "int4", "topk"), world)
        drive(tuner, world, 20)
        assert set(tuner.choice) == {EXACT}


def test_only_as_much_is_lost_as_the_speed_needs() -> None:
    """The first buckets' gradients travel while others are computed: a milder code does for them."""
    world = World(gbit=1, compute_s=0.12)
    tuner = tuner_for(NEAR, world)
    drive(tuner, world, 6)
    assert {"int8"} < set(tuner.choice)
    order = [EXACT, *NEAR]
    uniform = world.step(("int8",) * 10).seconds
    assert world.step(tuner.choice).seconds <= uniform * 1.011
    assert sum(order.index(level) for level in tuner.choice) < 2 * 10


def test_a_link_is_followed_up_and_down() -> None:
    world = World(gbit=0.1, compute_s=0.3, noise=0.01)
    tuner = tuner_for((*NEAR, "int4"), world)
    drive(tuner, world, 10)
    assert set(tuner.choice) == {"int4"}
    world.gbit = 1
    drive(tuner, world, 60)
    assert EXACT in tuner.choice
    assert set(tuner.choice) != {EXACT}
    world.gbit = 10
    drive(tuner, world, 100)
    assert set(tuner.choice) == {EXACT}
    world.gbit = 1
    drive(tuner, world, 10)
    assert set(tuner.choice) != {EXACT}
    world.gbit = 0.1
    drive(tuner, world, 10)
    assert set(tuner.choice) == {"int4"}


def test_what_breaks_its_promise_is_taken_back() -> None:
    world = World(gbit=1, compute_s=0.1)
    world.lies = {"bf16": 4.0, "int8": 8.0}
    tuner = tuner_for(NEAR, world)
    reasons = []
    for _ in range(30):
        drive(tuner, world, 1)
        reasons.append(tuner.reason)
    assert set(tuner.choice) == {EXACT}
    back = [reason for reason in reasons if reason.startswith("back to exact")]
    assert 1 <= len(back) <= 4, reasons  # each is tried once or twice, then seldom


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize(("gbit", "compute_s"), [(10, 0.1), (10, 0.02), (2, 0.3), (1, 2.0)])
def test_it_is_never_much_slower_than_exact(gbit: float, compute_s: float, noise: float) -> None:
    world = World(gbit, compute_s, noise=noise)
    world.lies = {"bf16": 1.5, "int8": 3.0}
    took = drive(tuner_for(NEAR, world), world, 40)
    assert took <= exact_s(World(gbit, compute_s, noise=noise), 40) * 1.02


def test_measuring_links_takes_little_of_a_run() -> None:
    world = World(gbit=1, noise=0.02)
    tuner = tuner_for(NEAR, world)
    probes = 0
    for _ in range(200):
        tuner.window(world.step(tuner.choice), 8)
        if tuner.wants_probe:
            probes += 1
            tuner.measured(LinkCosts(world.lines()), world.probe_s(NEAR))
    spent = probes * world.probe_s(NEAR)
    assert spent <= 0.012 * 200 * 8 * world.step(tuner.choice).seconds


def test_noise_does_not_make_it_change_its_mind() -> None:
    world = World(gbit=1, compute_s=0.12, noise=0.05)
    tuner = tuner_for(NEAR, world)
    changes = 0
    for _ in range(150):
        before = tuner.choice
        drive(tuner, world, 1)
        changes += tuner.choice != before
    assert changes <= 6


def test_buckets_that_are_not_free_stay_as_they_are() -> None:
    world = World(gbit=0.1)
    step = world.step((EXACT,) * 10)
    buckets = tuple(Bucket(b.numel, b.launched_s, free=i != 3) for i, b in enumerate(step.buckets))
    step = Step(step.seconds, step.exposed_s, step.computed_s, buckets)
    found, promise = proposal(step, LinkCosts(world.lines()), NEAR, (EXACT,) * 10)
    assert found[3] == EXACT
    assert found[4] == "int8"
    assert promise < step.seconds


def test_coding_on_busy_cores_counts() -> None:
    world = World(gbit=3, compute_s=0.1)
    step = world.step((EXACT,) * 10)
    idle, _ = proposal(step, LinkCosts(world.lines()), NEAR, (EXACT,) * 10)
    busy, _ = proposal(step, LinkCosts(world.lines(), {"bf16": 50e-9, "int8": 50e-9}), NEAR, (EXACT,) * 10)
    assert set(idle) != {EXACT}
    assert set(busy) == {EXACT}


def test_reasons_are_one_line_with_numbers() -> None:
    world = World(gbit=1)
    tuner = tuner_for(NEAR, world)
    tuner.window(world.step(tuner.choice), 8)
    assert tuner.wants_probe
    tuner.measured(LinkCosts(world.lines()), 0.01)
    assert "\n" not in tuner.reason
    assert "int8" in tuner.reason
    assert "1.00 Gbit/s" in tuner.reason
    assert format_choice((EXACT, EXACT)) == "exact for all buckets"
