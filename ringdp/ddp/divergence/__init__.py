"""Whether all ranks' replicas are still the same: `guard` looks at every step, `replica` hashes, `report` names."""
