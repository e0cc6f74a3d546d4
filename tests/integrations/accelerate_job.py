"""What tests/integrations/test_accelerate.py runs: `python -m tests.integrations.accelerate_job FOLDER`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from torch.utils.data import DataLoader, TensorDataset

import ringdp
from ringdp import RingDP
from ringdp.errors import InvalidStateError
from ringdp.integrations import RingAccelerator, use_ringdp
from tests.integrations import training


def fresh(**arguments: Any) -> RingAccelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return RingAccelerator(**arguments)


def trained(accelerator: Accelerator, *, steps: int, clip: float | None = None) -> dict[str, Any]:
    """``steps`` optimizer steps; accumulation is whatever the accelerator was told."""
    micro_steps = steps * accelerator.gradient_accumulation_steps
    plain = training.build(seed=accelerator.process_index)
    model, optimizer = accelerator.prepare(plain, training.optimizer_of(plain))
    for index in range(micro_steps):
        with accelerator.accumulate(model):
            accelerator.backward(training.loss_of(model, *training.batch(index, accelerator.process_index)))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    wrapper = getattr(model, "_orig_mod", model)
    return {
        "weights": training.weights(plain),
        "wrapped": type(wrapper) is RingDP,
        "unwrapped": accelerator.unwrap_model(model, keep_torch_compile=False) is plain,
        "backend": dist.get_backend(),
        "processes": accelerator.num_processes,
        "reductions": wrapper.stats().steps,
        "hook": wrapper._get_ddp_logging_data().get("comm_hook"),
    }


def resumed(folder: Path) -> list[torch.Tensor]:
    accelerator = fresh()
    plain = training.build()
    model, optimizer = accelerator.prepare(plain, training.optimizer_of(plain))
    for index in range(2):
        one_step(accelerator, model, optimizer, index)
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    accelerator = fresh()
    another = training.build(seed=5)
    model, optimizer = accelerator.prepare(another, training.optimizer_of(another))
    accelerator.load_state(str(folder / "state"))
    one_step(accelerator, model, optimizer, 2)
    return training.weights(another)


def one_step(accelerator: Accelerator, model: Any, optimizer: Any, index: int) -> None:
    accelerator.backward(training.loss_of(model, *training.batch(index, accelerator.process_index)))
    optimizer.step()
    optimizer.zero_grad()


def scaled() -> dict[str, Any]:
    """With a gradient scaler: accelerate makes one on GPUs only, and takes the one it is given."""
    accelerator = fresh()
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    result = trained(accelerator, steps=3)
    plain = training.build()
    model, optimizer = accelerator.prepare(plain, training.optimizer_of(plain))
    loss = training.loss_of(model, *training.batch(0, accelerator.process_index))
    # An overflow on one rank alone: every rank must skip the step.
    accelerator.backward(loss * (float("inf") if accelerator.process_index == 1 else 1.0))
    optimizer.step()
    before_and_after = zip(training.weights(training.build()), training.weights(plain), strict=True)
    unchanged = all(torch.equal(before, after) for before, after in before_and_after)
    return {**result, "skipped": optimizer.step_was_skipped, "unchanged": unchanged, "scale": scaler.get_scale()}


def evaluated() -> list[int]:
    """Seven samples over two ranks in batches of two: the last batch is padded, gather_for_metrics leaves that out."""
    accelerator = fresh()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), batch_size=2))
    return [int(value) for (values,) in loader for value in accelerator.gather_for_metrics(values)]


def synchronised_late() -> list[torch.Tensor]:
    """Two forwards without synchronisation, and the second backward asked to do it after all."""
    accelerator = fresh()
    plain = training.build()
    model, optimizer = accelerator.prepare(plain, training.optimizer_of(plain))
    with accelerator.no_sync(model):
        losses = [training.loss_of(model, *training.batch(index, accelerator.process_index)) / 2 for index in range(2)]
    with accelerator.no_sync(model):
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
    optimizer.step()
    return training.weights(plain)


def existing_accelerator() -> dict[str, Any]:
    """`use_ringdp` on an Accelerator that found the group of ringdp.init."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return trained(use_ringdp(Accelerator(cpu=True), bucket_cap_mb=0.0001), steps=3)


def without_launcher_variables() -> dict[str, Any]:
    """As under srun or mp.spawn: the group exists and the environment does not say who is who."""
    names = [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE")) or name.startswith("MASTER_")]
    before = {name: os.environ.pop(name) for name in names}
    try:
        result = trained(fresh(), steps=1)
        return {**result, "left": [name for name in names if name in os.environ]}
    finally:
        os.environ.update(before)


def refusals() -> dict[str, str]:
    found = {}
    accelerator = fresh()
    accelerator.state.distributed_type = DistributedType.FSDP
    try:
        use_ringdp(accelerator)
    except InvalidStateError as error:
        found["fsdp"] = str(error)
    AcceleratorState._reset_state(reset_partial_state=True)
    ringdp.shutdown()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use_ringdp(Accelerator(cpu=True))
    found["gloo"] = " ".join(str(warning.message) for warning in caught)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    compiled = TorchDynamoPlugin(backend="eager")
    fp16 = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16, find_unused_parameters=True)
    results = {
        "trained": trained(fresh(gradient_accumulation_steps=3), steps=3, clip=0.5),
        "autocast": trained(fresh(mixed_precision="bf16"), steps=3),
        "compiled": trained(fresh(dynamo_plugin=compiled), steps=3),
        "hooked": trained(fresh(kwargs_handlers=[fp16]), steps=3),
        "scaled": scaled(),
        "resumed": resumed(folder),
        "evaluated": evaluated(),
        "late": synchronised_late(),
        "existing": existing_accelerator(),
        "unannounced": without_launcher_variables(),
        "refusals": refusals(),
    }
    torch.save(results, folder / f"rank{PartialState().process_index}.pt")


if __name__ == "__main__":
    main()
