"""One replica group under torchft: `python -m tests.integrations.torchft_replica FOLDER REPLICA HOW [DIE]`.

torchft_job.py starts several, which train together until the step whose number stands in FOLDER/last_step. After every
step each writes a line to FOLDER/replica<r>.jsonl, at the end FOLDER/rank<r>.pt.

HOW is `ring` (ProcessGroupRing), `gloo` (torchft's own, to compare with), or `native`: a process group of torch's over
ring that can be reconfigured itself (torch 2.14). DIE is a number of replica groups: when so many
have made ten steps together, the process kills itself in its backward pass, while the others wait for it in their
all-reduce.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from ringdp.integrations import ProcessGroupRing
from tests.integrations import training

TIMEOUT = timedelta(seconds=30)
STEPS_BEFORE_DEATH = 10
PAUSE_S = 0.02  # what a step of a real model would take


def process_group(how: str) -> Any:
    if how != "native":
        return (ProcessGroupRing if how == "ring" else ProcessGroupGloo)(timeout=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    new_members: dict[str, Any] = {"enable_reconfigure": True}  # since torch 2.14
    dist.init_process_group("ring", store=store, rank=0, world_size=1, timeout=TIMEOUT, **new_members)
    return dist.group.WORLD


def last_step(folder: Path) -> int:
    try:
        return int((folder / "last_step").read_text())
    except FileNotFoundError:
        return sys.maxsize


def train(folder: Path, replica: int, how: str, die: int | None) -> None:
    model = training.build(seed=replica)  # other weights in each: torchft takes those of one
    inner = training.optimizer_of(model)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    group = process_group(how)
    manager = Manager(
        pg=group,
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
    )

    def perhaps_die(_: torch.Tensor) -> None:
        if together >= STEPS_BEFORE_DEATH and manager.num_participants() == die:
            time.sleep(10 * PAUSE_S)
            os.kill(os.getpid(), signal.SIGKILL)

    together = 0  # steps with all groups
    next(model.parameters()).register_hook(perhaps_die)  # DDP's own hook runs after it
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    with open(folder / f"replica{replica}.jsonl", "a", buffering=1) as lines:
        while (step := manager.current_step()) < last_step(folder):
            start = time.monotonic()
            optimizer.zero_grad()  # asks the lighthouse who takes part
            training.loss_of(ddp, *training.batch(step, replica)).backward()
            optimizer.step()
            together += manager.num_participants() == die
            line = {
                "pid": os.getpid(),
                "step": manager.current_step(),
                "committed": manager.current_step() > step,
                "participants": manager.num_participants(),
                "took_s": time.monotonic() - start,
                "ended_at": time.time(),
            }
            lines.write(json.dumps(line) + "\n")
            time.sleep(PAUSE_S)
    results = {
        "weights": training.weights(model),
        "momentum": [inner.state[parameter]["momentum_buffer"] for parameter in model.parameters()],
        "step": manager.current_step(),
        "backend": dist.get_backend() if how == "native" else group.getBackendName(),
    }
    torch.save(results, folder / f"rank{replica}.pt")
    manager.shutdown(wait=False)
    group.shutdown()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    folder, replica, how, *die = sys.argv[1:]
    torch.set_num_threads(1)
    train(Path(folder), int(replica), how, int(die[0]) if die else None)


if __name__ == "__main__":
    main()
