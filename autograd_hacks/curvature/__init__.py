"""Curvature from the records of backward passes: blocks, diagonals, Kronecker factors, and products with JᵀJ."""

from autograd_hacks.curvature.backprop import backprop_hess
from autograd_hacks.curvature.blocks import compute_hess, compute_hess_over
from autograd_hacks.curvature.ekfac import EKFAC
from autograd_hacks.curvature.kronecker import KFAC
from autograd_hacks.curvature.products import linear_operator, matvec, natural_gradient

__all__ = [
    "backprop_hess", "compute_hess", "compute_hess_over", "EKFAC", "KFAC", "linear_operator", "matvec", "natural_gradient",
]  # fmt: skip
