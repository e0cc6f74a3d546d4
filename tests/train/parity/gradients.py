"""What the table's scripts do to gradients and with autograd, and which optimizers use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.train import models
from tests.train.parity.run import Run
from tests.train.parity.scripts import mean, sgd, train

# What happens to .grad between steps: for train(before=…) and train(after=…).


def none_on_some(run: Run, model: Any, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if index % 3 == step % 3:
            parameter.grad = None


def zero_in_place(run: Run, model: Any, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            parameter.grad.zero_() if index % 2 else parameter.grad.mul_(0)


def halve_by_another(run: Run, model: Any, step: int) -> None:
    """Other tensors in the place of some gradients."""
    for index, parameter in enumerate(model.parameters()):
        if index % 2:
            parameter.grad = parameter.grad * 0.5


def own_start(run: Run, model: Any, step: int) -> None:
    """A gradient of the user's, another on every rank, which backward adds to."""
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, sum(rank + 1 for rank in run.parts) / len(run.parts))


def other_layout(run: Run, model: Any, step: int) -> None:
    """The user's gradients lie in memory in another order than the parameters."""
    for parameter in model.parameters():
        shape = parameter.shape[::-1]
        parameter.grad = torch.full(shape, 0.25 * sum(rank + 1 for rank in run.parts) / len(run.parts)).permute(
            *reversed(range(len(shape)))
        )


def shared_memory(run: Run, model: Any, step: int) -> None:
    """All gradients are views of the user's own flat tensor."""
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    offset = 0
    for parameter in model.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()


def keep_gradients(run: Run, model: Any, step: int) -> None:
    """Gradients of earlier steps stay what they were, though their parameters got others."""
    kept = model.__dict__.setdefault("kept_gradients", [])
    for gradient, values in kept:
        assert torch.equal(gradient, values)
    kept.extend((p.grad, p.grad.clone()) for p in model.parameters())


def detach_in_place(run: Run, model: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad.detach_()
        parameter.grad.add_(0.01)


def clip(run: Run, model: Any, step: int, *, norm: float | None = 0.1) -> None:
    if norm is None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    else:
        run.keep("norm", nn.utils.clip_grad_norm_(model.parameters(), norm))


# autograd.


def autograd_grad(run: Run, model: Any) -> None:
    """torch.autograd.grad before and after the backward that averages; it gives this rank's own."""
    optimizer = sgd(run, model)
    parameters = list(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for gradient in (torch.autograd.grad(loss, parameters) for loss in run.losses(model, step + 10)):
            run.keep("gradient", gradient[0])
        for loss in run.losses(model, step):
            run.keep("gradient", torch.autograd.grad(loss, parameters, retain_graph=True)[-1])
            loss.backward(retain_graph=True)
            run.keep("gradient", torch.autograd.grad(loss, parameters[2])[0])
        optimizer.step()


def gradient_penalty(run: Run, model: Any) -> None:
    """The norm of the inputs' gradient is part of the loss."""
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.parts:
            x, y = models.batch(step, rank)
            x.requires_grad_()
            value = nn.functional.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            ((value + slope.pow(2).sum()) / len(run.parts)).backward()
            run.keep("slope", x.grad)
        optimizer.step()


def backward_create_graph(run: Run, model: Any) -> None:
    train(run, model, steps=2)
    model.zero_grad()
    run.backward(model, 5, create_graph=True)
    for parameter in model.parameters():
        assert parameter.grad.requires_grad
        parameter.grad = parameter.grad.detach()


def inner_steps(run: Run, model: Any) -> None:
    """Second-order meta-learning: a step on copies of the parameters, the loss behind it differentiated through it."""
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.parts:
            x, y = models.batch(step, rank)
            value = nn.functional.cross_entropy(model(x), y)
            names = [name for name, _ in model.named_parameters()]
            slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
            fast = {
                name: parameter - 0.1 * slope
                for name, parameter, slope in zip(names, model.parameters(), slopes, strict=True)
            }
            x, y = models.batch(step + 10, rank)
            output = torch.func.functional_call(model, fast, (x,))
            (nn.functional.cross_entropy(output, y) / len(run.parts)).backward()
        optimizer.step()


def functional_call(run: Run, model: Any) -> None:
    """The wrapper called with its own parameters handed in."""
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.parts:
            x, y = models.batch(step, rank)
            output = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
            (nn.functional.cross_entropy(output, y) / len(run.parts)).backward()
        optimizer.step()


def input_gradients(run: Run, model: Any) -> None:
    """The inputs' gradients are local, and so are those of what comes before the model."""
    before = nn.Linear(12, 12)
    optimizer = sgd(run, model)
    for step in range(3):
        optimizer.zero_grad()
        for rank in run.parts:
            x, y = models.batch(step, rank)
            x.requires_grad_()
            (nn.functional.cross_entropy(model(torch.tanh(before(x))), y) / len(run.parts)).backward()
            run.keep("input", x.grad)
        optimizer.step()
    run.keep("before", before.weight.grad)


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


def hooks(run: Run, model: Any, *, kind: str) -> None:
    """Hooks that change or see gradients before they are averaged."""
    layer = model.module[2]
    seen: list[Tensor] = []
    if kind == "tensor":
        layer.weight.register_hook(lambda grad: grad * 3)
        model.module[0].bias.register_hook(lambda grad: grad.mul_(-0.5))
    elif kind == "module":
        layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        layer.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
    elif kind == "post accumulate":  # runs before the average, as DDP's do
        layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        layer.bias.register_post_accumulate_grad_hook(_double)
    else:
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grads: seen.extend(g.clone() for g in grads if g is not None)
        )
    train(run, model)
    for gradient in seen:
        run.keep("seen", gradient)


def steps_in_hooks(run: Run, model: Any) -> None:
    """An optimizer per parameter that steps when its gradient has arrived, before anything is averaged."""
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.05)

        def step(parameter: Tensor, own: Any = own) -> None:
            own.step()

        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        model.zero_grad()
        run.backward(model, number)


def optimizer_in_backward(run: Run, model: Any) -> None:
    """torch's: RingDP runs it once a bucket is averaged, and the gradients are None afterwards."""
    from torch.distributed.optim.apply_optimizer_in_backward import (
        _apply_optimizer_in_backward,
    )  # importing it compiles scripts

    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad][:-1]
    _apply_optimizer_in_backward(torch.optim.SGD, chosen, {"lr": 0.05, "momentum": 0.9})
    for step in range(4):
        losses = list(run.losses(model, step))
        sum(losses[1:], losses[0]).backward()  # one backward: a step for each would be too many
        for parameter in model.parameters():
            parameter.grad = parameter.grad if step == 3 else None
    for parameter in chosen:
        assert parameter.grad is None
    for number, parameter in enumerate(chosen):
        run.keep(f"momentum {number}", parameter._in_backward_optimizers[0].state[parameter]["momentum_buffer"])


def fused_optimizer(run: Run, model: Any) -> None:
    model._register_fused_optim(torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in range(4):
        model.zero_grad()
        run.backward(model, step)


def _pack(tensor: Tensor) -> Any:
    return tensor if tensor.requires_grad else tensor.numpy().copy()


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else torch.from_numpy(packed)


def saved_tensors(run: Run, model: Any) -> None:
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        train(run, model)


def anomalies(run: Run, model: Any) -> None:
    with torch.autograd.detect_anomaly(check_nan=True), torch.autograd.set_multithreading_enabled(False):
        train(run, model)


# Optimizers.


def lbfgs(run: Run, model: Any) -> None:
    optimizer = run.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3))

    def closure() -> float:
        optimizer.zero_grad()
        return mean(run, run.backward(model, 0))

    for _ in range(2):
        optimizer.step(closure)


def several_optimizers(run: Run, model: Any) -> None:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.01}]
    chosen = [
        run.optimizer(torch.optim.SGD(groups, lr=0.1)),
        run.optimizer(torch.optim.Adam(biases, lr=0.01, foreach=False)),
    ]
    for step in range(4):
        for optimizer in chosen:
            optimizer.zero_grad()
        run.backward(model, step)
        chosen[step % 2].step()
        chosen[0].step()


def scaled(run: Run, model: Any) -> None:
    """GradScaler and autocast; in step 1 the last rank overflows, and all ranks skip it."""
    optimizer = sgd(run, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = list(run.losses(model, step))
        overflows = step == 1 and run.world - 1 in run.parts
        for loss in losses:
            scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.keep("scale", scaler.get_scale())


def autocast(run: Run, model: Any) -> None:
    optimizer = sgd(run, model)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = list(run.losses(model, step))
        for loss in losses:
            loss.float().backward()
        optimizer.step()


# Communication hooks.


def with_hook(run: Run, model: Any, *, hook: str, steps: int = 3) -> None:
    from torch._C._distributed_c10d import BuiltinCommHookType
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # importing compiles scripts

    register: Any = {
        "allreduce": lambda: model.register_comm_hook(None, default_hooks.allreduce_hook),
        "fp16": lambda: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "bf16": lambda: model.register_comm_hook(None, default_hooks.bf16_compress_hook),
        "fp16 wrapper": lambda: model.register_comm_hook(
            None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        ),
        "builtin allreduce": lambda: model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
        "builtin fp16": lambda: model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
        "PowerSGD": lambda: model.register_comm_hook(
            powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=12, start_powerSGD_iter=2, min_compression_rate=0.01
            ),
            powerSGD_hook.powerSGD_hook,
        ),
    }[hook]
    if run.kind != "alone":
        register()
    train(run, model, steps=steps)


# Name, tolerance, whether DDP is a reference, why.
HALF = "half rounds a third of the gradient"
HOOKS: list[tuple[str, float | None, bool, str]] = [
    ("allreduce", None, True, ""),
    ("fp16", 2e-3, True, HALF),
    ("bf16", 2e-2, False, "DDP wants NCCL for it; bfloat16 rounds a third of the gradient"),
    ("fp16 wrapper", 2e-3, True, HALF),
    ("builtin allreduce", None, True, ""),
    ("builtin fp16", 2e-3, True, HALF),
    ("PowerSGD", 1e-3, False, "it aborts on gloo; of full rank it gives the average back, but for its own rounding"),
]
