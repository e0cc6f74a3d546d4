"""Gives a torch the device of this folder, and has torch.cuda speak of it. Imported before torch.

Environment: FAKE_CUDA and FAKE_CUDA_RINGDP, the paths of its module and of ringdp's for it; FAKE_CUDA_ORDER, ``lazy``
or a seed (pauses of up to 300 us).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

LONGEST_PAUSE_US = 300
CYCLES_PER_US = 2000


def load_before_torch() -> ModuleType:
    """The compiled module. torch asks for the hooks of CUDA once, while it is imported."""
    assert "torch" not in sys.modules
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # ringdp would be imported before torch is ready
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    libraries = Path(found.origin).parent / "lib"
    for name in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so", "libtorch_python.so"):
        if (libraries / name).exists():
            ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    path = os.environ["FAKE_CUDA"]
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    loader = importlib.machinery.ExtensionFileLoader("fake_cuda", path)
    spec = importlib.util.spec_from_loader("fake_cuda", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["fake_cuda"] = module
    assert module.known(), "torch was asked for CUDA before the fake device was there"
    order = os.environ.get("FAKE_CUDA_ORDER", "lazy")
    module.set_order(0 if order == "lazy" else int(order), -1 if order == "lazy" else LONGEST_PAUSE_US)
    return module


class Properties:
    name = "fake"
    uuid = "fake"
    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = 1 << 34


def speak_of(device: ModuleType) -> None:
    import torch

    cuda: Any = torch.cuda
    known = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "is_current_stream_capturing": False,
        "get_device_properties": Properties,
        "get_device_name": "fake",
        "get_device_capability": (9, 0),
        "init": None,
        "_lazy_init": None,
        "set_device": None,
    }
    for name, value in known.items():
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    cuda.set_sync_debug_mode = lambda mode: device.forbid_waits(mode == "error")
    cuda.synchronize = lambda _=None: device.synchronize()
    cuda.current_stream = lambda _=None: torch._C._accelerator_getStream(0)
    cuda.Stream = lambda _=None, **__: torch.Stream(device="cuda")
    cuda.Event = lambda **_: torch.Event("cuda")
    cuda._sleep = lambda cycles: device.rest(cycles // CYCLES_PER_US)
    torch._assert_async = lambda _: device.fail(True)  # type: ignore[assignment]  # as if it did not hold

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        before = cuda.current_stream()
        if one is not None:
            torch._C._accelerator_setStream(one)
        try:
            yield
        finally:
            torch._C._accelerator_setStream(before)

    cuda.stream = stream
    torch.backends.cuda.is_built = lambda: True
    c10d: Any = torch.distributed.distributed_c10d
    c10d.ProcessGroupNCCL = device.ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)


class ForThisDevice(importlib.abc.MetaPathFinder):
    """ringdp's compiled module is the one that is built for the fake device."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, _: ModuleType | None = None) -> Any:
        if fullname != "ringdp._C":
            return None
        return importlib.util.spec_from_file_location(fullname, os.environ["FAKE_CUDA_RINGDP"])


_device = load_before_torch()
speak_of(_device)
sys.meta_path.insert(0, ForThisDevice())
