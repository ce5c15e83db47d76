"""Differentially private training: clipped sums with noise, what they promise and spend, and the batches they need."""

from autograd_hacks.private.batch_norm import without_batch_norm
from autograd_hacks.private.bounds import QuantileClip
from autograd_hacks.private.clip_and_noise import PrivateStep, clip_and_noise_
from autograd_hacks.private.noise import SecureNoise
from autograd_hacks.private.training import PrivateTraining

__all__ = [
    "clip_and_noise_",
    "PrivateStep",
    "PrivateTraining",
    "QuantileClip",
    "SecureNoise",
    "without_batch_norm",
]
