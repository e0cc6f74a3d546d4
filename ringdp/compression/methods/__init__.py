"""Compressors that leave elements out, send factors or signs, or round at random."""
