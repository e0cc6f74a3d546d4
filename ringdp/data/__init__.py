"""The samples of each rank: batches whose split over the ranks follows their speed, splits that follow losses, and
prepared DataLoaders."""

from ringdp.data.follow import follow
from ringdp.data.prepared import PreparedLoader
from ringdp.data.sampler import BalancedSampler
from ringdp.data.settings import Limits

__all__ = ["BalancedSampler", "Limits", "PreparedLoader", "follow"]
