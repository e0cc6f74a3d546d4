"""Jobs whose ranks come and go: processes that the tests start one by one, and what they tell."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import ringdp
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit
from tests.fault.rank_jobs import shared_memory

SAMPLES = 72
BATCH = 12
LIMIT_S = 30.0

Plan = Callable[["Jobs"], None]


def net(width: int = 24, norm: str = "BatchNorm1d") -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, width), getattr(torch.nn, norm)(width), torch.nn.Linear(width, 3))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, torch.randn(SAMPLES, 3, generator=generator))


class Trained:
    """What a rank trains, by a RingDP, or by the `rounds` of a DiLoCo."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.module = net(*options.get("net", ()))
        self.together: Any
        self.model: Any
        if "rounds" in options:
            self.model = self.module
            self.optimizer = torch.optim.Adam(self.module.parameters(), 0.01)
            self.together = ringdp.DiLoCo(self.module, self.optimizer, **options["rounds"])
        else:
            given = {"weight": "samples", **options.get("ringdp", {})}
            self.model = self.together = ringdp.RingDP(self.module, **given)
            self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.of_rounds = "rounds" in options
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 500)

    def fingerprint(self) -> str:
        """Of what all ranks have alike: not of the buffers, which are rank 0's from the next forward on. All ranks."""
        out = hashlib.sha256()
        if self.of_rounds:
            self.together.state_dict()  # waits for what is on its way
        with self.together.global_parameters() if self.of_rounds else contextlib.nullcontext():
            for parameter in self.module.parameters():
                state = {} if self.of_rounds else self.optimizer.state[parameter]
                for tensor in (parameter, *(it for _, it in sorted(state.items()))):
                    out.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return out.hexdigest()

    def owed(self) -> float:
        """Of what codes owe to the mean, a number that is linear in it. All ranks."""
        parts = self.together.state_dict(consolidated=True)["parameters"]
        residuals = [it["residual"].double() for it in parts.values() if "residual" in it]
        return float(sum((it * torch.cos(torch.arange(len(it), dtype=torch.float64))).sum() for it in residuals))

    def save(self, path: Path) -> None:
        """All ranks; with rounds each its own state."""
        parts: dict[str, Any] = {"model": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
        parts |= {"rounds": self.together} if self.of_rounds else {}
        state = {name: part.state_dict() for name, part in parts.items()}
        if self.of_rounds or ringdp.rank() == 0:
            torch.save(state, self._file(path))

    def load(self, path: Path) -> None:
        state = torch.load(self._file(path), weights_only=True)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.of_rounds:
            self.together.load_state_dict(state["rounds"])

    def _file(self, path: Path) -> Path:
        return path.with_suffix(f".{ringdp.rank()}.pt" if self.of_rounds else ".pt")


class Book:
    """What a process tells: a line of JSON for each event."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "pid": os.getpid(), **fields}) + "\n")


def train(folder: str, epochs: int, options: Mapping[str, Any]) -> None:
    """One rank, from the start or joining; `options`: ringdp (RingDP's arguments), rounds (DiLoCo's, in place of a
    RingDP), accumulate, message (the steps at which Message begins and ends), loader, job, net (its arguments), step_s,
    validate (a second loader), audit."""
    book = Book(Path(folder))
    logging.getLogger("ringdp").addHandler(_Told(book))
    ringdp.init(device="cpu")
    trained = Trained(options)
    model, optimizer = trained.model, trained.optimizer
    job = ringdp.elastic.Job(trained.together, optimizer, trained.scheduler, **options.get("job", {}))
    if "quorum" in options.get("rounds", {}):
        train_turns(Path(folder), book, trained, job, options)
        return
    loader = job.loader(data(), BATCH, **options.get("loader", {}))
    validation: Any = job.loader(data(), BATCH // 2, shuffle=False) if options.get("validate") else []

    @job.on_change
    def changed(it: Any) -> None:
        book.write(
            "change",
            step=it.step,
            now=it.now,
            lost=it.lost,
            left=it.left,
            joined=it.joined,
            seconds=it.seconds,
            print="" if it.lost and trained.of_rounds else trained.fingerprint(),
            owed=trained.owed() if options.get("owed") and not it.lost else None,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=len(shared_memory()),
        )
        if not it.lost:
            trained.save(Path(folder) / f"state_{it.step}_{it.now}")

    job.audit(options.get("audit") or Path(folder) / f"audit_{os.getpid()}.jsonl")
    every = options.get("accumulate", 1)
    message = Message(options["message"]) if "message" in options else None
    for epoch in job.epochs(epochs or 10_000):
        for number, (_, x, y) in enumerate(loader):
            book.write("begins", step=job.step + 1, rank=ringdp.rank(), ranks=ringdp.world_size())
            with contextlib.nullcontext() if (number + 1) % every == 0 else model.no_sync():
                torch.nn.functional.mse_loss(model(x), y).backward()
            if (number + 1) % every == 0:
                optimizer.step()
                trained.scheduler.step()
                optimizer.zero_grad()
            if options.get("owed") and job.step == trained.together.ended_at:
                book.write("owed", step=job.step, now=ringdp.world_size(), owed=trained.owed())
            if message is not None and message.passed(job.step):
                book.write("message", step=job.step)
            time.sleep(options.get("step_s", 0.0))
            if (Path(folder) / f"leave_{os.getpid()}").exists():
                job.leave("a file says so")
        seen = 0
        for _, x, _ in validation:
            model.eval()
            with torch.no_grad():
                seen += len(model(x))
            model.train()
            time.sleep(options.get("step_s", 0.0))
        book.write("epoch", epoch=epoch, validated=seen, ranks=ringdp.world_size())
        if epochs == 0 and _finishes(Path(folder)):
            break
    job.close()
    book.write("end", step=job.step, ranks=ringdp.world_size(), print=trained.fingerprint())
    trained.save(Path(folder) / "last")


def train_turns(folder: Path, book: Book, trained: Trained, job: Any, options: Mapping[str, Any]) -> None:
    """As `train`, by rounds with a quorum; each rank draws samples of its own. Until the round that the file "finish"
    says."""
    rounds, (_, x, y) = trained.together, data().tensors
    draw = torch.Generator().manual_seed(os.getpid())

    @job.on_change
    def changed(it: Any) -> None:
        book.write("change", now=it.now, lost=it.lost, left=it.left, joined=it.joined, seconds=it.seconds)

    last = -1
    for number in job.rounds(10_000):
        later = 1 if options.get("closes_first") and ringdp.rank() > 0 else 0
        if (folder / "finish").exists() and number >= later + int((folder / "finish").read_text() or "0"):
            break
        book.write("begins", step=number, rank=ringdp.rank(), ranks=ringdp.world_size())
        mine = torch.randint(SAMPLES, (4,), generator=draw)
        torch.nn.functional.mse_loss(trained.model(x[mine]), y[mine]).backward()
        trained.optimizer.step()
        trained.scheduler.step()
        trained.optimizer.zero_grad()
        with rounds.global_parameters():  # the turn does not change meanwhile
            turn = rounds.turn
            if turn != last:
                totals = b"".join(it.detach().numpy().tobytes() for it in trained.module.parameters())
                book.write("turn", turn=turn, print=hashlib.sha256(totals).hexdigest())
        last = turn
        time.sleep(options.get("step_s", 0.0))
        still = options.get("still", {})
        if still and (number, ringdp.rank()) == (still["step"], still["rank"]):
            book.write("still")
            while not (folder / still["until"]).exists():
                time.sleep(0.02)
        if (folder / f"leave_{os.getpid()}").exists():
            job.leave("a file says so")
    if options.get("closes_first") and ringdp.rank() == 0:
        job.close()
        time.sleep(1.0)  # others end a turn meanwhile
    rounds.finish()
    rounds.detach()
    job.close()
    book.write("end", step=rounds.round, ranks=ringdp.world_size(), print=trained.fingerprint())


class Message:
    """From rank 0 to rank 1, who waits for it from one step to another: an operation outside units in flight."""

    def __init__(self, steps: tuple[int, int]) -> None:
        self._begin, self._end = steps
        self._received = torch.zeros(4)
        self._work: Any = None

    def passed(self, step: int) -> bool:
        """Behind each step, on all ranks."""
        rank = ringdp.rank()
        if step == self._begin and rank == 1:
            self._work = torch.distributed.irecv(self._received, 0)
        if step == self._end and rank == 0:
            torch.distributed.send(torch.full((4,), 7.0), 1)
        if step != self._end or self._work is None:
            return False
        self._work.wait()
        assert self._received.tolist() == [7.0] * 4
        return True


def _finishes(folder: Path) -> bool:
    """Whether a rank sees that the test lets the job end after this epoch."""
    group = torch.distributed.group.WORLD
    assert group is not None
    seen = bytes([(folder / "finish").exists()])
    return b"\1" in as_unit(group, "the question for the end", lambda: all_gather_bytes(seen, group, room=1))


class _Told(logging.Handler):
    def __init__(self, book: Book) -> None:
        super().__init__()
        self._book = book

    def emit(self, record: logging.LogRecord) -> None:
        self._book.write("log", level=record.levelname, text=record.getMessage())


def _process(
    environ: dict[str, str], folder: str, epochs: int, options: dict[str, Any], before: Callable[[], None] | None
) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        if before is not None:
            before()
        train(folder, epochs, options)
    except SystemExit:
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        Book(Path(folder)).write("error", type=type(error).__name__, text=str(error), trace=text)
        os._exit(1)


class Jobs:
    """The processes of one job; this process is their launcher, with the store."""

    def __init__(self, folder: Path, epochs: int = 0, **options: Any) -> None:
        """`epochs`: 0: until `finish`."""
        self.folder, self._epochs, self._options = folder, epochs, options
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "ringdp.elastic", "ringdp._C", __name__])
        self._context = context
        self.processes: list[Any] = []
        secret = folder / "secret"
        secret.write_text("ab" * 32)
        secret.chmod(0o600)
        self.environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "RINGDP_ELASTIC": "1"}
        self.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.environ |= {"RINGDP_SECRET_FILE": str(secret), "RINGDP_REPORT_EVERY": "0"}

    def start(self, ranks: int) -> None:
        for rank in range(ranks):
            self._add({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})

    def join(self, before: Callable[[], None] | None = None, environ: Mapping[str, str] = {}, **options: Any) -> int:
        """Start a newcomer; its pid. `before`: called in it first; `options`: of its own."""
        joins = {"RINGDP_JOIN": f"127.0.0.1:{self.store.port}"}
        return self._add(joins | dict(environ), before, self._options | options)

    def _add(
        self,
        environ: dict[str, str],
        before: Callable[[], None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> int:
        common = {name: it for name, it in self.environ.items() if "RINGDP_JOIN" not in environ or "RINGDP_" in name}
        arguments = (common | environ, str(self.folder), self._epochs, dict(options or self._options), before)
        process = self._context.Process(target=_process, args=arguments)
        process.start()
        self.processes.append(process)
        return int(process.pid or 0)

    def events(self, kind: str = "", pid: int = 0) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.folder.glob(f"{pid or '[0-9]*'}.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # half a line
                    found.append(json.loads(line))
        return [it for it in found if kind in ("", it["kind"])]

    def until(self, what: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        end = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < end, f"it did not come to that: {self.story()}"
            time.sleep(0.02)
        return found

    def until_step(self, step: int) -> None:
        self.until(lambda: any(it["step"] >= step for it in self.events("begins")))

    def until_ranks(self, ranks: int) -> None:
        """Until a step begins with so many."""

        def there() -> bool:
            begun = self.events("begins")
            newest = max((it["step"] for it in begun), default=0)
            return any(it["ranks"] == ranks for it in begun if it["step"] == newest)

        self.until(there)

    def leave(self, pid: int) -> None:
        (self.folder / f"leave_{pid}").touch()

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def pids(self) -> list[int]:
        return [int(it.pid) for it in self.processes if it.is_alive()]

    def code(self, pid: int) -> int | None:
        [process] = [it for it in self.processes if it.pid == pid]
        process.join(LIMIT_S)
        code: int | None = process.exitcode
        return code

    def finish(self) -> None:
        newest = max((it["step"] for it in self.events("begins")), default=0)
        temporary = self.folder / "finish.new"
        temporary.write_text(str(newest + 3))  # where the file counts rounds
        temporary.rename(self.folder / "finish")

    def wait(self, *, dead: Mapping[int, int] = {}) -> list[dict[str, Any]]:
        """Until all have ended, `dead` with these codes and the others well. Returns their last events."""
        self.finish()
        for process in self.processes:
            process.join(LIMIT_S)
            assert process.exitcode == dead.get(int(process.pid), 0), self.story()
        return self.events("end")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def story(self) -> str:
        lines = [str(it.get("trace") or it) for it in self.events() if it["kind"] not in ("begins", "epoch")]
        return "\n".join(lines[-60:])

    # What has to hold.

    def _check_turns(self) -> None:
        """All ranks have the same global parameters after each turn that several saw, and at the end."""
        prints = defaultdict(set)
        for it in self.events("turn"):
            prints[it["turn"]].add(it["print"])
        assert prints, self.story()
        for turn, found in prints.items():
            assert len(found) == 1, (turn, self.story())
        assert len({it["print"] for it in self.events("end")}) == 1, self.story()

    def check_replicas(self) -> None:
        """After each change, and at the end, all ranks have the same bits; with a quorum after each turn."""
        if "quorum" in self._options.get("rounds", {}):
            self._check_turns()
            return
        prints = defaultdict(set)
        for it in self.events("change") + self.events("end"):
            if not it.get("lost"):
                prints[it["kind"], it["step"], it.get("now", it.get("ranks"))].add(it["print"])
        assert prints, self.story()
        for where, found in prints.items():
            assert len(found) == 1, (where, self.story())

    def batches(self) -> dict[int, dict[int, list[int]]]:
        """By step and place, the samples that the rank was given in the last view in which it began the step."""
        found: dict[int, dict[int, tuple[int, list[int]]]] = defaultdict(dict)
        for path in self.folder.glob("audit_*.jsonl"):
            for line in path.read_text().splitlines():
                it = json.loads(line)
                found[it["step"]][it["place"]] = (it["view"], it["samples"])
        newest = {step: max(view for view, _ in by_place.values()) for step, by_place in found.items()}
        return {
            step: {place: samples for place, (view, samples) in sorted(by_place.items()) if view == newest[step]}
            for step, by_place in sorted(found.items())
        }

    def check_each_sample_once(self) -> None:
        """For jobs that have lost no rank."""
        epochs = max(it["epoch"] for it in self.events("epoch")) + 1
        counts: Counter[int] = Counter()
        for by_place in self.batches().values():
            counts.update(sample for samples in by_place.values() for sample in samples)
        assert counts == dict.fromkeys(range(SAMPLES), epochs)


def scripted(state: str | None, steps: list[list[list[int]]], options: Mapping[str, Any]) -> str:
    """One rank of a job without elasticity that makes these steps: by step and rank, the samples. Its fingerprint."""
    trained = Trained(options)
    if state is not None:
        trained.load(Path(state))
    _, x, y = data().tensors
    for by_rank in steps:
        mine = by_rank[ringdp.rank()]
        torch.nn.functional.mse_loss(trained.model(x[mine]), y[mine]).backward()
        trained.optimizer.step()
        trained.scheduler.step()
        trained.optimizer.zero_grad()
    return trained.fingerprint()
