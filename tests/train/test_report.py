"""RingDP's report and timeline on real ranks: the slow one is named, everything adds up, nothing is disturbed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ringdp.__main__ import main
from ringdp.errors import InvalidStateError, MismatchError, PeerLostError
from tests.helpers import logged
from tests.train.harness import RankFailed, default_group, on_ranks, run_ranks

SLEEP_S = 0.03


class Sleeper(torch.autograd.Function):
    """Sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        return self.layers(Sleeper.apply(x.requires_grad_(), self.backward_s))


def steps(model: Any, optimizer: Any, count: int, between_s: float = 0.0) -> None:
    for _ in range(count):
        time.sleep(between_s)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


def made() -> tuple[Any, Any, SlowModule]:
    import ringdp

    module = SlowModule()
    model = ringdp.RingDP(module)
    return model, torch.optim.SGD(model.parameters(), 0.01), module


def name_the_slow_rank() -> list[tuple[Any, ...]]:
    rank, found = default_group().rank(), []
    for phase in ("forward", "backward", "between"):
        model, optimizer, module = made()
        if rank == 1 and phase != "between":
            setattr(module, f"{phase}_s", SLEEP_S)
        with logged("ringdp.report") as lines:
            steps(model, optimizer, 12, SLEEP_S if rank == 1 and phase == "between" else 0.0)
            report = model.report()
        verdict, row = report.verdict, report.ranks[0]
        parts = row.between_s + row.forward_s + row.backward_s + row.optimizer_s
        rest = row.step_s - parts - row.peer_wait_s - row.link_wait_s - row.exposed_s
        found.append((phase, verdict.kind, verdict.rank, verdict.phase, row.waits_for, abs(rest), lines, str(report)))
    return found


def test_a_slow_rank_is_named_after_ten_steps_on_all_ranks_and_rank_0_says_it_once() -> None:
    for rank, found in enumerate(run_ranks(name_the_slow_rank, world_size=3, backend="ring")):
        for phase, kind, slow, where, waits_for, rest, lines, text in found:
            assert (kind, slow, where, waits_for) == ("rank", 1, phase, 1), text
            assert rest < 1e-6, text
            assert len(lines) == (rank == 0), lines
            assert "Rank 1 (host " in text
            assert "ring" in text or "fold" in text, text  # what reduced its buckets
    assert "is not computing. Rank 1" in found[0][6][0] if rank == 0 else True


@on_ranks()
def test_nothing_is_told_under_join_and_it_goes_on_after_it() -> None:
    """Ranks with inputs of different number, then together again."""
    model, optimizer, _ = made()
    steps(model, optimizer, 7)
    with Join([model]):
        steps(model, optimizer, 4 + 3 * default_group().rank())
    steps(model, optimizer, 12)
    assert model.stats().steps == 7 + 4 + 3 * default_group().rank() + 12
    assert model.report().step == 7 + 4 + 3  # the tenth of those outside


@on_ranks()
def test_the_last_step_of_a_model_that_is_gone_has_its_metrics(tmp_path: Path) -> None:
    from ringdp.diagnosis.records import step_records

    def main() -> None:
        model, optimizer, _ = made()
        steps(model, optimizer, 5)

    folder = tmp_path / str(default_group().rank())
    step_records.cache_clear()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # which nobody asks: the ranks have met
    with mock.patch.dict(os.environ, {"RINGDP_METRICS_DIR": str(folder), **where}):
        main()
        gc.collect()
        records = step_records()
        assert records is not None
        records.close()
    step_records.cache_clear()
    (file,) = folder.glob("rank_*.jsonl")
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5]


def end_at(count: int) -> None:
    """And leave at once, by the harness: nothing of the report may be under way."""
    model, optimizer, _ = made()
    steps(model, optimizer, count)


def test_a_job_may_end_after_any_step() -> None:
    for count in (9, 10, 10, 11, 11, 12):
        run_ranks(end_at, count, world_size=3, backend="ring")


def tell_ahead_of_buckets() -> list[tuple[str, int, list[tuple[int, int]]]]:
    """Of each backward that told: the algorithm, how many flows, and how much later its buckets began and ended, ns."""
    from ringdp import _C

    model, optimizer, _ = made()
    before = max((one.number for one in _C.operations()), default=0)
    steps(model, optimizer, 52)
    names = {one["number"]: one["name"] for one in _C.algorithms()}
    ran = [one for one in _C.operations() if one.number > before and one.ended_ns]
    found = []
    for at, one in enumerate(ran):
        if one.name.startswith("step report"):
            buckets = itertools.takewhile(lambda after: after.name.startswith("bucket "), ran[at + 1 :])
            behind = [(after.queued_ns - one.queued_ns, after.ended_ns - one.ended_ns) for after in buckets]
            found.append((names[one.algorithm], len(one.flows), behind))
    return found


def test_what_ranks_tell_each_other_leaves_before_the_buckets_and_is_over_before_them() -> None:
    """A message straight to each rank, so no bucket, whose bytes come behind it on the same links, is later for it."""
    ranks = 3
    for told in run_ranks(tell_ahead_of_buckets, world_size=ranks, backend="ring"):
        assert len(told) == 3  # at steps 11, 31, 51
        for algorithm, flows, buckets in told:
            assert (algorithm, flows) == ("exchange", 2 * (ranks - 1))
            assert buckets
            assert all(queued > 0 and ended >= 0 for queued, ended in buckets), buckets


def train_on(every: str, step: int) -> None:
    with mock.patch.dict(os.environ, RINGDP_REPORT_EVERY=every):
        model, optimizer, _ = made()
    steps(model, optimizer, 28)
    report = model.report()
    assert (report.step, report.verdict is None) == (step, step == 0)


@pytest.mark.parametrize("backend, every, step", [("ring", "0", 0), ("ring", "5", 25), ("gloo", "20", 0)])
def test_how_often_is_a_setting_and_other_backends_have_none(backend: str, every: str, step: int) -> None:
    run_ranks(train_on, every, step, backend=backend)


def make_timeline(path: str) -> None:
    import ringdp

    model, optimizer, module = made()
    steps(model, optimizer, 2)
    module.backward_s = SLEEP_S * default_group().rank()
    with ringdp.timeline(path):
        steps(model, optimizer, 5)
    steps(model, optimizer, 1)


def test_the_timeline_has_all_ranks_on_one_clock_with_arrows_from_senders_to_receivers(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_ranks(make_timeline, str(path), world_size=3, backend="ring")
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {event["name"] for event in events}
    assert {"forward", "backward", "optimizer", "between steps (data loading)", "bucket 0 ready"} <= names
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    assert {pid for pid, _ in slices} == {0, 1, 2}
    for track in slices.values():  # nothing overlaps
        track.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(track))
    assert sum(event["name"] == "backward" for event in events) == 3 * 5
    assert all(isinstance(arrow, int) and 0 <= arrow < 1 << 53 for arrow in arrows)  # Perfetto drops all others
    both = [pair for pair in arrows.values() if len(pair) == 2]
    assert len(both) >= 0.9 * len(arrows) > 0
    assert all(pair["s"]["ts"] <= pair["f"]["ts"] + 1 and pair["s"]["pid"] != pair["f"]["pid"] for pair in both)
    for pair in both:  # Perfetto ties an end to the slice around it
        for end in pair.values():
            assert any(first - 0.01 <= end["ts"] <= last + 0.01 for first, last in slices[end["pid"], end["tid"]])
    waits = [event for event in events if event["name"] == "wait for rank 2" and event["pid"] != 2]
    assert max(event["dur"] for event in waits) > 0.5e6 * SLEEP_S
    now_us = time.time() * 1e6 - trace["baseTimeNanoseconds"] / 1e3
    assert 0 < now_us - max(last for track in slices.values() for _, last in track) < 60e6


def end_a_timeline_alone(folder: str) -> list[str]:
    """Rank 1's block raises what its script catches; later a block ends after the process group."""
    import ringdp

    rank = int(os.environ["RANK"])
    dist.init_process_group("ring", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, optimizer, _ = made()
    late = ringdp.timeline(f"{folder}/late.json").start()
    with logged("ringdp.timeline") as lines, contextlib.suppress(KeyError, MismatchError, PeerLostError):
        with ringdp.timeline(f"{folder}/run.json"):
            steps(model, optimizer, 2)
            if rank == 1:
                raise KeyError(rank)
        raise AssertionError("rank 0 cannot have gathered anything")
    if rank == 1:
        with contextlib.suppress(MismatchError, PeerLostError):
            steps(model, optimizer, 1)  # where rank 0 gathers
    dist.destroy_process_group()
    late.stop()
    with pytest.raises(InvalidStateError):
        late.start()
    return lines


def test_a_timeline_that_ends_without_the_others_is_kept_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run_ranks(end_a_timeline_alone, str(tmp_path), world_size=2, backend=None)
    for rank, lines in enumerate(told):
        assert [f"run.json.rank_{rank:05d}; python -m ringdp timeline" in line for line in lines] == [True]
    for name in ("run", "late"):
        files = sorted(tmp_path.glob(f"{name}.json.rank_*"))
        assert main(["timeline", *map(str, files), "-o", str(tmp_path / "merged.json")]) == 0
        assert "events of 2 ranks" in capsys.readouterr().out
        events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events if event["name"] == "backward"} == {0, 1}
    assert main(["timeline", str(tmp_path), "-o", str(tmp_path / "merged.json")]) == 1
    assert "are both of rank 0: give one file of each rank" in capsys.readouterr().err


def time_coding(path: str, transport: str) -> None:
    import ringdp

    rank = int(os.environ["RANK"])
    with mock.patch.dict(os.environ, RINGDP_TRANSPORT=transport):
        dist.init_process_group("ring", init_method=f"file://{path}/store", rank=rank, world_size=3)
    for number, compression in enumerate((None, "int8")):
        model = ringdp.RingDP(nn.Linear(512, 512), compression=compression)
        with ringdp.timeline(f"{path}/{number}.json"):
            for _ in range(3):
                model(torch.randn(4, 512)).square().mean().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_timeline_has_what_is_computed_on_the_bytes(transport: str, tmp_path: Path) -> None:
    run_ranks(time_coding, str(tmp_path), transport, world_size=3, backend=None)
    for number, words in enumerate((("reduce",), ("encode", "decode"))):
        events = json.loads((tmp_path / f"{number}.json").read_text())["traceEvents"]
        for word in words:
            found = [one for one in events if one["ph"] == "X" and one["name"].startswith(f"{word} ")]
            found = [one for one in found if "last bytes" not in one["name"]]
            # Codes of each peer in each step, in however small pieces. A sum of few bytes at a time is not recorded.
            least = 1 if word == "reduce" else 2 * 3
            assert all(sum(one["pid"] == rank for one in found) >= least for rank in range(3)), word
            for one in found:
                assert 2 <= one["args"]["working_us"] <= one["dur"] + 1, one


@on_ranks()
def test_torchs_profiler_shows_bucket_algorithm_and_peers_waiting_apart_from_moving() -> None:
    from torch.profiler import ProfilerActivity, profile

    model, optimizer, _ = made()
    steps(model, optimizer, 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        steps(model, optimizer, 1)
    names = [event.name for event in profiler.events()]
    for verb in ("move", "wait"):
        [name] = [name for name in names if name.startswith(f"ringdp {verb} bucket 0: ")]
        assert f"(fold, 64 KiB, rank {1 - default_group().rank()})" in name


def tell_in_another_form() -> None:
    from ringdp.ddp import step_report

    if default_group().rank() == 1:
        step_report.REPORT_FORM -= 1  # type: ignore[attr-defined]  # as a build of another release has it
    made()


def test_builds_whose_reports_differ_are_refused_before_the_first_step() -> None:
    with pytest.raises(RankFailed, match=r"step report is every 20 steps, form .*RINGDP_REPORT_EVERY=0 on all ranks"):
        run_ranks(tell_in_another_form, world_size=2, backend="ring")
