"""MultiheadAttention: projections of query, key and value, attention between them, and a projection of what it gathered.

The attention itself has no parameters.  The projections are noted as torch's own function runs them.
"""

from collections.abc import Mapping, Sequence

import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import UnsupportedLayer, where
from autograd_hacks.forms import Form
from autograd_hacks.rules.call import Call, needs_batch


def count_queries(layer: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> int:
    query = args[0] if args else kwargs["query"]
    return query.shape[0 if layer.batch_first or query.ndim < 3 else 1]


def attention(layer: nn.MultiheadAttention, call: Call) -> Mapping[str, Form]:
    """query: T N E    key, value: S N ·, or with N first where batch_first.  Each projection is a linear map, and ``bias_k``
    and ``bias_v`` are one position more."""
    needs_batch(call.argument(0, "query"), at_least=3, layout="(N, T, E) for batch_first, else (T, N, E)")
    raise UnsupportedLayer(
        f"{where(call.path, layer)} ran without torch.nn.functional.multi_head_attention_forward, so that its projections "
        "were not seen. Call the layer as torch has it."
    )
