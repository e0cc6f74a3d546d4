"""The key-value store in one process: keys, optimizers that it can use, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringdp import kvstore
from ringdp.compression import Compression
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.kvstore.keys import UNIT, Cut, Owners
from ringdp.kvstore.updates import resolve


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 1023, 1024, 1025, 4096, 100_003])
def test_every_element_has_one_owner(ranks: int, numel: int) -> None:
    whole = torch.arange(numel)
    cut = Owners(ranks).cut(numel, 4)
    slices = [cut.slice_of(whole, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(slices).sort().values, whole)
    assert [it.numel() for it in slices] == [cut.numel(rank) for rank in range(ranks)]
    assert cut.part % UNIT == 0
    if numel >= 1024:
        assert max(map(len, slices)) - min(map(len, slices)) < UNIT * ranks


def test_small_keys_go_to_the_rank_with_least() -> None:
    owners = Owners(3)
    assert [owners.cut(100, 4).owner for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("name", ["local", "device", "dist_sync"])
def test_it_works_alone(name: str) -> None:
    store = kvstore.create(name)
    assert (store.rank, store.num_workers, store.type) == (0, 1, name)
    store.set_optimizer("sgd", learning_rate=0.5)
    weight = torch.ones(300, 5)
    store.init("w", weight)
    weight.zero_()  # the store has a copy
    out = torch.empty(300, 5)
    store.push("w", [torch.ones(300, 5), torch.ones(300, 5)])
    store.pull("w", out)
    assert torch.equal(out, torch.zeros(300, 5))


def test_a_push_is_a_copy() -> None:
    store = kvstore.create("local")
    store.init(1, torch.zeros(4))
    gradient, out = torch.ones(4), torch.empty(4)
    store.push(1, gradient)
    gradient.zero_()
    store.pull(1, out)
    assert torch.equal(out, torch.ones(4))


def integer_with_optimizer(store: kvstore.KVStore) -> None:
    store.init("n", torch.zeros(3, dtype=torch.int64))
    store.set_optimizer("sgd", learning_rate=0.1)
    store.flush()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: kvstore.create("async"), "unknown store 'async': the stores are local, device, dist_sync"),
        (lambda store: kvstore.create("dist_sync", staleness=3), "are of dist_async, not of dist_sync"),
        (lambda store: kvstore.create("dist_async", staleness=-1), "staleness must be a whole number from 0 on"),
        (lambda store: kvstore.create("dist_async", servers=1), "servers must be a whole number from 0 on, at most 0"),
        (lambda store: kvstore.create("dist_async", staleness=0, compensation=True), "there are none"),
        (lambda store: kvstore.create("dist_async").set_gradient_compression("int8"), "no common residual"),
        (lambda store: kvstore.create("dist_async").attach(torch.nn.Linear(2, 2)), "do not push together"),
        (lambda store: kvstore.create("dist"), ""),
        (lambda store: kvstore.create("p3"), "unknown store 'p3'"),
        (lambda store: kvstore.create(reduce="max"), "reduce"),
        (lambda store: store.init("w", torch.zeros(3)), "in the store already"),
        (lambda store: store.init(True, torch.zeros(3)), "not True"),
        (lambda store: store.init("v", 3.0), "must be a tensor"),
        (lambda store: store.init("v", torch.eye(3).to_sparse()), "sparse"),
        (lambda store: store.push("v", torch.zeros(3)), "call init for it first (there are 'w')"),
        (lambda store: store.push("w", torch.zeros(4)), "'w' float32 [3] cannot take 'w' float32 [4]"),
        (lambda store: store.push("w", torch.zeros(3).double()), "float64"),
        (lambda store: store.push(["w", "w"], [torch.zeros(3)] * 2), "twice"),
        (lambda store: store.push(["w"], [torch.zeros(3)] * 2), "as many values"),
        (lambda store: store.pull("w", torch.zeros(4)), "cannot take"),
        (lambda store: store.row_sparse_pull("w", torch.zeros(1), row_ids=torch.tensor([3])), "rows 0 to 2"),
        (lambda store: store.row_sparse_pull("w", torch.zeros(2), row_ids=torch.tensor([0])), "do not fit"),
        (lambda store: store.set_optimizer("sgdd"), "unknown optimizer"),
        (lambda store: store.set_optimizer("sgd", learning_rat=1.0), "learning_rat"),
        (lambda store: store.set_optimizer(torch.optim.SGD, lr=-1.0), "-1"),
        (lambda store: store.set_optimizer("sgd", learning_rate=float("nan")), "SGD: lr must be a number, not nan"),
        (lambda store: store.set_optimizer("adam", beta1=float("nan")), "betas must be a number, not (nan, 0.999)"),
        (
            lambda store: store.set_learning_rate(float("inf")),
            "a learning rate must be a finite number from 0 on, not inf",
        ),
        (lambda store: store.pushpull("w", torch.zeros(3), scale=float("nan")), "pushpull: scale must be a finite"),
        (lambda store: store.pushpull("w", torch.zeros(3), scale="2"), "not '2'"),
        (lambda store: store.set_optimizer(torch.optim.LBFGS), "closure"),
        (lambda store: store.set_optimizer(torch.optim.Adafactor), "each element by itself"),
        (lambda store: store.set_gradient_compression({"type": "3bit"}), "3bit"),
        (lambda store: store.set_gradient_compression({"threshold": 1}), "type"),
        (lambda store: store.set_gradient_compression("auto"), "RingDP"),
        (lambda store: store.set_gradient_compression(Compression("auto", allow="4bit")), "RingDP"),
        (lambda store: store.set_gradient_compression(Compression("int8", [("w", None)])), "rules of a Compression"),
        (lambda store: store.set_gradient_compression(Compression("int8", warmup_steps=3)), "does not count steps"),
        (lambda store: store.load_state_dict({}), "not the state"),
        (lambda store: integer_with_optimizer(store), "SGD cannot update key 'n' of torch.int64"),
    ],
)
def test_it_refuses_in_words(call: Callable[[kvstore.KVStore], Any], words: str) -> None:
    store = kvstore.create("local")
    store.init("w", torch.zeros(3))
    if not words:
        call(store)
        return
    with pytest.raises(InvalidArgumentError) as caught:
        call(store)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
)
def test_torch_optimizers_by_element_can_be_used_and_saved(kind: str) -> None:
    stores = []
    state: dict[str, Any] = {}
    for steps in (3, 2):
        store = kvstore.create("local")
        store.set_optimizer(getattr(torch.optim, kind), lr=0.01)
        store.init("w", torch.ones(50))
        if state:
            store.load_state_dict(state)
        for step in range(5 - steps if state else 0, 5 if state else 3):
            store.pushpull("w", torch.sin(torch.arange(50.0) + step))
        state = store.state_dict()
        stores.append(store)
    straight = kvstore.create("local")
    straight.set_optimizer(getattr(torch.optim, kind), lr=0.01)
    straight.init("w", torch.ones(50))
    for step in range(5):
        straight.pushpull("w", torch.sin(torch.arange(50.0) + step))
    assert torch.equal(straight.state_dict()["values"]["w"], state["values"]["w"])


def test_mxnets_names_become_torchs() -> None:
    kind, numbers = resolve("adam", {"learning_rate": 0.1, "beta1": 0.8, "wd": 0.01, "epsilon": 1e-6})
    assert kind is torch.optim.Adam
    assert numbers == {"lr": 0.1, "betas": (0.8, 0.999), "weight_decay": 0.01, "eps": 1e-6}
    assert resolve("nag", {"momentum": 0.9})[1] == {"momentum": 0.9, "nesterov": True}


def test_schedulers_of_torch_change_the_rate() -> None:
    net = nn.Linear(4, 3)
    trainer = kvstore.Trainer(net.parameters(), "sgd", {"learning_rate": 1.0})
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.1)
    before = net.weight.detach().clone()
    for _ in range(2):
        net.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        trainer.step(1)
        scheduler.step()
    assert torch.allclose(before - net.weight, torch.full((3, 4), 1.1))
    assert trainer.learning_rate == pytest.approx(0.01)


def test_a_trainer_names_parameters_without_gradient() -> None:
    used, idle_layer = nn.Linear(2, 1), nn.Linear(2, 1)
    net = nn.ModuleDict({"used": used, "idle": idle_layer})
    trainer = kvstore.Trainer(net, "adam")
    used(torch.ones(1, 2)).sum().backward()
    with pytest.raises(InvalidStateError, match=r"idle\.weight"):
        trainer.step(1)
    idle = idle_layer.weight.detach().clone()
    trainer.step(1, ignore_stale_grad=True)
    assert torch.equal(idle_layer.weight, idle)
    with pytest.raises(InvalidStateError, match="update_on_kvstore"):
        trainer.allreduce_grads()


def test_a_cut_knows_its_slices() -> None:
    cut = Cut(part=64, rest=5, owner=1, ranks=2)
    assert cut.slice_of(torch.arange(133), 0).tolist() == list(range(64))
    assert cut.slice_of(torch.arange(133), 1).tolist() == list(range(64, 133))
