"""The quantities that users compute from per-sample gradients."""
