"""A batch that is spread over processes: who has which samples, what all must do together, and sums over them."""
