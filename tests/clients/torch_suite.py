"""PyTorch's own distributed tests, as its wheel ships them, on any backend.

    python -m tests.clients.torch_suite --world-size 3                  # gloo, then ring, and what only gloo passes
    python -m tests.clients.torch_suite --backend ring -k barrier       # one backend, some tests
    python -m tests.clients.torch_suite --backend ring --outsider       # as a backend that the suite has never heard of
    python -m tests.clients.torch_suite --ddp ringdp -k ddp             # RingDP in DDP's place, beside DDP on gloo

The suite (`torch.testing._internal.distributed.distributed_test`) skips what a backend is not listed for, by comparing
its name with "gloo", "nccl" and "mpi". Here the name `ring` also equals "gloo" while the decorators look at it, so
every test that runs on gloo runs on ring; `--like mpi` does the same for the all-to-all tests, which are for MPI only.
Ranks are forked instead of spawned: importing torch for each rank of 300 tests would take most of an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any

from tests.clients.pretend_gpus import pretend_gpus
from tests.clients.swap_ddp import CHOICES, put_in_ddps_place

ROOT = Path(__file__).resolve().parents[2]
SUITE = "torch.testing._internal.distributed.distributed_test"
BACKENDS = ("gloo", "ring")
_log = logging.getLogger("torch_suite")
_BACKEND_LINE = 'BACKEND = os.environ["BACKEND"]\n'


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one test came to on one backend."""

    outcome: str  # passed, failed, skipped
    seconds: float
    text: str = ""  # why it was skipped, or the end of the traceback


class _Named(str):
    """A backend's name that also equals another one, whose tests are to run on it."""

    __slots__ = ("like",)
    like: str

    def __new__(cls, name: str, like: str) -> _Named:
        made = super().__new__(cls, name)
        made.like = like
        return made

    def __eq__(self, other: object) -> bool:
        return other in (str(self), self.like) if type(other) is str else str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.like)  # sets of names hold `like`

    def __str__(self) -> str:
        return str.__str__(self)


def load_suite(backend: str, like: str | None, ddp: str = "torch", gpus: bool = False) -> types.ModuleType:
    """The suite's module, imported for `backend`; its decorators take it for `like` where that is given.

    `ddp`: what it gets as DistributedDataParallel (tests/clients/swap_ddp.py).
    """
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import DistTestCases

    os.environ["BACKEND"] = backend
    if backend == "ring":
        import ringdp  # noqa: F401  (registers it)
    if gpus:
        pretend_gpus()
    put_in_ddps_place(ddp)
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    assert spec.loader is not None
    source: str = spec.loader.get_source(SUITE)  # type: ignore[attr-defined]
    assert source.count(_BACKEND_LINE) == 1, "this torch's suite reads its backend elsewhere"
    if backend == "ring":  # what the suite asks every backend from outside to be listed as
        for feature in ("ddp", "subgroup", "plugin"):
            DistTestCases.backend_feature[feature].add("ring")
    module = types.ModuleType(SUITE)
    module.__file__ = spec.origin
    module.__dict__["_ringdp_name"] = _Named(backend, like) if like else backend
    sys.modules[SUITE] = module
    source = source.replace(_BACKEND_LINE, "BACKEND = _ringdp_name\n")
    exec(compile(source, str(spec.origin), "exec", dont_inherit=True), module.__dict__)
    if backend == "ring":
        for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, name).append(dist.Backend("ring"))
    return module


def run_suite(
    backend: str,
    world_size: int,
    *,
    like: str | None,
    pattern: str,
    timeout_s: int,
    ddp: str = "torch",
    gpus: bool = False,
) -> dict[str, Verdict]:
    """Run the tests whose name contains one of `pattern`'s words on `world_size` forked ranks; verdicts by name."""
    with tempfile.TemporaryDirectory(prefix="ringdp-suite-") as folder:
        os.environ.update(
            WORLD_SIZE=str(world_size),
            TEMP_DIR=folder,
            INIT_METHOD=f"file://{folder}/init_dir/shared",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout_s),
            OMP_NUM_THREADS="1",
        )
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / name).mkdir()
        import torch

        torch.set_num_threads(1)  # forked ranks must not inherit a pool whose threads are gone
        module = load_suite(backend, like, ddp, gpus)
        case = _test_class(module)
        names = [name for name in unittest.TestLoader().getTestCaseNames(case) if _chosen(name, pattern)]
        out: dict[str, Verdict] = {}
        for index, name in enumerate(names):
            out[name] = verdict = run_one(case(name))
            _log.info("%3d/%d %s %s %.1f s", index + 1, len(names), verdict.outcome, name, verdict.seconds)
        return out


def _test_class(module: types.ModuleType) -> type[unittest.TestCase]:
    class TestOnForkedRanks(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined]
        def setUp(self) -> None:
            super().setUp()
            import torch

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            processes = self.processes
            super().tearDown()
            for process in processes:
                process.kill()
                process.join()

    return TestOnForkedRanks


def _chosen(name: str, pattern: str) -> bool:
    return not pattern or any(word in name for word in pattern.split(","))


class _Result(unittest.TestResult):
    """Remembers the one test's outcome."""

    verdict = ("passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.verdict = ("skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.verdict = ("failed", self._exc_info_to_string(err, test)[-4000:])  # type: ignore[attr-defined]

    addError = addFailure


def run_one(test: unittest.TestCase) -> Verdict:
    started = time.monotonic()
    result = _Result()
    type(test).setUpClass()
    test.run(result)
    return Verdict(result.verdict[0], time.monotonic() - started, result.verdict[1])


def run_apart(backend: str, world_size: int, *arguments: str, log: Path | None = None) -> dict[str, Verdict]:
    """`run_suite` in a process of its own: the suite reads the backend when it is imported."""
    with tempfile.TemporaryDirectory(prefix="ringdp-suite-") as folder:
        out = Path(folder) / "verdicts.json"
        command = [sys.executable, "-m", "tests.clients.torch_suite", "--backend", backend, "--json", str(out)]
        command += ["--world-size", str(world_size), *arguments]
        with open(log or os.devnull, "w") as output:
            subprocess.run(command, cwd=ROOT, check=True, stdout=output, stderr=subprocess.STDOUT)
        return {name: Verdict(**verdict) for name, verdict in json.loads(out.read_text()).items()}


def only_on_gloo(gloo: dict[str, Verdict], ring: dict[str, Verdict]) -> dict[str, Verdict]:
    """What ring did with the tests that gloo passes and ring does not."""
    return {
        name: ring[name]
        for name, verdict in gloo.items()
        if verdict.outcome == "passed" and ring[name].outcome != "passed"
    }


def count(verdicts: dict[str, Verdict], outcome: str) -> int:
    return sum(verdict.outcome == outcome for verdict in verdicts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own distributed tests on ring, beside gloo")
    parser.add_argument("--backend", choices=BACKENDS, help="run on this one only (default: both, compared)")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("-k", default="", metavar="WORDS", help="only tests whose name contains one of these (a,b,c)")
    parser.add_argument("--like", default="gloo", help="whose tests to run: gloo's, or mpi's with -k all_to_all")
    parser.add_argument("--ddp", choices=CHOICES, default="torch", help="what the suite gets as DDP")
    parser.add_argument("--pretend-gpus", action="store_true", help="run what asks for GPUs on CPU tensors")
    parser.add_argument("--outsider", action="store_true", help="ring as the suite treats an unknown backend")
    parser.add_argument("--timeout", type=int, default=60, metavar="S", help="for one test")
    parser.add_argument("--json", type=Path, help="write the verdicts here (with --backend)")
    parser.add_argument("--logs", type=Path, help="folder for what the tests print (without --backend)")
    arguments = parser.parse_args()
    common = ["-k", arguments.k, "--like", arguments.like, "--timeout", str(arguments.timeout)]
    if arguments.outsider:
        common.append("--outsider")
    if arguments.backend is None:
        return _compare(arguments.world_size, common, arguments.logs)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    like = None if arguments.outsider else arguments.like
    verdicts = run_suite(
        arguments.backend,
        arguments.world_size,
        like=like,
        pattern=arguments.k,
        timeout_s=arguments.timeout,
        ddp=arguments.ddp,
        gpus=arguments.pretend_gpus,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({name: dataclasses.asdict(v) for name, v in verdicts.items()}, indent=1))
    print(", ".join(f"{count(verdicts, outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")))
    return 0


def _compare(world_size: int, arguments: list[str], logs: Path | None) -> int:
    found = {}
    for backend in BACKENDS:
        log = logs / f"{backend}{world_size}.log" if logs else None
        found[backend] = run_apart(backend, world_size, *arguments, log=log)
    missing = only_on_gloo(found["gloo"], found["ring"])
    for name, verdict in missing.items():
        print(f"--- {name}: {verdict.outcome}\n{verdict.text}")
    for backend, verdicts in found.items():
        print(
            backend, ", ".join(f"{count(verdicts, outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
        )
    print(f"only gloo passes: {sorted(missing) or 'nothing'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
