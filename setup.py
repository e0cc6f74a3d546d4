"""Packaging: the version, which torch is required, and the two compiled modules (tools/extension_build.py).

Names and texts are in pyproject.toml. Metadata and source archives need no torch. A build belongs to one minor release
of torch, which its version names (0.1.0+torch2.13) and its metadata require.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "tools"))

import toolchain  # noqa: E402
from setuptools import setup  # noqa: E402

WITHOUT_TORCH = {"sdist", "egg_info", "dist_info"}


def metadata(torch: str | None) -> dict[str, Any]:
    """The version and the requirements, of sources or of a build for this torch."""
    found = re.search(r'^__version__ = "(.+?)"', Path("ringdp/__init__.py").read_text(), re.MULTILINE)
    version = found[1] if found else "0"
    common = {"project_urls": toolchain.project_urls()}
    if torch is None:
        oldest = ".".join(map(str, toolchain.MINIMUM_TORCH))
        return common | {"version": version, "install_requires": [f"torch>={oldest}"]}
    major, minor = toolchain.release(torch)
    early = ".dev0" if re.search(r"[a-z]", torch.split("+")[0]) else ""  # a development version is older
    required = f"torch>={major}.{minor}{early or '.0'},<{major}.{minor + 1}{early or '.0'}"
    return common | {"version": f"{version}+torch{major}.{minor}", "install_requires": [required]}


def arguments(words: list[str]) -> dict[str, Any]:
    """The arguments of `setup` for a command line; raises SetupError."""
    toolchain.check_platform()
    if set(words) & WITHOUT_TORCH and (toolchain.installed_torch() is None or "sdist" in words):
        toolchain.check_build_isolation()
        return metadata(None)
    version = toolchain.check_torch()
    import extension_build

    return metadata(version) | extension_build.arguments()


if __name__ == "__main__":
    try:
        given = arguments(sys.argv[1:])
    except toolchain.SetupError as error:
        sys.exit(f"ringdp: {error}")
    setup(**given)
