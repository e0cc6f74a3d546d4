"""What each rank of churn.py does: train until it is killed or told to end, and write down what counts for it.

The gradients are whole numbers that follow from the rank's place (its rank at the start) and the step, so their exact
mean over any members can be computed elsewhere; the first one is 2 to the place, so the mean says whose it is. In the
kinds with samples the last parameter is a ledger, with an element for each sample and each place. Its mean says which
samples the step has, of which ranks, whatever the sampler and the log say.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SHAPES = ((90, 300), (1,), (64, 500), (301,), (7, 3), (20_000,))
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {},
    "units": {},  # a mean of metrics in each step, and checkpoints
    "samples": {"weight": "samples"},
    "int8": {"compression": "int8"},
    "reproducible": {"reproducible": True},
}
EXACT = ("plain", "micro-batches", "units", "reproducible")
"""Of these the mean is compared to the bit with one that is computed from the members."""
SAVE_EVERY = 10
ASK_EVERY = 4
LAUNCHER = "CHURN_LAUNCHER"
"""Environment variable: 0: the launcher of the job; otherwise which of those that join it."""
SAMPLES, BATCH = 600, 20
"""Of an epoch, and of a step."""
PLACES = 400
"""Of a job in which ranks come."""
MICRO_EVERY = 5  # steps of topk, of which one has two batches
ROUND_STEPS = 6
STOP_AFTER = 5  # rounds
WITH_JOB = ("job", "job-rounds", "job-quorum")
CODES = {"rounds": "int8", "rounds-int4": "int4"}


def coefficients(place: int, step: int) -> list[Tensor]:
    """The gradients of that rank in that step, before the mean."""
    generator = torch.Generator().manual_seed(100_003 * step + place)
    made = [torch.randint(-8, 9, shape, generator=generator).float() for shape in SHAPES]
    made[0].view(-1)[0] = 2.0**place
    return made


def samples_of(place: int, step: int) -> int:
    return 1 + (place + step) % 3


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def entry(place: int, samples: Sequence[int], share: float = 1.0) -> Tensor:
    """The gradient of the ledger, of a rank with these samples."""
    ledger = torch.zeros(SAMPLES + PLACES)
    ledger[SAMPLES + place] = 1.0
    for sample in samples:
        ledger[sample] += share
    return ledger


def listed(ledger: Tensor) -> tuple[str, str]:
    """The samples of a mean, each as often as it is in there, and the places."""
    samples = ledger[:SAMPLES]
    found = samples.nonzero().reshape(-1).tolist()
    least = min((samples[one].item() for one in found), default=1.0)
    times = [one for one in found for _ in range(round(samples[one].item() / least))]
    return " ".join(map(str, times)), " ".join(map(str, ledger[SAMPLES:].nonzero().reshape(-1).tolist()))


def projection(tensors: Sequence[Tensor]) -> float:
    """A number that is linear in the elements, and to which each of them counts."""
    total = 0.0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).double()
        total += float(flat @ torch.cos(torch.arange(len(flat), dtype=torch.float64)))
    return total


class Functional(nn.Module):
    """Its gradients are what it is given; `x` has as many rows as the batch has samples."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in (*SHAPES, *shapes)])

    def gradients(self) -> list[Tensor]:
        return [part.grad for part in self.parts if part.grad is not None]

    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:
        parts = [(part * one).sum() for part, one in zip(self.parts, given, strict=True)]
        return torch.stack(parts).sum() + 0 * x.sum()


class Record(logging.Handler):
    """Lines of a file, each written at once: a rank that is killed leaves what counted for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.DEBUG)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *words: object) -> None:
        os.write(self._file, ("\t".join(map(str, words)) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.DEBUG and text.startswith("view ") and isinstance(record.args, tuple):
            self.write("view", record.args[0], record.args[1])
        elif "lost" in text or text.startswith("epoch "):
            self.write("line", text.replace("\n", " "))

    def step(self, number: int, size: int, first: float, gradients: str, parameters: str) -> None:
        counts = count_of("fd"), count_of("task")
        self.write("step", number, size, first.hex(), gradients, parameters, time.time(), *counts)


def count_of(folder: str) -> int:
    """ "fd": the descriptors that this process has; "task": its threads."""
    return len(os.listdir(f"/proc/self/{folder}"))


def raises(number: int, frame: object) -> NoReturn:
    raise ValueError("a sample of another size")


class Run:
    """Of this process, whose record has this name."""

    def __init__(self, folder: Path, pause_s: float, name: str) -> None:
        self.folder, self.name = folder, name
        self._pause_s = pause_s
        self.record = Record(folder / f"record-{name}")
        self.record.write("started", os.getpid(), os.environ.get(LAUNCHER, 0), time.time())

    def train(self, kind: Callable[[Run], None]) -> None:
        import ringdp

        logging.getLogger("ringdp").addHandler(self.record)
        logging.getLogger("ringdp.elastic").setLevel(logging.DEBUG)  # it says who is in each view
        ringdp.init(device="cpu", timeout=60)
        kind(self)
        self.record.write("ends", time.time())
        ringdp.shutdown()

    def begins(self) -> None:
        self.record.write("begins", os.getpid(), time.time())

    def is_over(self, step: int) -> bool:
        """Behind each step, on all ranks."""
        import ringdp

        if step % ASK_EVERY == 0 and ringdp.metrics.mean(float((self.folder / "stop").exists())) > 0:
            return True
        time.sleep(self._pause_s)
        return False

    def ends_at(self, round_: int) -> bool:
        """As `is_over`, where ranks are at steps of their own: from the round on that the first one says."""
        time.sleep(self._pause_s)
        path = self.folder / "stop-at"
        if (self.folder / "stop").exists() and not path.exists():
            made = path.with_name(f"stop-at-{os.getpid()}")
            made.write_text(str(round_ + STOP_AFTER))
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        return path.exists() and round_ >= int(path.read_text())


def train(kind: str, run: Run) -> None:
    import ringdp
    from ringdp import checkpoint

    module, place = Functional(), ringdp.rank()
    model = ringdp.RingDP(module, bucket_cap_mb=0.1, **PLAIN[kind])
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
    run.begins()
    step = 0
    while True:
        given = coefficients(place, step)
        x = torch.ones(samples_of(place, step), 1)
        if kind == "micro-batches":
            halves = [[one * 0.25 for one in given], [one * 0.75 for one in given]]
            with model.no_sync():
                model(x, halves[0]).backward()
            model(x, halves[1]).backward()
        else:
            model(x, given).backward()
        gradients = module.gradients()
        first, grads = gradients[0].view(-1)[0].item(), digest(gradients)
        optimizer.step()
        optimizer.zero_grad()
        run.record.step(step, ringdp.world_size(), first, grads, digest(list(module.parts)))
        if kind == "units":
            run.record.write("mean", step, ringdp.metrics.mean(float(step)))
            if step % SAVE_EVERY == 0:
                checkpoint.save(run.folder / "checkpoints", step, {"model": model.state_dict()})
        step += 1
        if run.is_over(step):
            break


def ahead_by(batches: int, drawn: Iterator[list[int]]) -> Iterator[list[int]]:
    """As a DataLoader with workers draws: so many batches before they are used."""
    kept: deque[list[int]] = deque()
    for one in drawn:
        kept.append(one)
        if len(kept) > batches:
            yield kept.popleft()
    yield from kept


def train_top_k(run: Run) -> None:
    """With error feedback, and micro-batches in some steps, of samples that a BalancedSampler splits."""
    import ringdp
    from ringdp.data import BalancedSampler

    module, place = Functional((SAMPLES + PLACES,)), ringdp.rank()
    rules: Any = [(f"parts.{len(SHAPES)}", None)]  # the ledger is exact
    model = ringdp.RingDP(module, bucket_cap_mb=0.1, compression=ringdp.Compression("topk", rules))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
    sampler = BalancedSampler(SAMPLES, BATCH, seed=3)
    sampler.watch(model)
    run.begins()
    step = epoch = 0
    while True:
        batches = ahead_by(place % 3, iter(sampler))
        for mine in batches:
            given = coefficients(place, step)
            parts = [mine]
            if step % MICRO_EVERY == 0 and (second := next(batches, None)) is not None:
                parts.append(second)
            run.record.write("batch", step, epoch, " ".join(str(one) for part in parts for one in part))
            for part in parts:
                share = [*(one / len(parts) for one in given), entry(place, part)]
                with contextlib.nullcontext() if part is parts[-1] else model.no_sync():
                    model(torch.ones(len(part), 1), share).backward()
            *gradients, ledger = module.gradients()
            samples, places = listed(ledger)
            members = [int(one) for one in places.split()]
            grads, sent = digest([*gradients, ledger]), projection(gradients)
            optimizer.step()
            optimizer.zero_grad()
            run.record.write("ledger", step, epoch, samples, places)
            run.record.write("owed", step, projection(given), owed(model), sent)
            first = sum(2.0**one for one in members) / max(len(members), 1)
            run.record.step(step, ringdp.world_size(), first, grads, digest(list(module.parts)))
            step += 1
            if run.is_over(step):
                return
        epoch += 1


def owed(model: Any) -> float:
    """The projection of this rank's residuals; small parameters are sent exactly, and have none."""
    (entries,) = model.compression_state_dict()["ranks"].values()
    return projection([it["residual"] for it in entries.values() if "residual" in it])


def train_job(run: Run) -> None:
    """Ranks that come and go (`ringdp.elastic.Job`)."""
    import ringdp
    from ringdp.job import elastic

    group: Any = torch.distributed.group.WORLD
    module = Functional((SAMPLES + PLACES,))
    model = ringdp.RingDP(module, bucket_cap_mb=0.1, weight="samples")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    job = ringdp.elastic.Job(model, optimizer)
    job.audit(run.folder / f"audit-{os.getpid()}")
    job.on_change(lambda it: run.record.write("change", it.step, it.now, it.lost, it.left, it.joined, it.seconds))
    loader = job.loader(TensorDataset(torch.arange(SAMPLES)), BATCH)
    run.begins()
    for epoch in job.epochs(1_000_000):
        for (mine,) in loader:
            places = elastic.places(group)
            place, weight = places[group.rank()], len(mine)
            given = [*coefficients(place, job.step), entry(place, mine.tolist(), 1 / weight)]
            model(torch.ones(weight, 1), given).backward()
            gradients = module.gradients()
            samples, of_places = listed(gradients[-1])
            grads = digest(gradients)
            optimizer.step()
            optimizer.zero_grad()
            states = [value for it in module.parts for value in optimizer.state[it].values()]
            run.record.write("ledger", job.step, epoch, samples, of_places)
            run.record.step(job.step, group.size(), 0.0, grads, digest([*module.parts, *states]))
            if run.is_over(job.step):
                job.close()
                return


def train_job_of_rounds(run: Run) -> None:
    """The same with rounds of steps that each rank makes alone. The ledger's mean says which samples a round has."""
    import ringdp
    from ringdp.job import elastic

    group: Any = torch.distributed.group.WORLD
    module = Functional((SAMPLES + PLACES,))
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    rounds = ringdp.DiLoCo(module, optimizer, every=ROUND_STEPS, outer={"lr": 1.0, "momentum": 0.0})
    job = ringdp.elastic.Job(rounds, optimizer)
    job.on_change(lambda it: run.record.write("change", it.step, it.now, it.lost, it.left, it.joined, it.seconds))
    loader = job.loader(TensorDataset(torch.arange(SAMPLES)), BATCH)
    counted, total = rounds.counted, torch.zeros(SAMPLES + PLACES)
    run.begins()
    for epoch in job.epochs(1_000_000):
        for (mine,) in loader:
            place = elastic.places(group)[group.rank()]
            with rounds.global_parameters():
                total = module.parts[-1].detach().clone()
            given = [*(one / 1024 for one in coefficients(place, job.step)), entry(place, mine.tolist())]
            module(torch.ones(len(mine), 1), given).backward()
            optimizer.step()
            optimizer.zero_grad()
            with rounds.global_parameters():
                now, bits = module.parts[-1].detach().clone(), digest(list(module.parts))
            if rounds.counted != counted:
                counted = rounds.counted
                members = elastic.places(group, counted[1])
                times = ((total - now)[:SAMPLES] * len(members)).round().int().tolist()
                samples = [sample for sample, often in enumerate(times) for _ in range(often)]
                run.record.write(
                    "ledger", rounds.round, epoch, " ".join(map(str, samples)), " ".join(map(str, members))
                )
            run.record.step(job.step, group.size(), 0.0, "", bits)
            if run.is_over(job.step):
                job.close()
                return


def train_job_with_quorum(run: Run) -> None:
    """Rounds that end without late ranks; what is recorded are turns, and the global parameters after them."""
    import ringdp
    from ringdp.job import elastic

    group: Any = torch.distributed.group.WORLD
    module = Functional()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    rounds = ringdp.DiLoCo(module, optimizer, every=ROUND_STEPS, quorum=0.5, grace=0.2, compression="int4")
    job = ringdp.elastic.Job(rounds, optimizer)
    job.on_change(lambda it: run.record.write("change", it.step, it.now, it.lost, it.left, it.joined, it.seconds))
    run.begins()
    last = -1
    for number in job.rounds(1_000_000):
        if number != last:
            last = number
            with rounds.global_parameters():
                turn, bits = rounds.turn, digest(list(module.parts))
            run.record.step(turn, group.size(), 0.0, "", bits)
        if run.ends_at(number):
            break
        place = elastic.places(group)[group.rank()]
        given = [one / 1024 for one in coefficients(place, job.step)]
        module(torch.ones(1, 1), given).backward()
        optimizer.step()
        optimizer.zero_grad()
    rounds.finish()
    rounds.detach()
    job.close()


def train_rounds(code: str, run: Run) -> None:
    """DiLoCo over two sites, whose ranks average their gradients."""
    import ringdp
    from ringdp.job import elastic

    place = ringdp.rank()
    world: Any = torch.distributed.group.WORLD
    run.record.write("site", os.environ.setdefault("RINGDP_SITE", str(place % 2)))
    inside, between = ringdp.levels()
    module = Functional()
    model = ringdp.RingDP(module, process_group=inside, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
    rounds = ringdp.DiLoCo(model, optimizer, every=ROUND_STEPS, compression=code, process_group=between)
    run.begins()
    step = 0
    while True:
        model(torch.ones(1, 1), coefficients(place, step)).backward()
        gradients = module.gradients()
        first, grads = gradients[0].view(-1)[0].item(), digest(gradients)
        before = rounds.round
        optimizer.step()
        optimizer.zero_grad()
        run.record.step(step, ringdp.world_size(), first, grads, digest(list(module.parts)))
        if rounds.round != before:
            with rounds.global_parameters():
                members = elastic.places(world)
                run.record.write("round", rounds.round, digest(list(module.parts)), " ".join(map(str, members)))
        step += 1
        if run.is_over(step):
            return


KINDS: dict[str, Callable[[Run], None]] = {
    **{kind: functools.partial(train, kind) for kind in PLAIN},
    "topk": train_top_k,
    "job": train_job,
    "job-rounds": train_job_of_rounds,
    "job-quorum": train_job_with_quorum,
    **{kind: functools.partial(train_rounds, code) for kind, code in CODES.items()},
}


def main() -> None:
    folder, kind, pause_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    run = Run(folder, pause_s, str(os.getpid()) if kind in WITH_JOB else os.environ["RANK"])
    stacks = open(folder / f"stacks-{run.name}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    signal.signal(signal.SIGUSR1, raises)
    torch.set_num_threads(1)
    try:
        run.train(KINDS[kind])
    except SystemExit as ended:
        run.record.write("left", ended.code)
        raise


if __name__ == "__main__":
    main()
