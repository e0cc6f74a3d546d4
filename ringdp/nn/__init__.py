"""Modules whose parameters are spread over the ranks."""

from ringdp.nn.sharded_embedding import ShardedEmbedding
from ringdp.nn.shards import Growing, Normal
from ringdp.nn.sparse_updates import Adagrad, Adam

__all__ = ["Adagrad", "Adam", "Growing", "Normal", "ShardedEmbedding"]
