"""Compressors for gradients: protocol, registry, one file each."""
