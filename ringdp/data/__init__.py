"""The samples of each rank: batches whose split over the ranks follows their speed, and splits that follow losses."""

from ringdp.data.follow import follow
from ringdp.data.sampler import BalancedSampler
from ringdp.data.settings import Limits

__all__ = ["BalancedSampler", "Limits", "follow"]
