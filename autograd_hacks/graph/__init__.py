"""Says whose each gradient is, by a law for each node: the only place that will decide it.  It runs beside the plans so far."""
