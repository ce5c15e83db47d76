"""Curvature from the records of backward passes: blocks, diagonals, Kronecker factors, and products with JᵀJ."""
