"""In every Python process of a run on the fake device: the device comes before torch."""

import os
import sys

if "FAKE_CUDA" in os.environ:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import load  # type: ignore[import-not-found]  # noqa: F401

    del sys.path[0]
