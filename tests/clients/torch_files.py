"""Files of PyTorch's test/distributed, which its wheel does not have, with RingDP in DDP's place and ring in gloo's.

    python -m tests.clients.torch_files --source ~/pytorch/test/distributed    # DDP, then RingDP, on gloo
    python -m tests.clients.torch_files --source ... --backend ring --ddp ringdp -k checkpoint      # one run

`FILES` says which classes are about DDP. Every backend's name in them becomes the one that is asked for, what asks for
GPUs runs on CPU tensors (tests/clients/pretend_gpus.py), ranks are forked.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

from tests.clients.pretend_gpus import pretend_gpus
from tests.clients.swap_ddp import CHOICES, put_in_ddps_place
from tests.clients.torch_suite import ROOT, Verdict, count, run_one

FILES = {
    "test_c10d_gloo.py": ("DistributedDataParallelTest",),
    "test_c10d_nccl.py": ("DistributedDataParallelTest",),
    "test_c10d_pypg.py": ("TestDDPWithWorkSubclass", "TestDDPWithWorkWrapper"),
    "test_c10d_spawn_gloo.py": ("DistributedDataParallelSingleProcessTest",),
    "algorithms/test_join.py": ("TestJoin",),
    "algorithms/ddp_comm_hooks/test_ddp_hooks.py": ("DistributedDataParallelCommHookTest",),
    "_composable/test_replicate.py": ("ReplicateStateDictTest", "ReplicateTest"),
    "optim/test_zero_redundancy_optimizer.py": ("TestZeroRedundancyOptimizerDistributed",),
    "checkpoint/test_state_dict.py": ("TestStateDict",),
}
# About the backend, not about DDP; in the place of gloo, whose name is in the class's.
BACKEND_FILES = {"test_c10d_fault_tolerance.py": ("{backend}FaultToleranceTest",)}
_log = logging.getLogger("torch_files")


def load(source: Path, file: str, backend: str) -> types.ModuleType:
    """The test file as a module, for `backend` in the place of gloo and nccl."""
    text = (source / file).read_text()
    for name in ("gloo", "nccl"):
        text = text.replace(f'"{name}"', f'"{backend}"')
    text = text.replace("backend.create_device(interface=LOOPBACK)", "pass")
    text = text.replace("c10d.is_nccl_available()", "True").replace("dist.is_nccl_available()", "True")
    name = Path(file).stem
    module = types.ModuleType(name)
    module.__file__ = str(source / file)
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


def prepare(source: Path, backend: str, ddp: str, timeout_s: int) -> None:
    """Patch torch's test helpers; before any of the files is loaded."""
    os.environ.update(DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(timeout_s), OMP_NUM_THREADS="1", BACKEND=backend)
    import torch

    torch.set_num_threads(1)  # forked ranks must not inherit a pool whose threads are gone
    from torch.testing._internal import common_distributed

    def fork(self: common_distributed.MultiProcessTestCase) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]
    for name in ("requires_gloo", "requires_nccl"):
        setattr(common_distributed, name, lambda: lambda function: function)
    if backend == "ring":
        import ringdp  # noqa: F401  (registers it)
    pretend_gpus()
    torch.cuda.nccl.version = lambda: (2, 20)
    put_in_ddps_place(ddp)
    for folder in (source, *(source / Path(file).parent for file in FILES)):
        sys.path.insert(0, str(folder))


def run_files(source: Path, pattern: str, backend: str) -> dict[str, Verdict]:
    import torch.distributed as dist

    out: dict[str, Verdict] = {}
    for file, classes in {**FILES, **BACKEND_FILES}.items():
        if not (source / file).exists():
            continue
        try:
            module = load(source, file, backend)
        except Exception as error:  # written for another torch
            out[Path(file).stem] = Verdict("failed", 0.0, f"cannot be loaded: {error!r}")
            continue
        for name in (name.format(backend=backend.capitalize()) for name in classes):
            case = getattr(module, name)
            for test in unittest.TestLoader().getTestCaseNames(case):
                key = f"{Path(file).stem}.{name}.{test}"
                if pattern and not any(word in key for word in pattern.split(",")):
                    continue
                out[key] = verdict = run_one(case(test))
                if dist.is_initialized():  # by a test without processes of its own
                    dist.destroy_process_group()
                _log.info("%s %s %.1f s", verdict.outcome, key, verdict.seconds)
    return out


def run_apart(source: Path, backend: str, ddp: str, *arguments: str, log: Path | None = None) -> dict[str, Verdict]:
    """`run_files` in a process of its own: what it patches stays patched."""
    with tempfile.TemporaryDirectory(prefix="ringdp-files-") as folder:
        out = Path(folder) / "verdicts.json"
        command = [sys.executable, "-m", "tests.clients.torch_files", "--source", str(source), "--backend", backend]
        command += ["--ddp", ddp, "--json", str(out), *arguments]
        with open(log or os.devnull, "w") as output:
            subprocess.run(command, cwd=ROOT, check=True, stdout=output, stderr=subprocess.STDOUT)
        return {name: Verdict(**verdict) for name, verdict in json.loads(out.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own DDP tests from its repository, with RingDP")
    parser.add_argument("--source", type=Path, required=True, help="PyTorch's test/distributed")
    parser.add_argument("--backend", choices=("gloo", "ring"), default="gloo")
    parser.add_argument("--ddp", choices=CHOICES, help="run with this one only (default: torch's and ours, compared)")
    parser.add_argument("-k", default="", metavar="WORDS", help="only tests whose name contains one of these (a,b,c)")
    parser.add_argument("--timeout", type=int, default=30, metavar="S", help="for one test")
    parser.add_argument("--json", type=Path, help="write the verdicts here (with --ddp)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    source = arguments.source.resolve()
    if arguments.ddp is None:
        common = ["-k", arguments.k, "--timeout", str(arguments.timeout)]
        theirs = run_apart(source, "gloo", "torch", *common)
        ours = run_apart(source, arguments.backend, "ringdp", *common)
        missing = {name: ours[name] for name in theirs if theirs[name].outcome == "passed" != ours[name].outcome}
        for name, verdict in missing.items():
            print(f"--- {name}: {verdict.outcome}\n{verdict.text}")
        print(f"DDP passes {count(theirs, 'passed')}, RingDP {count(ours, 'passed')}; only DDP: {sorted(missing)}")
        return 1 if missing else 0
    prepare(source, arguments.backend, arguments.ddp, arguments.timeout)
    verdicts = run_files(source, arguments.k, arguments.backend)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: dataclasses.asdict(v) for name, v in verdicts.items()}, indent=1))
    print(", ".join(f"{count(verdicts, outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")))
    return 0


if __name__ == "__main__":
    importlib.import_module("tests.clients.torch_suite")
    sys.exit(main())
