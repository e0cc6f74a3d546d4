"""What RingDP(compression=…) does for a model: who gets which compressor, what is kept, measured and chosen."""
