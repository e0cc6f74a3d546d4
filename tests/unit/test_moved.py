"""What was pickled while a module had another name."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from ringdp import _moved


@pytest.mark.parametrize("old", _moved.NOW)
def test_a_module_is_the_same_under_its_old_name(old: str) -> None:
    module = importlib.import_module(_moved.NOW[old])
    assert importlib.import_module(old) is module
    assert module.__name__ == _moved.NOW[old]
    assert module.__spec__ is not None
    assert module.__spec__.name == _moved.NOW[old]


def test_a_class_is_found_by_the_name_in_an_old_file() -> None:
    code = "import pickle; print(pickle.loads(b'cringdp.parallel\\nRingDP\\n.'))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert output == "<class 'ringdp.ddp.wrapper.RingDP'>\n"
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(b"cringdp.unheard_of\nRingDP\n.")
