"""Per-sample gradients in compiled code: one graph of forward and backward, labelled, split, and compiled."""

# These register themselves with capture.
from autograd_hacks.compiled import face as face
from autograd_hacks.compiled import of_tape as of_tape
