"""matplotlib for the tools that draw: the same picture is the same file."""

from __future__ import annotations

import sys
from typing import Any


def pyplot(tool: str) -> Any:
    """None where it is missing, which `tool` says then."""
    try:
        import matplotlib
    except ImportError:
        print(f"{tool}: matplotlib is missing: pip install -r requirements/plots.txt", file=sys.stderr)
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "ringdp"
    return pyplot
