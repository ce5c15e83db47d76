"""Says whose each gradient is, by a law for each node: the only place that is to decide it.  Beside the plans so far."""
