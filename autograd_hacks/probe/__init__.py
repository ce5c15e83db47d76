"""Where the samples are in every call, and which calls give the rows of which parameter: found out before a forward pass."""
