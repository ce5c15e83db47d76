"""The record of the hooks: the layer calls of a forward pass, and the gradients of backward passes.  No mathematics."""
