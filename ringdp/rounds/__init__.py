"""Fewer rounds: ranks that train alone for many steps and average now and then, for slow and distant links."""

from ringdp.rounds.diloco import DiLoCo
from ringdp.rounds.local_sgd import LocalSGD
from ringdp.rounds.settings import Fragments
from ringdp.rounds.stats import RoundStats
from ringdp.rounds.two_levels import levels

__all__ = ["DiLoCo", "Fragments", "LocalSGD", "RoundStats", "levels"]
