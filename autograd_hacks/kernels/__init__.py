"""Kernels in Triton, for CUDA: what takes several of torch's otherwise.  Each file imports Triton, and is imported where
`forms.cost` has chosen it."""
