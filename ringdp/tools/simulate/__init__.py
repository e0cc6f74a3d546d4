"""``python -m ringdp simulate``: what an all-reduce would take on machines that are not here.

`place` describes them, `outcome` runs the core's simulation (csrc/simulation) and says what it found, `command` is the
command line.
"""
