"""RingDP(compression=…) for one model: the compressor of each parameter, its state, its statistics, and "auto"."""
