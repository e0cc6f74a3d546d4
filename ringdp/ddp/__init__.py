"""The parts of RingDP: torch's DistributedDataParallel with ringdp's reducer, and a module for each of its
arguments."""
