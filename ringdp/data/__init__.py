"""The samples of each rank: batches whose split over the ranks follows their speed."""

from ringdp.data.sampler import BalancedSampler

__all__ = ["BalancedSampler"]
