"""What J each torch function has where a value of parameters meets the batch: the layers' formulas, by function."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Form
from autograd_hacks.rules.conv import convolution, transposed_convolution
from autograd_hacks.rules.embedding import lookup, refuse_scaling_by_frequency
from autograd_hacks.rules.linear import added, product, product_of_three, slopes
from autograd_hacks.rules.norm import scaled

Makers = Mapping[str, Callable[[], Any]]
Formula = Callable[..., Mapping[int | str, Any] | None]
"""``formula(wanted, g, *args, **kwargs)``: what each wanted argument has, or None for a call that isn't covered.

wanted: positions, or names, of arguments that are values of parameters    g: N ..., the gradient at the output
args, kwargs: as the function was called, but tensors of the batch have the samples first
"""


def _by_argument(makers_for: Callable[..., Makers], like: Callable[..., Any] | None = None) -> Formula:
    """makers_for(g, ...): what makes each argument's, by the names of the function, which is `like` where that is given."""
    parameters = signature(like or makers_for)
    names = list(parameters.parameters)[0 if like else 1 :]

    def formula(wanted: Collection[int | str], g: Tensor, *args: Any, **kwargs: Any) -> Mapping[int | str, Any] | None:
        try:
            given = parameters.bind(*(() if like else (g,)), *args, **kwargs)
        except TypeError:  # another function of this name, such as torch.batch_norm beside F.batch_norm
            return None
        makers, found = makers_for(g, **given.arguments) if like else makers_for(*given.args, **given.kwargs), {}
        for place in wanted:
            name = names[place] if isinstance(place, int) else place
            made, value = makers[name]() if name in makers else None, given.arguments[name]
            if made is None or (isinstance(made, Form) and (made.samples, *made.shape) != (len(g), *value.shape)):
                return None
            found[place] = made.real if isinstance(made, Tensor) and made.is_complex() and not value.is_complex() else made
        return found

    return formula


def _map(x: Tensor, g: Tensor, value: Tensor, transposed: bool = False) -> Form | None:
    """x: N *T I    value: I, or O I, or I O where it is transposed    g: N *T, or N *T O"""
    outputs = value.shape[1:] if transposed or value.ndim < 2 else value.shape[:1]
    if value.ndim > 2 or g.shape != (*x.shape[:-1], *outputs):
        return None
    if value.ndim == 1:
        return product(x.conj(), g[..., None], value.shape)
    return product(x.conj(), g) if transposed else product(g, x.conj())


def _matmul(g: Tensor, a: Tensor, b: Tensor, names: tuple[str, str] = ("input", "other")) -> dict[str, Callable[[], Any]]:
    """a: N *T I beside a value b, I or I O; or a value, I or O I, beside b, N I or N *T I K"""
    x, at = (b.mT, g.mT if a.ndim > 1 else g) if b.ndim > 2 else (b, g)
    return {names[0]: lambda: _map(x, at, a), names[1]: lambda: _map(a, g, b, transposed=True)}


def _rows(g: Tensor, table: Tensor, index: Any, padding_idx: int | None = None) -> Form | None:
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    is_index = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not is_index or g.shape != (*index.shape, *table.shape[1:]):
        return None
    return lookup(index % len(table), g, table.shape, padding_idx if padding_idx is None else padding_idx % len(table))


def _embedding(g: Tensor, input: Any, weight: Tensor, padding_idx: int | None = None, **given: Any) -> Makers:
    refuse_scaling_by_frequency(given.get("scale_grad_by_freq", False))
    return {"weight": lambda: _rows(g, weight, input, padding_idx)}


def _norm(function: Callable[..., Tensor], g: Tensor, **given: Any) -> Makers:
    """x̂ is what the function returns without its weight and bias."""
    if given.get("training"):
        raise SamplesMixed(
            "normalises with statistics of the batch (training=True), so that its samples have no gradients of their own. "
            "Give it training=False, or use group_norm."
        )
    left_out = {"weight", "bias"}
    if function is F.instance_norm and given.get("use_input_stats", True):
        left_out |= {"running_mean", "running_var"}  # which it would overwrite
    last = len(given["normalized_shape"]) if "normalized_shape" in given else None
    without = {name: value for name, value in given.items() if name not in left_out}
    return {"weight": lambda: scaled(function(**without), g, last), "bias": lambda: added(g, last)}


def _conv(
    formula: Any, order: str, g: Tensor, input: Tensor, weight: Tensor, bias: Any = None, *rest: Any, **named: Any
) -> Makers:
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | dict(zip(order.split(), rest)) | named
    each = [(given[key],) if isinstance(given[key], int) else given[key] for key in ("stride", "padding", "dilation")]
    settings = *(s if len(s) > 1 else (*s,) * (weight.ndim - 2) for s in each), given["groups"]  # words as they are
    makers = {"weight": lambda: formula(input.conj(), g, weight.shape, settings), "bias": lambda: added(g)}
    return makers if input.ndim == weight.ndim else {}


def _times(g: Tensor, factor: Any) -> Any:
    """None for a tensor of fewer axes than g: its samples' axis is elsewhere."""
    if isinstance(factor, Tensor):
        return g * factor.conj() if factor.ndim == g.ndim else None
    return g if factor == 1 else g * factor.conjugate()


_TRANSPOSED = "stride padding output_padding groups dilation"
_MAKERS: dict[str, Any] = {
    "linear": lambda g, input, weight, bias=None: {"weight": lambda: _map(input, g, weight), "bias": lambda: added(g, 1)},
    "matmul": lambda g, input, other: _matmul(g, input, other),
    "mm": lambda g, input, mat2: _matmul(g, input, mat2, ("input", "mat2")),
    "mv": lambda g, input, vec: _matmul(g, input, vec, ("input", "vec")),
    "addmm": lambda g, input, mat1, mat2, *, beta=1, alpha=1: (
        {"input": lambda: added(_times(g, beta), 1)} | _matmul(_times(g, alpha), mat1, mat2, ("mat1", "mat2"))
    ),
    "bilinear": lambda g, input1, input2, weight, bias=None: (
        {"weight": lambda: product_of_three(g, input1, input2), "bias": lambda: added(g, 1)}
    ),
    "prelu": lambda g, input, weight: {"weight": lambda: slopes(input, g, weight.numel())},
    "getitem": lambda g, input, index: {"input": lambda: _rows(g, input, index)},
    "index_select": lambda g, input, dim, index: (
        {"input": lambda: _rows(g, input, index)} if dim in (0, -input.ndim) else {}
    ),
    **{f"conv{n}d": partial(_conv, convolution, "stride padding dilation groups") for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": partial(_conv, transposed_convolution, _TRANSPOSED) for n in (1, 2, 3)},
}
_NORMS = {f.__name__: f for f in (F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm)}

OPERATIONS: dict[str, Formula] = {
    **{name: _by_argument(makers) for name, makers in _MAKERS.items()},
    **{name: _by_argument(partial(_norm, function), function) for name, function in _NORMS.items()},
    "embedding": _by_argument(_embedding, F.embedding),
}
"""{a torch function's name, without underscores: its formula, of forms}"""

LOOKUPS = frozenset(("embedding", "getitem", "index_select"))
"""Operations that take entries of a value, and nothing else of a tensor that could be differentiated by."""

ADDED = {"addmm": (0, "input"), **dict.fromkeys(("linear", *(n for n in OPERATIONS if "conv" in n)), (2, "bias"))}
ADDED |= dict.fromkeys(("matmul", "mm", "mv"), (2, ""))
"""Operations that are linear in a value and in one other tensor, and in the gradient at their output: {name: the position
and the name of what they add, if they do}."""

NORMS = {"layer_norm": 0, "rms_norm": 0, **dict.fromkeys(("group_norm", "batch_norm", "instance_norm"), 1)}
"""Normalisations: 0 where weight and bias lie on the last axes, 1 where they lie on the channels."""

BY_CHANNEL = {name for name in OPERATIONS if "conv" in name} | {"prelu", "group_norm", "batch_norm", "instance_norm"}
"""Operations whose axis 1 is the channels: positions that were folded into axis 0 stay there, as samples of their own."""

_TERMS: dict[str, Any] = {
    "mul": lambda g, input, other: {"input": lambda: _times(g, other), "other": lambda: _times(g, input)},
    "add": lambda g, input, other, *, alpha=1: {"input": lambda: g, "other": lambda: _times(g, alpha)},
    "sub": lambda g, input, other, *, alpha=1: {"input": lambda: g, "other": lambda: _times(g, -alpha)},
    "rsub": lambda g, input, other, *, alpha=1: {"input": lambda: _times(g, -alpha), "other": lambda: g},
    **dict.fromkeys(
        ("expand", "expand_as", "broadcast_to", "repeat"), lambda g, input, *size, **named: {"input": lambda: g}
    ),
}
ELEMENTWISE: dict[str, Formula] = {name: _by_argument(makers) for name, makers in _TERMS.items()}
"""{a torch function's name: its formula, of tensors of g's shape, not yet summed over what was broadcast}"""
