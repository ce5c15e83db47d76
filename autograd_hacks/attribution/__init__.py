"""Whose gradients are alike: metrics for inner products, search in stored rows, noise and signal over training."""

from autograd_hacks.attribution.metric import Metric
from autograd_hacks.attribution.noise_scales import NoiseScales
from autograd_hacks.attribution.store import Store, trak_scores

__all__ = ["Metric", "NoiseScales", "Store", "trak_scores"]
