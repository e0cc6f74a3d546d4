"""What measures ringdp beside its peers: `python -m benchmarks` lists it, `python -m benchmarks NAME` runs one."""
