"""What RingDP is made of: torch's DistributedDataParallel with our reducer, and what its arguments ask for."""
