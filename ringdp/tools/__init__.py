"""The tools behind ``python -m ringdp``."""
