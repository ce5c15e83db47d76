"""One parameter's per-sample gradients as a structured matrix J: row n is the gradient of sample n.

The base class `Form` defines every verb through `dense` and indexing; the other forms only make verbs faster or smaller.
"""

from autograd_hacks.forms.base import BUDGET, Dense, Form
from autograd_hacks.forms.composite import Concatenation, Grouping, Scaled, gathered, group, magnitudes, scale
from autograd_hacks.forms.convolution import Convolution
from autograd_hacks.forms.lookup import Bags, Lookup
from autograd_hacks.forms.mapped import Chained, Elementwise, InTurn, LinearMap, Mapped, Sides, mapped
from autograd_hacks.forms.numerics import put
from autograd_hacks.forms.outer import Outer, Zero
from autograd_hacks.forms.projection import RandomMap, SparseMap
from autograd_hacks.forms.terms import Placed, Sum, add

__all__ = [
    "add", "Bags", "BUDGET", "Chained", "Concatenation", "Convolution", "Dense", "Elementwise", "Form", "gathered",
    "group", "Grouping", "InTurn", "LinearMap", "Lookup", "magnitudes", "mapped", "Mapped", "Outer", "Placed", "put",
    "RandomMap", "scale", "Scaled", "Sides", "SparseMap", "Sum", "Zero",
]  # fmt: skip
