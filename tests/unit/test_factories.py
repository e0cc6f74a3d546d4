"""Tensors that the library makes do not depend on the program's default dtype and device: each call names both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2] / "ringdp"
FACTORIES = frozenset(one.__name__ for one in _device_constructors())  # that ask torch.set_default_device
MODULES = ("Linear", "Embedding", "Conv", "BatchNorm", "LayerNorm", "Bilinear", "LSTM", "GRU", "RNN", "EmbeddingBag")


def unnamed(source: str) -> Iterator[tuple[int, str]]:
    """The line of each such call, and what it leaves to the defaults."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        called = ast.unparse(call.func)
        names = {keyword.arg for keyword in call.keywords}
        if None in names:  # **options
            continue
        if called == "torch.Generator" and not call.args and "device" not in names:
            yield call.lineno, f"{called}: device"
        factory = called.removeprefix("torch.") in FACTORIES and called.startswith("torch.")
        module = called.startswith(("torch.nn.", "nn.")) and called.rpartition(".")[2].startswith(MODULES)
        if (factory or module) and (missing := {"dtype", "device"} - names):
            yield call.lineno, f"{called}: {' and '.join(sorted(missing, reverse=True))}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_tensor_names_its_dtype_and_device(path: Path) -> None:
    found = [f"{path.name}:{line}: {what}" for line, what in unnamed(path.read_text())]
    assert not found, "\n".join(found)


def test_what_it_finds() -> None:
    source = "torch.zeros(3)\ntorch.tensor([0.5], device=d)\n"
    source += "torch.zeros(3, dtype=t, device=d)\nx.new_zeros(3)\ntorch.ones(1, **o)"
    assert list(unnamed(source)) == [(1, "torch.zeros: dtype and device"), (2, "torch.tensor: dtype")]
    assert list(unnamed("torch.Generator()")) == [(1, "torch.Generator: device")]
