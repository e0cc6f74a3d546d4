"""Whether the compiled part fits this Python and this torch, checked once by `import ringdp`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

MINIMUM_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 15)


def check() -> None:
    """Do nothing, or raise ImportError with one sentence that says what is wrong and what to do."""
    running = _torch_version()
    if _release(running) < MINIMUM_TORCH:
        raise ImportError(
            f"ringdp needs torch 2.11 or newer and this is torch {running}: upgrade it, then build again ({_advice()})"
        )
    if _release(running) > NEWEST_TESTED_TORCH:
        tested = ".".join(map(str, NEWEST_TESTED_TORCH))
        warnings.warn(f"ringdp was tested with torch up to {tested} and this is torch {running}", stacklevel=3)
    built = _build_info()
    if not _same_python(built.PYTHON_TAG):
        raise ImportError(
            f"ringdp was built for {built.PYTHON_TAG} and this is {sys.implementation.cache_tag}: "
            f"build it with this Python ({_advice()})"
        )
    if not _same_interface(built.TORCH_VERSION, running):
        raise ImportError(
            f"ringdp was built for torch {built.TORCH_VERSION} and this is torch {running}, whose C++ interface is "
            f"another: build it again ({_advice()})"
        )
    if not _same_cuda(cuda := getattr(built, "CUDA", None), running_cuda := _torch_cuda()):
        raise ImportError(
            f"ringdp was built for CUDA {cuda} and this torch {running} has "
            f"{f'CUDA {running_cuda}' if running_cuda else 'none'}: build it again ({_advice()})"
        )


def _torch_version() -> str:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"ringdp needs torch 2.11 or newer and {sys.executable} has none: pip install torch"
        ) from None
    return str(torch.__version__)


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _build_info() -> ModuleType:
    try:
        info = importlib.import_module("ringdp._build_info")
    except ModuleNotFoundError:
        raise ImportError(f"ringdp is not built: its compiled part is missing ({_advice()})") from None
    return info


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ImportError(f"ringdp cannot read the version of this torch, {version!r}")
    return int(found[1]), int(found[2])


def _same_python(tag: str) -> bool:
    return tag == sys.implementation.cache_tag


def _same_interface(built: str, running: str) -> bool:
    """torch's C++ classes keep their layout within a minor release, and not between development versions."""
    built, running = built.split("+")[0], running.split("+")[0]
    if re.fullmatch(r"[\d.]+", built) and re.fullmatch(r"[\d.]+", running):
        return _release(built) == _release(running)
    return built == running


def _same_cuda(built: str | None, running: str | None) -> bool:
    """A build without CUDA runs everywhere; one with CUDA needs a torch with CUDA of the same major version."""
    return built is None or (running is not None and built.split(".")[0] == running.split(".")[0])


def _advice() -> str:
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "setup.py").is_file():
        return f"in {checkout}: make build PYTHON={sys.executable}"
    return "in a checkout of ringdp: pip install --no-build-isolation --force-reinstall --no-deps ."
