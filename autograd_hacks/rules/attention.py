"""MultiheadAttention: projections of query, key and value, attention between them, and a projection of what it gathered.

The attention itself has no parameters.  torch's own function recomputes it, with identity matrices as its projections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.rules.call import Call, needs_batch
from autograd_hacks.rules.recompute import LinearMaps, check_recomputed, recomputing


def count_queries(layer: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> int:
    query = args[0] if args else kwargs["query"]
    return query.shape[0 if layer.batch_first or query.ndim < 3 else 1]


def map_inside(
    x: Tensor, g: Tensor, weight: str, rows: Mapping[str, slice], shapes: Mapping[str, torch.Size]
) -> dict[str, Form]:
    """The forms of one projection, which uses some rows of a weight and of a bias.

    x: N T I, its input    g: N T O, the gradient at its output    weight: the weight's name
    rows: the rows that it uses of each parameter, by name    shapes: each parameter's whole shape
    """
    forms: dict[str, Form] = {}
    for name, used in rows.items():
        left = g if used == slice(0, shapes[name][0]) else F.pad(g, (used.start, shapes[name][0] - used.stop))
        forms[name] = Outer(left, x) if name == weight else Dense(left.sum(1))
    return forms


def attention(layer: nn.MultiheadAttention, call: Call) -> Mapping[str, Form]:
    """query: T N E    key, value: S N ·, or with N first where batch_first.  The projections are recomputed as
    linear maps, with torch's own attention between them."""
    query, key, value = (call.argument(place, name) for place, name in enumerate(("query", "key", "value")))
    padding, mask = call.argument(3, "key_padding_mask"), call.argument(5, "attn_mask")
    needs_batch(query, at_least=3, layout="(N, T, E) for batch_first, else (T, N, E)")
    if layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    maps, identity = LinearMaps(call), torch.eye(layer.embed_dim, dtype=query.dtype, device=query.device)
    with recomputing(call):
        q, k, v = _project(layer, maps, query, key, value)
        if layer.bias_k is not None:
            # Appended here and not by torch's function, so that each sample has a copy of its own.
            k, v = (torch.cat([x, maps.copies(name, x.shape[1])]) for x, name in ((k, "bias_k"), (v, "bias_v")))
            padding, mask = (None if x is None else F.pad(x, (0, 1)) for x in (padding, mask))
        gathered, weights = F.multi_head_attention_forward(
            q, k, v, layer.embed_dim, layer.num_heads, None, None, None, None, layer.add_zero_attn, layer.dropout, identity,
            None, call.training, padding, call.argument(4, "need_weights", True), mask, use_separate_proj_weight=True,
            q_proj_weight=identity, k_proj_weight=identity, v_proj_weight=identity,
            average_attn_weights=call.argument(6, "average_attn_weights", True),
            is_causal=call.argument(7, "is_causal", False),
        )  # fmt: skip
        out = maps(gathered, "out_proj.weight", "out_proj.bias" if layer.out_proj.bias is not None else None, batch_axis=1)
        outputs = [out.transpose(0, 1) if layer.batch_first else out, *([] if weights is None else [weights])]
        check_recomputed(call, outputs)
        return maps.forms(outputs)


def _project(layer: nn.MultiheadAttention, maps: LinearMaps, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    """q, k, v: T N E.  Inputs that are the same tensor share one map."""
    size, bias = layer.embed_dim, None if layer.in_proj_bias is None else "in_proj_bias"
    if not layer._qkv_same_embed_dim:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return [
            maps(x, name, bias, 1, bias_rows=slice(part * size, (part + 1) * size))
            for part, (x, name) in enumerate(zip((query, key, value), names))
        ]
    inputs: list[tuple[Tensor, int]] = []  # each input, and how many projections it goes into
    for x in (query, key, value):
        if inputs and _same(inputs[-1][0], x):
            inputs[-1] = x, inputs[-1][1] + 1
        else:
            inputs.append((x, 1))
    projected, start = list[Tensor](), 0
    for x, parts in inputs:
        rows = slice(start * size, (start + parts) * size)
        projected += maps(x, "in_proj_weight", bias, 1, weight_rows=rows, bias_rows=rows).chunk(parts, -1)
        start += parts
    return projected


def _same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
