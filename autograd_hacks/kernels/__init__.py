"""Triton kernels.  Their file imports Triton, and is imported only when `forms.cost` chooses one of them."""
