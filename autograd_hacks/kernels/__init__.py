"""Triton kernels for CUDA, each of which replaces several of torch's.  Each file imports Triton, and is imported only when
`forms.cost` chooses its kernel."""
