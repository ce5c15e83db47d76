"""What people ask of per-sample gradients."""
