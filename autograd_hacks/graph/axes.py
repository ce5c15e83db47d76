"""What operations do with axes: the one table of laws that need no values.

An operation's entry says with which axis of its output each axis of each input is walked in step: ``mm`` has (0, ALONE)
and (ALONE, 1).  Read backwards, as `laws.py` does for autograd's nodes, it says where the samples of an input's gradient
are, and if they are lost, that samples add up; read forwards it says where the samples of a result are.  Names are ATen's;
the node of ``aten.native_layer_norm`` is NativeLayerNormBackward0, that of its backward NativeLayerNormBackwardBackward0.

A rule gets only shapes and the saved numbers that its entry names, so these and nothing else belong in a memo's key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autograd_hacks.graph.label import ALONE, MIX, Links, Shape, Shapes, Sizes
from autograd_hacks.support.graph import OF_DEVICES, signed

Rule = Callable[..., "list[Links] | None"]
"""``rule(sizes, **numbers)``: the links of each input to the output of which `Sizes` tell; None if values say them."""


@dataclass(frozen=True)
class Axes:
    """An operation's entry.

    rule: None for an operation that broadcasts its inputs and computes entry by entry
    reads: the saved numbers that the rule gets
    multiplies: whether samples that are lost may still be apart, if the other factor is a constant such as a permutation
    """

    rule: Rule | None = None
    reads: tuple[str, ...] = ()
    multiplies: bool = False

    def links(self, o: int, outs: Shapes, ins: Shapes, numbers: Mapping[str, Any]) -> Sequence[Links] | None:
        """For each axis of each input the axis of output number o with which it is walked in step."""
        rule, joint = self.rule, outs[o] or ()
        return [broadcast(joint, own) for own in ins] if rule is None else rule(Sizes(o, outs, ins), **numbers)


AXES: dict[str, Axes] = {}


def axes(names: str, reads: str = "", multiplies: bool = False) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        every = (own for name in names.split() for own in (name, *OF_DEVICES.get(name, ())))
        AXES.update(dict.fromkeys(every, Axes(rule, tuple(reads.split()), multiplies)))
        return rule

    return enter


def axis(dim: int, n: int) -> int:
    return signed(dim) % max(1, n)


def some_axes(dim: Any, n: int) -> list[int]:
    """The axes that an operation's argument names; by default all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(n))
    return [axis(d, n) for d in (dim if isinstance(dim, Sequence) else (dim,))]


def broadcast(out: Shape, own: Shape | None) -> Links:
    """Of a tensor that is expanded to the output's shape."""
    if own is None:
        return ()
    more = len(out) - len(own)
    return [d + more if size == out[d + more] else ALONE for d, size in enumerate(own)]


def within(last: int, n: int) -> Links:
    """In step on the leading axes; entries mix along the last ones."""
    return [d if d < n - last else MIX for d in range(n)]


# Axes in another order.


@axes("permute t", reads="dims")
def _(sizes: Sizes, dims: Sequence[int] | None = None) -> list[Links]:
    order = [axis(d, sizes.n) for d in (range(sizes.n)[::-1] if dims is None else dims)]
    return [[order.index(d) for d in range(len(order))]]


@axes("transpose", reads="dim0 dim1")
def _(sizes: Sizes, dim0: int, dim1: int) -> list[Links]:
    a, b = axis(dim0, sizes.n), axis(dim1, sizes.n)
    return [[b if d == a else a if d == b else d for d in range(sizes.n)]]


@axes("unsqueeze", reads="dim")
def _(sizes: Sizes, dim: int) -> list[Links]:
    return [[d + (d >= axis(dim, sizes.n)) for d in range(sizes.n - 1)]]


@axes("squeeze", reads="dim")
def _(sizes: Sizes, dim: Any = None) -> list[Links]:
    gone = [d for d in some_axes(dim, len(sizes.own)) if sizes.own and sizes.own[d] == 1]
    return [[ALONE if d in gone else d - sum(g < d for g in gone) for d in range(len(sizes.own))]]


@axes("expand")
def _(sizes: Sizes) -> list[Links]:
    return [broadcast(sizes.out, sizes.ins[0])]


@axes("view_as_real view_as_complex")
def _(sizes: Sizes) -> list[Links]:
    return [[d if d < sizes.n else ALONE for d in range(len(sizes.own))]]


# Entry by entry.

_ENTRYWISE = """abs acos acosh add addcdiv addcmul alias angle asin asinh atan atan2 atanh bernoulli cauchy ceil celu clamp
clamp_max clamp_min clone complex conj _conj conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp
exp2 expm1 exponential fill floor fmax fmin fmod frac ge gelu geometric gt hardshrink hardsigmoid hardswish hardtanh hypot i0
igamma igammac ldexp le leaky_relu lerp lgamma lift lift_fresh log log10 log1p log2 log_normal log_sigmoid logaddexp
logaddexp2 logit lt masked_fill maximum minimum mish mul mvlgamma nan_to_num native_dropout fused_dropout ne neg _neg_view
nextafter normal pin_memory poisson polar polygamma pow prelu_kernel rad2deg random reciprocal relu remainder round
rrelu_with_noise rrelu_with_noise_functional rsqrt rsub sgn sigmoid sign silu sin sinc sinh softplus softshrink special_entr
special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtr special_xlog1py special_zeta sqrt sub tan tanh
threshold copy _to_copy tril triu trunc uniform where xlogy zero frexp standard_gamma _lazy_clone detach lift_fresh_copy
rand_like randn_like native_dropout_backward gelu_backward elu_backward hardswish_backward hardtanh_backward
leaky_relu_backward log_sigmoid_backward rrelu_with_noise_backward sigmoid_backward softplus_backward softshrink_backward
tanh_backward threshold_backward hardshrink_backward silu_backward mish_backward hardsigmoid_backward prelu_kernel_backward
fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not isnan isinf isfinite isposinf
isneginf floor_divide __and__ __or__ __xor__ bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ signbit heaviside
gcd lcm square relu6"""
AXES.update(dict.fromkeys(_ENTRYWISE.split(), Axes()))


@axes(
    """mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward""",
)
def _(sizes: Sizes) -> list[Links]:
    """A loss of each entry, or their sum, which has no axes."""
    return [[ALONE] * len(s or ()) if len(s or ()) > sizes.n else broadcast(sizes.out, s) for s in sizes.ins]


# Reductions.


@axes(
    """sum mean nansum amax amin aminmax max min median nanmedian mode kthvalue prod var std var_mean std_mean logsumexp norm
    linalg_vector_norm any all argmax argmin""",
    reads="dim keepdim",
)
def _(sizes: Sizes, dim: Any = None, keepdim: bool = False) -> list[Links]:
    n, out = len(sizes.own), sizes.out
    if n == len(out) and dim is None and len(sizes.ins) > 1:
        return [broadcast(out, s) for s in sizes.ins]
    over = some_axes(dim, n) if keepdim or len(out) != n or n == 0 else []
    kept = [d for d in range(n) if d not in over]
    return [[ALONE if d in over else d if keepdim else kept.index(d) for d in range(n)]]


@axes("nll_loss_forward nll_loss multi_margin_loss multilabel_margin_loss_forward nll_loss2d nll_loss2d_forward")
def _(sizes: Sizes) -> list[Links]:
    """Scores by class on axis 1, or on the only axis; on tapes a target for each of the others, and perhaps weights."""
    out, n = sizes.out, len(sizes.own)
    links = [0, ALONE, *range(1, n - 1)] if len(out) == n - 1 and out else [ALONE] * n
    more: list[Links] = [[ALONE] * len(s or ()) for s in sizes.ins[1:]]
    if len(more) == 2 and sizes.ins[1] is not None:
        more[0] = [d if d < len(out) else ALONE for d in range(len(sizes.ins[1]))]
    return [links, *more]


@axes("nll_loss_backward nll_loss2d_backward")
def _(sizes: Sizes) -> list[Links]:
    """The gradient of each sample's loss, and scores to which nothing comes."""
    n, g = sizes.n, len(sizes.own)
    return [[0, *range(2, n)] if g == n - 1 and g else [ALONE] * g, *[range(len(s or ())) for s in sizes.ins[1:]]]


@axes("ctc_loss _ctc_loss _cudnn_ctc_loss miopen_ctc_loss cudnn_ctc_loss")
def _(sizes: Sizes) -> list[Links]:
    return [[ALONE, 0, ALONE] if len(sizes.own) == 3 else [MIX] * len(sizes.own)]


# Along axes.


@axes(
    """softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp
    _softmax_backward_data _log_softmax_backward_data fft_r2c fft_c2r fft_c2c _fft_r2c _fft_c2r _fft_c2c glu glu_backward
    _masked_softmax linalg_cross sort topk""",
    reads="dim",
)
def _(sizes: Sizes, dim: Any = -1) -> list[Links]:
    dims = some_axes(-1 if dim is None else dim, sizes.n) if sizes.out else []

    def of(own: Shape) -> Links:
        if len(own) != sizes.n:
            return [MIX] * len(own)
        lengths = [own[d] if d in dims else size for d, size in enumerate(sizes.out)]
        return [MIX if e in dims else e for e in broadcast(lengths, own)]

    return [of(s or ()) for s in sizes.ins]


@axes("_weight_norm_interface", reads="dim")
def _(sizes: Sizes, dim: int) -> list[Links]:
    own = axis(dim, sizes.n)
    return [[d if d == own else MIX for d in range(len(s or ()))] for s in sizes.ins]


# Products.


@axes("mm addmm _addmm_activation mv addmv bmm baddbmm", multiplies=True)
def _(sizes: Sizes) -> list[Links]:
    n, added = sizes.n, [broadcast(sizes.out, s) for s in sizes.ins[:-2]]
    return [*added, [*range(max(1, n - 1)), ALONE], [*range(n - 2), ALONE, *range(max(1, n - 1), n)]]


@axes("_grouped_mm", multiplies=True)
def _(sizes: Sizes) -> list[Links]:
    """Rows in groups, each with a matrix of its own, M K and G K N; or a product of batches."""
    more: list[Links] = [broadcast(sizes.out, s) for s in sizes.ins[2:]]
    if sizes.n == 3:
        are_batches = all(s is None or len(s) == 3 for s in sizes.ins[:2])
        return [(0, 1, ALONE), (0, ALONE, 2), *more] if are_batches else [[MIX] * len(s or ()) for s in sizes.ins]
    return [
        (0, ALONE) if len(sizes.ins[0] or (0, 0)) == 2 else (ALONE, 0, MIX),
        (ALONE, MIX, 1)[-len(sizes.ins[1] or (0, 0, 0)) :],
        *more,
    ]


@axes("linear mkldnn_linear", multiplies=True)
def _(sizes: Sizes) -> list[Links]:
    return [[*range(sizes.n - 1), ALONE], (sizes.n - 1, ALONE), (sizes.n - 1,)][: len(sizes.ins)]


@axes("_trilinear", reads="expand1 expand2 expand3 sumdim", multiplies=True)
def _(sizes: Sizes, expand1: Any, expand2: Any, expand3: Any, sumdim: Any) -> list[Links]:
    expanded = [[signed(d) for d in e] for e in (expand1, expand2, expand3)]
    full = next(len(s) + len(e) for s, e in zip(sizes.ins, expanded) if s is not None)
    kept = [d for d in range(full) if d not in [signed(s) for s in sumdim]]
    return [[kept.index(d) if d in kept else ALONE for d in range(full) if d not in e] for e in expanded]


@axes("_cdist_forward cdist _euclidean_dist", multiplies=True)
def _(sizes: Sizes) -> list[Links]:
    n = sizes.n
    lead = [broadcast(sizes.out[:-2], s[:-2]) if s is not None else () for s in sizes.ins]
    return [[*lead[0], n - 2, ALONE], [*lead[1], n - 1, ALONE]]


_CONV = "conv{0}d slow_conv{0}d slow_conv_transpose{0}d slow_conv_dilated{0}d _conv_depthwise{0}d conv_depthwise{0}d"


@axes(
    f"""convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose miopen_convolution
    miopen_convolution_transpose miopen_depthwise_convolution mkldnn_convolution _mps_convolution _mps_convolution_transpose
    mps_convolution mps_convolution_transpose _nnpack_spatial_convolution {_CONV.format(2)} {_CONV.format(3)}""",
    multiplies=True,
)
def _(sizes: Sizes) -> list[Links]:
    """The samples are on axis 0.  Where they are channels, as in grouped convolutions, they are said to mix."""
    return [[0, *[MIX] * (sizes.n - 1)], [ALONE] * sizes.n, (1,)][: len(sizes.ins)]


@axes("convolution_backward convolution_backward_overrideable mps_convolution_backward", multiplies=True)
def _(sizes: Sizes) -> list[Links]:
    """Of its results, the input's gradient has samples."""
    first = 0 if sizes.o == 0 else ALONE
    ends = [[MIX if d else first for d in range(len(s or ()))] for s in sizes.ins[:2]]
    return [*ends, *[[ALONE] * len(s or ()) for s in sizes.ins[2:]]]


@axes(
    """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable""",
    multiplies=True,
)
def _(sizes: Sizes) -> list[Links]:
    """Queries N H L E, keys N H S E, values N H S V, and a mask that broadcasts to N H L S.

    Heads are taken to mix where some share keys."""
    n, lengths = sizes.n, [s for s in sizes.ins[:3] if s is not None]
    heads = n - 3
    lead = [*range(heads), heads if len({s[heads] for s in lengths}) == 1 and sizes.out[heads] == lengths[0][heads] else MIX]
    given: list[Links] = [[*lead, n - 2, ALONE], [*lead, MIX, ALONE], [*lead, MIX, n - 1 if sizes.o == 0 else ALONE]]
    masks = ([*broadcast([*(sizes.out if sizes.o else sizes.out[:-1]), 0], s)[:-1], MIX] if s else () for s in sizes.ins[3:])
    return [*given, *masks][: len(sizes.ins)]


# Norms.


@axes("native_layer_norm _fused_rms_norm fused_rms_norm", reads="normalized_shape")
def _(sizes: Sizes, normalized_shape: Shape) -> list[Links]:
    n, last = len(sizes.ins[0] or sizes.outs[0] or ()), len(normalized_shape)
    weights: list[Links] = [range(n - last, n)] * (len(sizes.ins) - 1)
    return [within(last, n), *weights]


@axes("native_layer_norm_backward", reads="normalized_shape")
def _(sizes: Sizes, normalized_shape: Shape) -> list[Links]:
    n, last = len(sizes.outs[0] or ()), len(normalized_shape)
    if sizes.o:
        return [[MIX if k or d < n - last else d - n + last for d in range(len(s or ()))] for k, s in enumerate(sizes.ins)]
    return [within(last, n) if len(s or ()) == n else range(n - last, n) for s in sizes.ins]


@axes(
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update
    _batch_norm_with_update_functional batch_norm_backward native_batch_norm_backward""",
    reads="training train update",
)
def _batch_norm(sizes: Sizes, training: bool = True, train: bool = True, update: bool = True) -> list[Links]:
    n = len(sizes.outs[0] or ())
    whole = [1 if d == 1 else MIX if training and train and update else d for d in range(n)]
    if sizes.o:
        whole = [0 if d == 1 else ALONE for d in range(n)]
    return [whole if len(s or ()) == n and n > 1 else (0 if sizes.o else 1,) * len(s or ()) for s in sizes.ins]


axes("_native_batch_norm_legit_no_training _batch_norm_no_update batch_norm_no_update")(partial(_batch_norm, training=False))


@axes("native_group_norm", reads="C group")
def _(sizes: Sizes, C: int, group: int) -> list[Links]:
    """Channels are in step only if each is a group of its own."""
    return [[0, 1 if group == C else MIX, *[MIX] * (sizes.n - 2)], *[(1,)] * (len(sizes.ins) - 1)]


# Windows, resampling, single matrices: samples lie before the places.


def _places(last: int) -> Rule:
    def rule(sizes: Sizes) -> list[Links]:
        n = next(len(s) for s in sizes.ins if s is not None)
        return [within(last, len(s or ())) if len(s or ()) == n else [MIX] * len(s or ()) for s in sizes.ins]

    return rule


for _last, _names in (
    (1, """upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d reflection_pad1d replication_pad1d avg_pool1d
        max_pool1d_with_indices"""),
    (2, """avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d max_pool2d_with_indices mkldnn_max_pool2d
        mkldnn_adaptive_avg_pool2d fractional_max_pool2d max_unpool2d upsample_bilinear2d _upsample_bilinear2d_aa
        upsample_bicubic2d _upsample_bicubic2d_aa _upsample_lanczos2d_aa upsample_nearest2d _upsample_nearest_exact2d
        reflection_pad2d replication_pad2d affine_grid_generator cudnn_affine_grid_generator"""),
    (3, """avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices mkldnn_max_pool3d
        fractional_max_pool3d max_unpool3d upsample_trilinear3d upsample_nearest3d _upsample_nearest_exact3d
        reflection_pad3d replication_pad3d pixel_shuffle pixel_unshuffle"""),
):  # fmt: skip
    for _name in _names.split():
        AXES[_name] = AXES[f"{_name}_backward"] = Axes(_places(_last))


@axes("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler _grid_sampler_2d_cpu_fallback", multiplies=True)
def _(sizes: Sizes) -> list[Links]:
    return [[0, 1, *[MIX] * (sizes.n - 2)], [0, *range(2, sizes.n), ALONE]]


@axes(
    """_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward grid_sampler_2d_backward grid_sampler_3d_backward
    _cdist_backward"""
)
def _(sizes: Sizes) -> list[Links]:
    # The samples are on axis 0, of the log of sums, too, which has fewer axes.
    return [[0 if d == 0 else MIX for d in range(len(s or ()))] for s in sizes.ins]


@axes("im2col col2im")
def _(sizes: Sizes) -> list[Links]:
    n = len(sizes.own)
    return [[0 if d == 0 and sizes.n == 7 - n else MIX for d in range(n)]]


@axes(
    """linalg_det linalg_slogdet linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse linalg_svd _linalg_svd
    linalg_eigh linalg_eig linalg_qr linalg_lu_factor_ex linalg_lu lu_unpack linalg_matrix_exp linalg_pinv linalg_solve_ex
    _linalg_solve_ex linalg_lu_solve linalg_solve_triangular triangular_solve cholesky_solve linalg_householder_product
    ormqr _linalg_det _linalg_slogdet _linalg_eigh linalg_lstsq""",
)
def _(sizes: Sizes) -> list[Links]:
    """Matrices on the last two axes.  Columns of a right-hand side are taken to mix."""
    lead = max(len(s) - 2 for s in sizes.ins if s is not None)

    def of(own: Shape) -> Links:
        if len(own) == lead + 1 and list(own) == list(sizes.out):  # vectors
            return within(1, len(own))
        before = broadcast(sizes.out[:lead], own[:-2])
        is_shared = lead > len(before) or ALONE in before  # one matrix for several: samples that are lost add up
        return [*before, *[ALONE if is_shared else MIX] * 2] if len(own) > 1 else [MIX] * len(own)

    return [of(s or ()) for s in sizes.ins]


@axes("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def _(sizes: Sizes) -> list[Links]:
    """Gates and states, N C, and biases."""
    return [(0, MIX) if len(s or ()) == 2 else (ALONE,) * len(s or ()) for s in sizes.ins]


@axes("_cudnn_rnn miopen_rnn", reads="batch_first")
def _(sizes: Sizes, batch_first: bool = False) -> list[Links] | None:
    """Sequences, T N C or N T C, weights, and states, L N C; or packed sequences."""
    given, batch = [int(not batch_first), *[1] * (len(sizes.ins) - 1)], int(not (batch_first and sizes.o == 0))
    links: list[Links] = [
        [batch if d == k else MIX for d in range(3)] if len(s or ()) == 3 else [ALONE] * len(s or ())
        for k, s in zip(given, sizes.ins)
    ]
    return links if len(sizes.outs[0] or ()) == 3 else None


@axes("mkldnn_rnn_layer")
def _(sizes: Sizes) -> list[Links]:
    """Time first: T N C, and states N C or 1 N C."""
    batch = 1 if sizes.n == 3 else 0
    states = [[batch if d == len(s or ()) - 2 else ALONE for d in range(len(s or ()))] for s in sizes.ins[5:]]
    return [[ALONE if sizes.o else MIX, batch, ALONE], *[[ALONE] * len(s or ()) for s in sizes.ins[1:5]], *states]
