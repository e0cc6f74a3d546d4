"""ringrun --elastic: ranks die, the job ends well; and what it cannot go on without."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.fault.launch_jobs import ROOT, TORCHRUN, Job, script, unbroken, wait_until
from tests.helpers import free_port
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

TRAIN = """
    import os, pathlib, signal, sys, time
    import torch
    import ringdp

    ringdp.init()
    place, here = ringdp.rank(), pathlib.Path(__file__).parent
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Linear(10, 1))
    model.module.weight.register_hook(lambda _: (here / f"backward-{step}-{place}").touch())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(12):
        x = torch.full((4, 10), float(place + step))
        loss = model(x).square().mean()
        if step == 3 and place == 0:
            while len(list(here.glob("backward-3-*"))) < ringdp.world_size() - 1:
                time.sleep(0.01)  # until the others are in that step
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 6 and (place == 2 or "all" in sys.argv):
            raise ValueError("a sample of another size")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"place {place} is rank {ringdp.rank()} of {ringdp.world_size()}")
"""


IN_BACKWARD = """
    import time
    import torch
    import ringdp

    def refuse(gradient):
        raise ValueError("a gradient of another size")

    ringdp.init()
    place = ringdp.rank()
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.Linear(64, 6000)))
    for step in range(6):
        if step == 3 and place == 1:
            model.module[0].weight.register_hook(refuse)
        loss = model(torch.full((4, 10), float(place + step))).square().mean()
        if step == 3 and place != 1:
            time.sleep(1.0)  # the last layer's bucket of place 1 is in flight when its backward raises
        loss.backward()
        model.zero_grad()
    print(f"place {place} is rank {ringdp.rank()} of {ringdp.world_size()}")
"""


def run(jobs: list[Job], folder: Path, *arguments: str | Path) -> Job:
    job = Job(folder, *arguments)
    jobs.append(job)
    job.wait(60)
    return job


def test_a_killed_rank_and_one_that_raises_do_not_end_the_job(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "--elastic", "-n", "4", "--console", "all", script(tmp_path, TRAIN))
    assert job.process.returncode == 0, job.err
    assert re.search(
        r"ringrun: rank 0 on host \S+ was killed by SIGKILL .*; the other ranks go on without it; log:", job.err
    )
    assert "raised ValueError: a sample of another size; the other ranks go on without it" in job.err
    assert "takes the place" not in job.err  # its script lets nobody in
    assert re.search(
        r"ringrun: finished after .* and 12 steps without rank 0 \(SIGKILL\), rank 2 \(ValueError\), lost on the way,",
        job.err,
    )
    assert (
        len(
            re.findall(
                r"\[rank [123]\] ringdp: (?:rank \d: )?rank 0 \(host .*\) was lost .*as view 2; step 4 was made again",
                job.err,
            )
        )
        == 3
    )
    said = sorted(line.partition("] ")[2] for line in job.out.splitlines() if "place" in line)
    assert said == ["place 1 is rank 0 of 2", "place 3 is rank 1 of 2"]


STOPS = """
    import os, signal, time
    import torch
    import ringdp

    ringdp.init()
    place = ringdp.rank()
    model = ringdp.RingDP(torch.nn.Linear(10, 1))
    for step in range(6):
        loss = model(torch.full((4, 10), float(place + step))).square().mean()
        if step == 3 and place == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        loss.backward()
        model.zero_grad()
    print(f"place {place} is rank {ringdp.rank()} of {ringdp.world_size()}")
"""


def test_a_rank_that_is_stopped_for_longer_than_is_allowed_is_killed(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(
        jobs, tmp_path, "--elastic", "--evict-after", "1.5", "-n", "3", "--console", "all", script(tmp_path, STOPS)
    )
    assert job.process.returncode == 0, job.err
    assert re.search(
        r"ringrun: rank 1 on host \S+ was killed by SIGKILL \(it had been stopped for 1\.\d+ s: --evict-after 1\.5\);"
        r" the other ranks go on without it",
        job.err,
    ), job.err
    said = sorted(line.partition("] ")[2] for line in job.out.splitlines() if "place" in line)
    assert said == ["place 0 is rank 0 of 2", "place 2 is rank 1 of 2"]


def test_ranks_that_end_well_before_the_others_are_named(tmp_path: Path, jobs: list[Job]) -> None:
    """The others are not stopped, and the summary has their steps. The second rank ends without a word."""
    text = TRAIN.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)").replace("place == 2", "place == 1")
    text = text.replace('raise ValueError("a sample of another size")', "os._exit(0)")
    job = run(jobs, tmp_path, "--elastic", "-n", "3", script(tmp_path, text))
    assert job.process.returncode == 0, job.err
    without = r"without rank 0 \(exit code 0 after 3 steps\), rank 1 \(exit code 0\), lost on the way,"
    assert re.search(rf"finished after .* and 12 steps {without}", job.err), job.err


CAUSES = {
    "": "its program ended by ValueError: a gradient of another size",
    "ringdp.shutdown()": "its process group was destroyed",
    "torch.distributed.destroy_process_group()": "its process group was destroyed",
}


@pytest.mark.parametrize(
    "last",
    ["", *(pytest.param(call, marks=pytest.mark.ci) for call in list(CAUSES)[1:])],
    ids=["nothing", "shutdown", "destroy"],
)
def test_a_rank_that_raises_while_its_buckets_are_in_flight_is_lost_to_the_others(
    tmp_path: Path, jobs: list[Job], last: str
) -> None:
    """Also where a `finally` of the script ends the group."""
    text = textwrap.dedent(IN_BACKWARD)
    if last:
        head, training = text.split("for step in", 1)
        text = f"{head}try:\n{textwrap.indent('for step in' + training, '    ')}finally:\n    {last}\n"
    job = run(jobs, tmp_path, "--elastic", "-n", "3", "--console", "all", script(tmp_path, text))
    assert job.process.returncode == 0, job.err
    words = CAUSES[last]
    # A long line of the log is broken.
    assert (
        len(re.findall(rf"(?s)rank 1 \(host .*?\) was lost .*?{words}.*?step 4 was made again", unbroken(job.err))) == 2
    ), job.err
    said = sorted(line.partition("] ")[2] for line in job.out.splitlines() if "place" in line)
    assert said == ["place 0 is rank 0 of 2", "place 2 is rank 1 of 2"]


def test_a_rank_whose_compressor_raises_is_lost_to_the_others(tmp_path: Path, jobs: list[Job]) -> None:
    """Its next bucket is not sent in place of the one that has failed."""
    text = textwrap.dedent(IN_BACKWARD).replace("model.module[0].weight.register_hook(refuse)", "pass")
    compressor = """
        class Raises(ringdp.compression.TopK):
            def compress_with_residual(self, x, residual, info, room=None):
                if place == 1 and step == 3:
                    refuse(x)
                return super().compress_with_residual(x, residual, info, room)
    """
    head, training = text.split("torch.manual_seed(1)")
    text = head + textwrap.dedent(compressor) + "torch.manual_seed(1)" + training
    text = text.replace("Linear(64, 6000))", "Linear(64, 6000)), bucket_cap_mb=0.001, compression=Raises(0.1)")
    job = run(jobs, tmp_path, "--elastic", "-n", "3", "--console", "all", script(tmp_path, text))
    assert job.process.returncode == 0, job.err
    words = r"(?s)rank 1 \(host .*?\) was lost .*?a gradient of another size.*?step 4 was made again"
    assert len(re.findall(words, unbroken(job.err))) == 2, job.err


AS_A_PATH = """
    import json, os, signal, sys, traceback
    from pathlib import Path

    rank = int(os.environ["RANK"])
    told = [sys.argv, __name__, __file__, __spec__, sys.modules["__main__"].__dict__ is globals(), sys.path]
    Path(f"told-{rank}").write_text(json.dumps(told))
    if "elastic" in sys.argv:
        import torch
        import ringdp

        ringdp.init()
        model = ringdp.RingDP(torch.nn.Linear(10, 1))
        for step in range(6):
            if step == 3 and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(4, 10)).sum().backward()
            model.zero_grad()
    if rank == 1:
        raise ValueError("a label of another kind")
"""


def test_run_path_is_what_it_is_without_elastic(tmp_path: Path, jobs: list[Job]) -> None:
    """But for the processes, which can die one by one."""
    path = script(tmp_path, AS_A_PATH)
    told = []
    for flags, words in ([(), ("$a", "plain")], [("--elastic",), ("$a", "elastic")]):
        job = run(jobs, tmp_path, *flags, "-n", "3" if flags else "2", "--run-path", path, *words)
        assert job.process.returncode == (0 if flags else 1), job.err
        assert "rank 1 on host" in job.err
        assert "raised ValueError: a label of another kind" in job.err
        [error] = tmp_path.glob("logs/*/attempt_0/1/error.json")
        recorded = json.loads(error.read_text())["message"]
        stack = recorded["extraInfo"]["py_callstack"]
        told.append([json.loads((tmp_path / "told-1").read_text()), recorded["message"], stack])
        shutil.rmtree(tmp_path / "logs")
        assert told[-1][0][0].pop() == words[1]
    assert told[0] == told[1]
    without = r"without rank 0 \(SIGKILL\), rank 1 \(ValueError\)"
    assert re.search(rf"finished after .* and 6 steps {without}", job.err), job.err


def test_when_all_fail_the_job_has_failed(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "--elastic", "-n", "2", script(tmp_path, TRAIN), "all")
    assert job.process.returncode == 1
    assert re.search(r"ringrun: FAILED after .*: rank \d on host \S+ ", job.err)


TELLS = """
    import os, signal, time
    import torch
    import ringdp

    ringdp.init()
    place = ringdp.rank()
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Linear(10, 1))
    for step in range(9):
        loss = model(torch.full((4, 10), float(place + step))).square().mean()
        if (step, place) in DEATHS:
            time.sleep(0.5)  # the others have printed the step before
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        model.zero_grad()
        print(f"place {place} step {step}", end="\\r" if step % 2 else "\\n", flush=True)
"""


def shown(out: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", out) if "place" in line]


def test_the_next_rank_0_takes_the_console(tmp_path: Path, jobs: list[Job]) -> None:
    """As it comes, without a prefix, its progress too; and once more when that one dies."""
    text = TELLS.replace("DEATHS", "((3, 0), (6, 1))")
    job = run(jobs, tmp_path, "--elastic", "-n", "3", script(tmp_path, text))
    assert job.process.returncode == 0, job.err
    ranges = {0: range(3), 1: range(3, 6), 2: range(6, 9)}
    assert shown(job.out) == [f"place {place} step {step}" for place, steps in ranges.items() for step in steps]
    for rank, step, lost in ((1, 4, "0"), (2, 7, "1")):
        assert f"ringrun: rank {rank} is rank 0 from now on" in job.err
        assert re.search(rf"rank {lost} \(host .*\) was lost .*; step {step} was made again", unbroken(job.err)), (
            job.err
        )


def test_the_next_rank_0_of_another_node_takes_that_console(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, TELLS.replace("DEATHS", "((3, 0),)"))
    nodes = []
    where = f"--elastic --nnodes 2 -n 1 --local-addr 127.0.0.1 --master-addr 127.0.0.1 --master-port {free_port()}"
    for number in range(2):
        folder = tmp_path / f"output-{number}"
        folder.mkdir()
        nodes.append(Job(folder, *where.split(), "--node-rank", str(number), path))
        jobs.append(nodes[-1])
    for node in nodes:
        node.wait(60)
    assert nodes[1].process.returncode == 0, nodes[1].err
    assert shown(nodes[0].out) == [f"place 0 step {step}" for step in range(3)]
    assert shown(nodes[1].out) == [f"place 1 step {step}" for step in range(3, 9)]
    text = unbroken(nodes[1].err)
    assert re.search(r"rank 0 \(host .*\) was lost .*; step 4 was made again", text), text


UNDER_TORCHRUN = """
    import os, signal
    from pathlib import Path
    import torch
    import ringdp

    ringdp.init()
    place = ringdp.rank()
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        model(torch.full((4, 10), float(place + step))).square().mean().backward()
        if step == 3 and os.environ["GROUP_RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    bits = [value.hex() for value in model.module.weight[0].tolist()]
    path = Path(f"node-{os.environ['GROUP_RANK']}")
    path.with_suffix(".new").write_text(f"rank {ringdp.rank()} of {ringdp.world_size()} {bits}")
    path.with_suffix(".new").rename(path)
"""


@pytest.mark.slow
def test_torchrun_with_one_rank_on_each_node_goes_on_without_one(tmp_path: Path, jobs: list[Job]) -> None:
    """Its agents leave the ranks of other nodes alone. At the end they wait 300 s for the node that is gone, in torch's
    exit barrier: the test ends them before that."""
    path = script(tmp_path, UNDER_TORCHRUN)
    port = free_port()
    nodes: list[Job] = []
    for number in range(3):
        where = f"--nnodes 3 --nproc-per-node 1 --max-restarts 0 --node-rank {number} --local-addr 127.0.0.1"
        meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id one"
        folder = tmp_path / f"output-{number}"
        folder.mkdir()
        environ = {"RINGDP_ELASTIC": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        nodes.append(Job(folder, *where.split(), *meeting.split(), path, command=TORCHRUN, environ=environ))
        jobs.append(nodes[-1])
    ends = [nodes[number].folder / f"node-{number}" for number in (0, 1)]
    try:
        wait_until(lambda: all(end.exists() for end in ends), "the ranks that are left", 90)
    except AssertionError:
        raise AssertionError("\n".join(node.err for node in nodes)) from None
    said = [end.read_text().partition(" [") for end in ends]
    assert sorted(words for words, _, _ in said) == ["rank 0 of 2", "rank 1 of 2"]
    assert said[0][2] == said[1][2]  # the same weights, to the bit
    assert nodes[2].wait() == 1
    assert not (nodes[2].folder / "node-2").exists()
    for node in nodes[:2]:
        assert len(re.findall(r"rank \d \(host .*\) was lost .*; 2 of 3 ranks go on.*as view 2", node.err)) == 1, (
            node.err
        )


def test_a_rank_that_dies_before_all_have_met_ends_the_others(tmp_path: Path, jobs: list[Job]) -> None:
    text = "import os\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\nimport ringdp\nringdp.init()\n"
    job = run(jobs, tmp_path, "--elastic", "-n", "2", script(tmp_path, text))
    assert job.process.returncode == 1
    assert "ended with exit code 3" in job.err
