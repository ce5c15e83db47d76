"""Says which sample each gradient belongs to, by a law for each node: the only place that decides it."""
