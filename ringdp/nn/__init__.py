"""Modules whose parameters are spread over the ranks."""

from ringdp.nn.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]
