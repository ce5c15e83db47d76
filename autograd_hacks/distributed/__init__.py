"""A batch spread over processes: which processes have samples, what all must do together, and sums over samples."""
