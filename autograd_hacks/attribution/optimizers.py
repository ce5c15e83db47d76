"""The scalings that optimizers apply to gradients, from their state."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Scaling: TypeAlias = "Tensor | tuple[Tensor | None, Tensor | None] | None"
"""A factor for each number, a pair (L, R), or None for the identity."""


def _of_adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Scaling:
    v = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    unbiased = v / (1 - group["betas"][1] ** float(state["step"]))
    return 1 / (unbiased.sqrt() + group["eps"])


def _of_rmsprop(state: Mapping[str, Any], group: Mapping[str, Any]) -> Scaling:
    v = state["square_avg"]
    v = v - state["grad_avg"].square() if group.get("centered") else v
    return 1 / (v.sqrt() + group["eps"])


def _of_adafactor(state: Mapping[str, Any], group: Mapping[str, Any]) -> Scaling:
    least = 0.0
    if "row_var" in state or "variance" in state:  # torch's
        like, given = state.get("variance", state.get("row_var")), group["eps"][0]
        least = torch.finfo(like.dtype).eps if given is None else float(given)
    if "exp_avg_sq_row" in state:  # transformers'
        row, column = state["exp_avg_sq_row"][..., None], state["exp_avg_sq_col"][..., None, :]
    elif "row_var" in state:
        row, column = state["row_var"], state["col_var"]
    else:
        v = state["variance"] if "variance" in state else state["exp_avg_sq"]
        return v.clamp(min=least**2).rsqrt()
    # torch's version clamps the mean and the product from below, and a clamped product doesn't have rank one.
    # transformers' version doesn't clamp.
    row = row / row.mean(-2, keepdim=True).clamp(min=least)
    if row.ndim == 2 and (not least or bool(row.min() * column.min() > least**2)):
        return row[:, 0].rsqrt(), column[0].rsqrt()
    return (row * column).clamp(min=least**2).rsqrt() if least else row.rsqrt() * column.rsqrt()


def of_sgd(state: Mapping[str, Any], group: Mapping[str, Any]) -> Scaling:
    return None


SCALINGS: dict[tuple[str, ...], Callable[[Mapping[str, Any], Mapping[str, Any]], Scaling]] = {
    ("Adam", "AdamW", "NAdam"): _of_adam,
    ("RMSprop",): _of_rmsprop,
    ("Adagrad",): lambda state, group: 1 / (state["sum"].sqrt() + group["eps"]),
    ("Adafactor",): _of_adafactor,
    ("SGD",): of_sgd,
}
"""{names of torch's or transformers' classes: the scaling, from a parameter's state and its group's settings}"""
