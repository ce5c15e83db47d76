"""Random layers with an input, and random forms.  Valid by construction: nothing is drawn to be thrown away."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.nn as nn
from hypothesis import strategies as st
from torch import Tensor

from autograd_hacks.forms import (
    Bags,
    Chained,
    Concatenation,
    Convolution,
    Dense,
    Form,
    Grouping,
    Lookup,
    Outer,
    Placed,
    Zero,
    add,
    put,
    scale,
)
from autograd_hacks.forms.factored import Factored
from autograd_hacks.forms.mapped import Elementwise, InTurn, LinearMap, Mapped, Pull, Sides, mapped

small = st.integers(1, 3)


def pull_along(v: Tensor, leaf: Tensor) -> Pull:
    """The vector-Jacobian product of φ, where v = φ(leaf) has its graph."""

    def pull(rows: Tensor) -> Tensor:
        options = {"retain_graph": True, "create_graph": rows.requires_grad and torch.is_grad_enabled()}
        return torch.autograd.grad(v, leaf, rows.to(v.dtype), is_grads_batched=True, **options)[0]

    return pull


@dataclass
class Case:
    """A layer and a batch for it."""

    layer: nn.Module
    x: Tensor

    def __repr__(self) -> str:
        return f"{self.layer} on {tuple(self.x.shape)}, strides {self.x.stride()}"


@st.composite
def linears(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    fan_in, fan_out = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    between = draw(st.lists(st.integers(0, 3), max_size=3))
    layer = nn.Linear(fan_in, fan_out, bias=draw(st.booleans()))
    return Case(layer.double(), torch.randn(draw(st.integers(0, 4)), *between, fan_in, dtype=torch.float64))


@st.composite
def convs(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    dims, groups = draw(small), draw(small)
    per_axis = st.tuples(*[small] * dims)
    kernel, dilation = draw(per_axis), draw(per_axis)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.one_of(st.just("valid"), st.just("same"), st.tuples(*[st.integers(0, 2)] * dims)))
    stride = (1,) * dims if padding == "same" else draw(per_axis)
    # Room for the dilated kernel without padding, and for the reflection of the widest padding.
    room = [max((k - 1) * d + 1, k * d + 1, 3) for k, d in zip(kernel, dilation)]
    size = [extent + draw(st.integers(0, 2)) for extent in room]
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](
        groups * draw(small if dims < 3 else st.integers(1, 2)),
        groups * draw(small if dims < 3 else st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    x = torch.randn(draw(st.integers(1, 3)), layer.in_channels, *size, dtype=torch.float64)
    if dims == 2 and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    return Case(layer.double(), x)


@st.composite
def transposed_convs(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    dims, groups = draw(small), draw(small)
    per_axis = st.tuples(*[small] * dims)
    kernel, stride, dilation = draw(per_axis), draw(per_axis), draw(per_axis)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation))
    padding = tuple(draw(st.integers(0, (d * (k - 1)) // 2)) for k, d in zip(kernel, dilation))
    layer = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims](
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, stride=stride, padding=padding,
        output_padding=extra, groups=groups, bias=draw(st.booleans()), dilation=dilation,
    )  # fmt: skip
    size = draw(st.tuples(*[st.integers(1, 3)] * dims))
    return Case(layer.double(), torch.randn(draw(st.integers(1, 3)), layer.in_channels, *size, dtype=torch.float64))


@st.composite
def embeddings(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    entries = draw(st.integers(2, 5))
    layer = nn.Embedding(
        entries,
        draw(small),
        padding_idx=draw(st.sampled_from([None, 0, 1, -1])),
        max_norm=draw(st.sampled_from([None, 0.5])),
        norm_type=draw(st.sampled_from([1.0, 2.0])),
    )
    return Case(layer.double(), torch.randint(entries, (draw(st.integers(1, 4)), *draw(st.lists(small, max_size=2)))))


@st.composite
def embedding_bags(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    entries = draw(st.integers(2, 5))
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    layer = nn.EmbeddingBag(entries, draw(small), mode=mode, padding_idx=draw(st.sampled_from([None, 0, -1])))
    return Case(layer.double(), torch.randint(entries, (draw(st.integers(1, 4)), draw(st.integers(1, 4)))))


@st.composite
def norms(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    bias, samples = draw(st.booleans()), draw(st.integers(1, 3))
    shape = draw(st.lists(small, min_size=1, max_size=2))
    between = draw(st.lists(small, max_size=2))
    channels, spatial = 2 * draw(st.integers(1, 2)), [draw(st.integers(2, 3)) for _ in range(draw(small))]
    dims = len(spatial) - 1
    kind = draw(st.sampled_from(["layer", "rms", "group", "batch", "sync", "instance"]))
    eps = draw(st.sampled_from([1e-5, 0.1]))
    running = draw(st.booleans())
    layer = {
        "layer": lambda: nn.LayerNorm(shape, bias=bias, eps=eps),
        "rms": lambda: nn.RMSNorm(shape, eps=draw(st.sampled_from([None, eps]))),
        "group": lambda: nn.GroupNorm(draw(st.sampled_from([1, 2, channels])), channels, eps=eps),
        "batch": lambda: [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims](channels, eps=eps),
        "sync": lambda: nn.SyncBatchNorm(channels, eps=eps),
        "instance": lambda: [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][dims](
            channels, eps=eps, affine=True, track_running_stats=running
        ),
    }[kind]()
    for p in layer.parameters():
        nn.init.normal_(p)
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 2)
        del name
    layer = layer.double().train(kind in ("layer", "rms", "group") or (kind == "instance" and draw(st.booleans())))
    size = [*between, *shape] if kind in ("layer", "rms") else [channels, *spatial]
    return Case(layer, torch.randn(samples, *size, dtype=torch.float64))


@st.composite
def prelus(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    channels = draw(small)
    size = draw(st.lists(small, max_size=2))
    layer = nn.PReLU(draw(st.sampled_from([1, channels])))
    shape = [channels, *size] if layer.num_parameters > 1 or draw(st.booleans()) else []
    return Case(layer.double(), torch.randn(draw(st.integers(1, 4)), *shape, dtype=torch.float64))


layers = st.one_of(linears(), convs(), transposed_convs(), embeddings(), embedding_bags(), norms(), prelus())


class Minimal(Form):
    """A form of a user's that defines what a form must and no more: row n of J is numbers[n] times one pattern."""

    def __init__(self, numbers: Tensor, pattern: Tensor) -> None:
        self.numbers, self.pattern = numbers, pattern
        self.samples, self.shape = len(numbers), pattern.shape

    @property
    def like(self) -> Tensor:
        return self.numbers

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        return put(torch.tensordot(self.numbers, self.pattern, 0), out, factor)

    def __getitem__(self, index: slice | Tensor) -> Form:
        return Minimal(self.numbers[index], self.pattern)


@st.composite
def leaf_forms(draw: st.DrawFn, samples: int, shape: tuple[int, ...]) -> Form:
    """A form that is made of no other.  shape: (O, C, K), or (O, I)"""
    kind = draw(
        st.sampled_from(["dense", "minimal", "zero", "outer", "lookup", "bags", *["convolution"] * (len(shape) == 3)])
    )
    positions = draw(st.integers(1 if kind == "convolution" else 0, 4))
    g = torch.randn(samples, positions, shape[0], dtype=torch.float64)
    if kind == "dense":
        return Dense(torch.randn(samples, *shape, dtype=torch.float64))
    if kind == "minimal":
        return Minimal(torch.randn(samples, dtype=torch.float64), torch.randn(shape, dtype=torch.float64))
    if kind == "zero":
        return Zero(samples, torch.Size(shape), torch.zeros(1, dtype=torch.float64))
    if kind == "outer" and draw(st.booleans()):  # of a parameter that is seen as another matrix
        g = torch.randn(samples, positions, prod(shape[:-1]), dtype=torch.float64)
        return Outer(g, torch.randn(samples, positions, shape[-1], dtype=torch.float64), torch.Size(shape))
    if kind == "outer":
        return Outer(g, torch.randn(samples, positions, prod(shape[1:]), dtype=torch.float64), torch.Size(shape))
    if kind == "bags" and len(shape) == 2:
        bags = torch.randint(samples, (positions * samples,)).sort()[0] if samples else torch.zeros(0, dtype=torch.long)
        factors = (torch.randn(size, dtype=torch.float64) for size in ((samples, shape[1]), bags.shape))
        return Bags(*factors, torch.randint(shape[0], bags.shape), bags, shape[0])
    if kind == "bags":  # entries of features of their own, as of the largest in a bag
        index = torch.randint(prod(shape), (samples, positions))
        return Lookup(index, torch.randn(samples, positions, 1, dtype=torch.float64), prod(shape), torch.Size(shape))
    if kind == "lookup":
        index = torch.randint(shape[0], (samples, positions))
        g = torch.randn(samples, positions, prod(shape[1:]), dtype=torch.float64)
        return Lookup(index, g, shape[0], torch.Size(shape))
    _, channels, kernel = shape
    # Without groups, so that one shape fits all kinds; the laws of rules draw the groups.
    stride, padding, dilation = draw(small), draw(st.integers(0, 2)), draw(small)
    length = (positions - 1) * stride + (kernel - 1) * dilation + 1 + draw(st.integers(0, stride - 1))
    padding = min(padding, (length - 1) // 2)
    x = torch.randn(samples, channels, length - 2 * padding, dtype=torch.float64)
    return Convolution(x, g.mT, torch.Size(shape), [stride], [padding], [dilation], 1)


@st.composite
def maps(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], LinearMap]:
    """A linear map of gradients into a shape, and the shape that these have."""
    kind = draw(st.sampled_from(["elementwise", "diagonals", "sides", "in turn"]))
    if kind == "elementwise":
        return shape, Elementwise(torch.randn(shape, dtype=torch.float64))
    if kind == "in turn":
        inner, first = draw(maps(shape))
        before, second = draw(maps(inner))
        return before, InTurn([second, first])
    sizes = shape[0], prod(shape[1:])
    if kind == "diagonals" or len(shape) != 2:
        left, right = (torch.randn(size, dtype=torch.float64) if draw(st.booleans()) else None for size in sizes)
        return shape, Sides(left, right)
    fans = draw(small), draw(small)
    flat = [(fans[1],)] if fans[1] == sizes[1] else [(fans[1],), (1, fans[1]), (fans[1], 1)]  # else it keeps its axes
    inner = (fans[0], *draw(st.sampled_from(flat)))
    return inner, Sides(torch.randn(sizes[0], fans[0]).double(), torch.randn(fans[1], sizes[1]).double())


@st.composite
def forms(draw: st.DrawFn, samples: int, shape: tuple[int, ...], depth: int = 2) -> Form:
    """Any form, made of others up to `depth` times."""
    kinds = ["leaf", "sum", "grouping", "concatenation", "passes", "placed", "chained", "weighted", "mapped"]
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "placed":
        ends = sorted(draw(st.sets(st.integers(0, shape[0]), min_size=2, max_size=4)))
        slices = draw(st.sets(st.sampled_from(list(pairwise(ends))), min_size=1))
        entries = {(a, b): draw(forms(samples, (b - a, *shape[1:]), depth - 1)) for a, b in sorted(slices)}
        return Placed(entries, torch.Size(shape))
    if kind == "chained":
        theta = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        v = torch.cat([theta.sin(), theta.square()])
        form = draw(forms(samples, tuple(v.shape), depth - 1))
        return Chained(form, pull_along(v, theta), theta.shape, theta)
    if kind == "mapped":
        inner, by = draw(maps(shape))
        form = draw(forms(samples, inner, depth - 1))
        return mapped(form, by) if draw(st.booleans()) else Mapped(form, by)
    if kind == "weighted":
        return scale(draw(forms(samples, shape, depth - 1)), torch.randn(samples, dtype=torch.float64))
    if kind == "sum":
        return add([draw(forms(samples, shape, depth - 1)), draw(forms(samples, shape, depth - 1))])
    if kind == "grouping" and samples:
        many = draw(st.integers(0, 5))
        rows = torch.tensor(draw(st.lists(st.integers(0, samples - 1), min_size=many, max_size=many)), dtype=torch.long)
        return Grouping(draw(forms(many, shape, depth - 1)), rows, samples)
    if kind == "concatenation":
        first = draw(st.integers(0, samples))
        return Concatenation([draw(forms(first, shape, depth - 1)), draw(forms(samples - first, shape, depth - 1))])
    passes = draw(st.sampled_from([k for k in (1, 2, 3) if samples % k == 0])) if kind == "passes" else 1
    if passes > 1:
        each = samples // passes
        first = draw(leaf_forms(each, shape))
        if isinstance(first, Factored):
            place = draw(st.sampled_from(first.varies))
            below = [first, *(first.varied(place, torch.randn_like(first.held[place])) for _ in range(passes - 1))]
        else:
            below = [first, *(draw(leaf_forms(each, shape)) for _ in range(passes - 1))]
        if draw(st.booleans()):  # passes of ragged rows
            rows = torch.randint(each, (each,)) if each else torch.zeros(0, dtype=torch.long)
            below = [Grouping(form, rows, each) for form in below]
        return Concatenation.of(below)
    return draw(leaf_forms(samples, shape))


# Mistakes of rules: what they make of an input and of the gradient at the output


def swapped(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x[[1, 0, *range(2, len(x))]], g[[1, 0, *range(2, len(g))]]


def permuted_fold(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Positions as T·N where they are N·T, in input and gradient alike: the sum of the rows stays right."""
    return tuple(t.flatten(0, 1).unflatten(0, t.shape[1::-1]).transpose(0, 1).reshape(t.shape) for t in (x, g))


def mixed_pair(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.cat([g[:2].mean(0, keepdim=True).expand_as(g[:2]), g[2:]]) if x.ndim == 2 else swapped(x, g)[1]
