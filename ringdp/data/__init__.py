"""Which samples each rank gets: batches whose split over the ranks follows their speed."""

from ringdp.data.sampler import BalancedSampler

__all__ = ["BalancedSampler"]
