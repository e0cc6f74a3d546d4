"""Tools for users' tests of their own compressors and scripts: all ranks simulated in one process, or real processes.

`check_compressor` lists the promises that a compressor breaks, `simulate` runs the exchange of n ranks with the
bits of the real one, `run_ranks` calls a function on n processes with a process group of ``ring``.
"""

from ringdp.testing.check import Report, check_compressor
from ringdp.testing.ranks import RankError, run_ranks
from ringdp.testing.simulation import Simulation, simulate

__all__ = ["RankError", "Report", "Simulation", "check_compressor", "run_ranks", "simulate"]
