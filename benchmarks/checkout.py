"""Importing it makes `ringdp` and `examples` those of this checkout, where none are installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
