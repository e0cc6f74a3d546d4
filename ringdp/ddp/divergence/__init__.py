"""The comparison of the ranks' replicas: `guard` counts steps, `replica` hashes tensors, `report` names those that
differ."""
