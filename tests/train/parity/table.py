"""The table: what a user of DDP does, one row each, by family.

Tolerance. On two ranks everything is compared to the bit: DDP halves and adds, ring adds and halves, and halving is
exact in binary, so both round once and alike. On more ranks the order of additions differs between gloo and ring, and
thirds are not exact: there, and against one process (which adds losses where ranks add gradients), the dtype's
tolerance in run.py holds. A row that needs more says so in `exact` or `rtol`, with its reason in `why`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ringdp.ddp.arguments import TABLE
from tests.train.parity import gradients as g
from tests.train.parity import models as m
from tests.train.parity import modules as n
from tests.train.parity import scripts as s
from tests.train.parity.run import Case

SMALL = 0.0004  # MiB: a bucket for each layer or two of these models


def case(name: str, model: Callable[[], nn.Module], script: Any = s.train, **settings: Any) -> Case:
    """A row: settings that `Case` does not have are arguments of both wrappers."""
    fields = {key: settings.pop(key) for key in list(settings) if key in Case.__dataclass_fields__}
    return Case(name, model, script, options={"bucket_cap_mb": SMALL, **settings}, **fields)


# Arguments and settings that many rows share.
UNUSED: dict[str, Any] = {"find_unused_parameters": True}
STATIC: dict[str, Any] = {"static_graph": True}
# Of which torch 2.11 and 2.12 have the older name only.
NOT_SYNCHRONISED: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in TABLE else "broadcast_buffers": False
}
UNEVEN: dict[str, Any] = {"alone": "parameters", "alike": "parameters", "why": "who stopped first has older gradients"}
OWN: dict[str, Any] = {"alone": False, "why": "every rank has statistics of its own"}
TWICE: dict[str, Any] = {"raises": "Expected to mark a variable ready only once."}
ROUNDS: dict[str, Any] = {
    "rtol": 2e-2,
    "exact": False,
    "why": "half and bfloat16 pass their rounding on to the others, and halving loses a bit of half's smallest numbers",
}
BFLOAT16: dict[str, Any] = {"rtol": 5e-2, "why": "bfloat16 rounds a third of the loss"}
DDP_FORGETS = "DDP averages the first backward of a forward only and leaves the others local; RingDP averages all"

# Scripts that many rows share.
adds_up = partial(s.train, zero="never")
zeroed = partial(s.train, zero=False)
zeroed_in_turns = partial(s.train, zero="alternating")
plain = partial(s.train, optimizer=s.plain_sgd)
adam = partial(s.train, optimizer=s.adam)


# Which of `Branches`' layers a step and a rank use: "1", "2" or both.


def one(step: int, rank: int) -> str:
    return "1"


def last_rank(step: int, rank: int) -> str:
    return "12" if rank == m.world() - 1 else "1"


def by_step(step: int, rank: int) -> str:
    return "12"[step % 2]


def by_step_and_rank(step: int, rank: int) -> str:
    return "12"[(step + rank) % 2]


def later(step: int, rank: int) -> str:
    return "12" if step > 1 else "1"


def last_of_three(step: int, rank: int) -> str:
    return "1" if step % 10 == 5 else "2"


def branches(uses: Any) -> Callable[[], nn.Module]:
    return partial(m.Branches, uses)


UNUSED_PARAMETERS = [
    case("unused on all ranks", branches(one), **UNUSED),
    case("unused on some ranks", branches(last_rank), **UNUSED),
    case("unused by turns of steps", branches(by_step), **UNUSED),
    case("unused by turns of steps and ranks", branches(by_step_and_rank), **UNUSED),
    case("unused at first", branches(later), partial(s.train, steps=4), **UNUSED),
    case("unused by default", branches(last_rank), theirs=UNUSED),
    case("unused in views", branches(last_rank), gradient_as_bucket_view=True, **UNUSED),
    case("unused, gradients add up", branches(by_step), adds_up, **UNUSED),
    case("unused, zeroed", branches(last_rank), zeroed, **UNUSED),
    case("unused, zeroed in turns", branches(by_step_and_rank), zeroed_in_turns, **UNUSED),
    case("unused under no_sync", branches(by_step_and_rank), s.accumulate, **UNUSED),
    case("used under no_sync only", branches(last_of_three), s.accumulate, **UNUSED),
    case("unused and Adam", branches(last_rank), adam, **UNUSED),
    case("unused and static", branches(one), **STATIC),
    case("unused and a hook", branches(last_rank), partial(g.with_hook, hook="allreduce"), **UNUSED),
    case("nothing used on a rank", m.Passing, **UNUSED,
         ddp=False, why="DDP hangs: a rank without a gradient never ends its backward"),
    case("an output ignored", partial(m.Ignored, alternating=False), **UNUSED),
    case("outputs ignored in turns", m.Ignored, **UNUSED),
    case("a layer under no_grad", m.WithoutGraph, **UNUSED),
    case("all used though unused are looked for", m.layers, **UNUSED),
    case("unused forbidden", branches(one), find_unused_parameters=False,
         raises="Expected to have finished reduction in the prior iteration before starting a new one."),
]  # fmt: skip

SHARING = [
    case("used twice and tied", m.Twice),
    case("used twice, static", m.Twice, **STATIC),
    case("used twice, unused looked for", m.Twice, **UNUSED),
    case("frozen", m.frozen),
    case("frozen, unused looked for", m.frozen, **UNUSED),
    case("frozen, static", m.frozen, **STATIC),
    case("not reduced by wish", m.ignoring, alone=False, alike="", why="the ignored parameters are each rank's own"),
]  # fmt: skip

plainly = partial(m.Checkpointed, reentrant=False)
reentrant = partial(m.Checkpointed, reentrant=True)

CHECKPOINTS = [
    case("checkpoint", plainly),
    case("checkpoint, reentrant", reentrant),
    case("checkpoint twice", partial(plainly, times=2)),
    case("checkpoint twice, reentrant", partial(reentrant, times=2), **TWICE),
    case("checkpoint twice, static", partial(plainly, times=2), **STATIC),
    case("checkpoint twice, reentrant, static", partial(reentrant, times=2), **STATIC),
    case("checkpoint with unused, static", partial(reentrant, times=2, unused=True), **STATIC),
    case("checkpoint, unused looked for", partial(plainly, unused=True), **UNUSED),
    case("checkpoint, reentrant, unused looked for", reentrant, **TWICE, **UNUSED),
    case("checkpoint and no_sync", plainly, s.accumulate),
    case("checkpoint, static, no_sync", partial(reentrant, times=2), partial(s.accumulate, sync_first=True), **STATIC),
]  # fmt: skip

SCHEDULES = [
    case("accumulation under no_sync", m.layers, s.accumulate),
    case("accumulation under no_sync, zeroed", m.layers, partial(s.accumulate, set_to_none=False)),
    case("accumulation under no_sync, views", m.layers, s.accumulate, gradient_as_bucket_view=True),
    case("accumulation under no_sync, static", m.layers, partial(s.accumulate, sync_first=True), **STATIC),
    case("accumulation under no_sync from the start, static", m.layers, s.accumulate, **STATIC,
         ddp=False, why="DDP fails an assertion"),
    case("accumulation with averages", m.layers, partial(s.accumulate, sync_each=True)),
    case("accumulation with averages, zeroed", m.layers, partial(s.accumulate, sync_each=True, set_to_none=False)),
    case("gradients add up", m.layers, adds_up),
    case("ends in no_sync", m.layers, s.end_in_no_sync, alone=False, alike="parameters"),
    case("steps in no_sync", m.layers, s.step_in_no_sync, alone=False, alike="", why="the ranks part"),
    case("only forward in no_sync", m.layers, partial(s.no_sync_half, forward_inside=True), alone=False, alike=""),
    case("only backward in no_sync", m.layers, partial(s.no_sync_half, forward_inside=False)),
    case("several forwards, one backward", m.layers, s.forwards_then_backward),
    case("several forwards, one backward, unused looked for", m.layers, s.forwards_then_backward, **UNUSED),
    case("several forwards, several backwards", m.layers, s.forwards_then_backwards, ddp=False, why=DDP_FORGETS),
    case("several roots", m.layers, s.several_roots),
    case("backward twice through one graph", m.layers, s.retain_graph, ddp=False, why=DDP_FORGETS),
    case("forward without backward", m.layers, partial(s.train, before=s.forward_without_backward)),
    case("evaluation under no_grad", n.batch_norm, partial(s.train, before=s.evaluate), **OWN),
    case("evaluation in inference mode", n.batch_norm,
         partial(s.train, before=partial(s.evaluate, mode=torch.inference_mode)), **OWN),
    case("training mode under no_grad", n.batch_norm,
         partial(s.train, before=partial(s.evaluate, evaluating=False)), **OWN),
    case("evaluation before the step", n.dropout, partial(s.train, after=s.evaluate)),
    case("train and eval in turns", n.dropout, partial(s.train, before=s.switch_mode)),
    case("zeroed in turns", m.layers, zeroed_in_turns),
    case("zeroed by the wrapper", m.layers, partial(s.train, zero=False, by_model=True)),
    case("two models", m.layers, partial(s.two_models, one_backward=False)),
    case("two models, one backward", m.layers, partial(s.two_models, one_backward=True)),
    case("uneven inputs", m.layers, s.uneven, **UNEVEN),
    case("uneven inputs, present ranks only", m.layers, partial(s.uneven, divide_by_initial=False), **UNEVEN),
    case("uneven inputs and no_sync", m.layers, partial(s.uneven, accumulating=True), **UNEVEN),
    case("uneven inputs in a Join context", m.layers, partial(s.uneven, context=True), **UNEVEN),
    case("uneven inputs, unused looked for", m.layers, s.uneven, **UNEVEN, **UNUSED),
]  # fmt: skip

AUTOGRAD = [
    case("autograd.grad beside backward", m.layers, g.autograd_grad),
    case("autograd.grad, unused looked for", m.layers, g.autograd_grad, **UNUSED),
    case("gradient penalty", m.layers, g.gradient_penalty),
    case("gradient penalty, static", m.layers, g.gradient_penalty, **STATIC,
         ddp=False, why="DDP takes autograd.grad for the first backward and leaves the rest of it local"),
    case("backward with create_graph", m.layers, g.backward_create_graph,
         ddp=False, why="DDP raises: its copies have no graph"),
    case("second-order inner steps", m.layers, g.inner_steps),
    case("functional_call", m.layers, g.functional_call),
    case("gradients of inputs", m.layers, g.input_gradients),
    case("tensor hooks", m.layers, partial(g.hooks, kind="tensor")),
    case("module hooks", m.layers, partial(g.hooks, kind="module")),
    case("hooks after accumulation", m.layers, partial(g.hooks, kind="post accumulate"),
         alone=False, why="in one process they see sums of parts"),
    case("multi-gradient hooks", m.layers, partial(g.hooks, kind="multi")),
    case("a function of the user's", n.OwnFunction),
    case("saved tensors elsewhere", m.layers, g.saved_tensors),
    case("anomaly detection in one thread", m.layers, g.anomalies),
]  # fmt: skip

MEMORY = [
    case("sparse", m.Sparse, plain),
    case("sparse, gradients add up", m.Sparse, partial(plain, zero="never")),
    case("sparse, zeroed", m.Sparse, partial(plain, zero=False)),
    case("sparse under no_sync", m.Sparse, s.accumulate),
    case("sparse, unused looked for", m.Sparse, plain, **UNUSED),
    case("sparse only, float64", partial(m.Sparse, dense_too=False, dtype=torch.float64), plain),
    case("complex64", partial(m.ComplexNumbers, torch.complex64), plain),
    case("complex128", partial(m.ComplexNumbers, torch.complex128), plain),
    case("float64", partial(m.Cast, torch.float64)),
    case("bfloat16", partial(m.Cast, torch.bfloat16)),
    case("half", partial(m.Cast, torch.half)),
    case("many dtypes", m.ManyTypes, plain, **ROUNDS),
    case("many dtypes, accumulation", m.ManyTypes, s.accumulate, **ROUNDS),
    case("channels_last", m.channels_last),
    case("channels_last, zeroed in turns", m.channels_last, zeroed_in_turns),
    case("strided, empty and without dimensions", m.Strided),
    case("strided, views", m.Strided, gradient_as_bucket_view=True),
    case("strided under no_sync", m.Strided, s.accumulate),
    case("a large gradient", m.wide),
]  # fmt: skip

USERS_GRADIENTS = [
    case("None on some", m.layers, partial(zeroed, before=g.none_on_some)),
    case("zeroed in place", m.layers, partial(adds_up, before=g.zero_in_place)),
    case("replaced after backward", m.layers, partial(s.train, after=g.halve_by_another)),
    case("replaced after backward, added up", m.layers, partial(adds_up, after=g.halve_by_another)),
    case("replaced before backward", m.layers, partial(s.train, before=g.own_start)),
    case("replaced, other layout", m.channels_last, partial(s.train, before=g.other_layout), strides=False,
         why="RingDP's gradients always lie as their parameters; DDP keeps the user's order"),
    case("replaced by views of one tensor", m.layers, partial(s.train, before=g.shared_memory)),
    case("kept", m.layers, partial(s.train, after=g.keep_gradients)),
    case("detached in place", m.layers, partial(s.train, after=g.detach_in_place)),
    case("clipped by norm", m.layers, partial(s.train, after=g.clip)),
    case("clipped by infinity norm", m.layers, partial(s.train, after=partial(g.clip, norm=float("inf")))),
    case("clipped by value", m.layers, partial(s.train, after=partial(g.clip, norm=None))),
]  # fmt: skip

OPTIMIZERS = [
    case("Adam", m.layers, adam),
    case("LBFGS", m.layers, g.lbfgs, rtol=1e-3, why="its steps are quotients of small differences"),
    case("several optimizers", m.layers, g.several_optimizers),
    case("an optimizer in hooks", m.layers, g.steps_in_hooks, alone=False, alike="", why="it steps before the average"),
    case("optimizer in backward", m.layers, g.optimizer_in_backward,
         ddp=False, why="DDP asks for an accelerator's stream"),
    case("optimizer in backward, unused", branches(last_rank), g.optimizer_in_backward, **UNUSED,
         ddp=False, alone=False, why="unused parameters step by zeros, as DDP's on accelerators"),
    case("fused optimizer", m.layers, g.fused_optimizer, alone=False, why="only wrappers have it"),
    case("autocast", m.layers, g.autocast, **BFLOAT16),
    case("GradScaler and autocast", m.layers, g.scaled, **BFLOAT16),
]  # fmt: skip

OUTPUTS = [
    *(case(f"output: {kind}", partial(n.Returning, kind)) for kind in n.OUTPUTS),
    *(case(f"output: {kind}, unused looked for", partial(n.Returning, kind), **UNUSED) for kind in n.FOUND_OUTPUTS),
    *(case(f"output: {kind}, static", partial(n.Returning, kind), **STATIC, ddp=kind != "dataclass",
           why="" if kind != "dataclass" else "DDP does not find the tensors, and its first step stays local")
      for kind in ("nested", "dataclass")),
    case("output: the loss", n.LossInside),
    case("output: the loss, unused looked for", n.LossInside, **UNUSED),
]  # fmt: skip

BUFFERS = [
    case("batch norm", n.batch_norm, **OWN),
    case("batch norm, buffers not synchronised", n.batch_norm, **NOT_SYNCHRONISED, **OWN),
    case("batch norm, evaluated", n.batch_norm, partial(s.train, before=s.switch_mode), **OWN),
    case("batch norm, accumulation", n.batch_norm, s.accumulate, **OWN),
    case("buffers of all kinds", n.Buffers, **OWN),
    case("buffers of all kinds, not synchronised", n.Buffers, **NOT_SYNCHRONISED, **OWN),
    case("a buffer that autograd saved", n.NeedsBuffer, s.forwards_then_backward,
         may_raise="modified by an inplace operation",
         why="DDP of torch 2.11 broadcasts into the buffer itself; later ones hide that from autograd"),
    case("random numbers of each rank's own", n.dropout),
]  # fmt: skip

LAYERS = [
    case("LSTM", n.Recurrent),
    case("attention", n.Attention),
    *(case(f"parametrization: {kind}", partial(n.parametrized, kind), alone=kind != "spectral_norm",
           why="" if kind != "spectral_norm" else "one process iterates once per part")
      for kind in ("weight_norm", "spectral_norm")),
    case("containers", n.Containers),
]  # fmt: skip

ARGUMENTS = [
    case("no arguments", m.layers, bucket_cap_mb=None, worlds=(1, 2, 3)),
    case("tiny buckets", m.layers, bucket_cap_mb=1e-6, worlds=(1, 2, 3)),
    case("one bucket", m.layers, bucket_cap_mb=1000),
    case("a list of buckets", m.layers, bucket_cap_mb=None, bucket_cap_mb_list=[0.0001, 0.001, 0.0005]),
    case("gradients as views", m.layers, gradient_as_bucket_view=True, worlds=(1, 2, 3)),
    case("static graph", m.layers, worlds=(1, 2, 3), **STATIC),
    case("a world of one, unused", branches(one), worlds=(1,), **UNUSED),
    case("a world of one, no_sync", m.layers, s.accumulate, worlds=(1,)),
    *(case(f"hook: {hook}", m.layers, partial(g.with_hook, hook=hook), rtol=rtol, ddp=ddp, why=why)
      for hook, rtol, ddp, why in g.HOOKS),
]  # fmt: skip

CHANGES = [
    case("deepcopy in the middle", m.layers, partial(s.go_on_with_copy, how="deepcopy")),
    case("saved and loaded in the middle", m.layers, partial(s.go_on_with_copy, how="pickle")),
    case("back to an earlier state", m.layers, s.go_back),
    case("parameters get other data", m.layers, partial(s.train, before=s.new_data)),
    case("double before the first step", partial(m.Cast, torch.float32), partial(s.change_dtype, after_steps=0),
         ddp=False, why="DDP no longer averages"),
    case("double after a step", partial(m.Cast, torch.float32), partial(s.change_dtype, after_steps=1),
         ddp=False, rtol=1e-7, why="DDP no longer averages; the first step rounds to float32"),
    case("double, none may be unused", partial(m.Cast, torch.float32), partial(s.change_dtype, after_steps=1),
         ours={"find_unused_parameters": False}, ddp=False, rtol=1e-7,
         why="DDP no longer averages; the first step rounds to float32"),
]  # fmt: skip

FAMILIES = [
    UNUSED_PARAMETERS, SHARING, CHECKPOINTS, SCHEDULES, AUTOGRAD, MEMORY, USERS_GRADIENTS, OPTIMIZERS, OUTPUTS, BUFFERS,
    LAYERS, ARGUMENTS, CHANGES,
]  # fmt: skip
CASES = [row for family in FAMILIES for row in family]
