"""Checks of anybody's per-sample gradients, and of a model on this machine."""

from autograd_hacks.check.check_rows import check_rows

__all__ = ["check_rows"]
