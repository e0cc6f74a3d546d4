"""The core without torch as a Python module, `_core`, and what stands in for parts of it: for tests and benchmarks."""
