"""What users need to test their own compressors and scripts: `simulate` plays n ranks in one process."""

from ringdp.testing.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
