"""Differentially private training: clipped sums with noise, what they promise and spend, and the batches they need."""

from autograd_hacks.privacy.batch_norm import without_batch_norm as without_batch_norm
