"""Differentially private training: clipped sums with noise, what they promise and spend, and the batches they need."""
