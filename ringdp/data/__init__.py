"""The samples of each rank: batches whose split over the ranks follows their speed, and prepared DataLoaders."""

from ringdp.data.prepared import PreparedLoader
from ringdp.data.sampler import BalancedSampler
from ringdp.data.settings import Limits

__all__ = ["BalancedSampler", "Limits", "PreparedLoader"]
