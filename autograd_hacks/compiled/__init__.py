"""Per-sample gradients in compiled code: one graph of forward and backward, labelled, split, and compiled."""
