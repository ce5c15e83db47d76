"""Runs a labelled joint graph with forms instead of the sums over samples."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vmap

from autograd_hacks.compiled.labels import Contraction, Joint, Labels, behind, name_of, size
from autograd_hacks.forms import Convolution, Dense, Form, Lookup, Outer, add
from autograd_hacks.forms.base import written_bytes
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.formulas.conv import weight_gradient
from autograd_hacks.formulas.embedding import lookup
from autograd_hacks.formulas.views import reshaped, transposed
from autograd_hacks.graph.label import SUM, At
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.internals import tree_flatten, tree_leaves, tree_unflatten

aten: Any = torch.ops.aten


def unfolded(x: Tensor, at: At, samples: int) -> Tensor:
    """The tensor with the samples on axis 0: N *outer ... inner ..., the other axes in their order."""
    inner = x.shape[at.dim] // (samples * at.outer) if at.inner > 1 else 1  # it may differ from the traced size
    middle = ([at.outer] if at.outer > 1 else []) + [samples, inner]
    return x.reshape(*x.shape[: at.dim], *middle, *x.shape[at.dim + 1 :]).movedim(at.dim + (at.outer > 1), 0)


def over(w: Tensor, x: Tensor, at: At) -> Tensor:
    """N weights, shaped to be multiplied by a tensor with samples at ``at``."""
    samples = w.shape[0]
    if at != At(at.dim):
        w = w.view(1, samples, 1).expand(at.outer, samples, x.shape[at.dim] // (samples * at.outer)).reshape(-1)
    return w.view(-1, *[1] * (x.ndim - at.dim - 1)).to(torch.bool if w.dtype == torch.bool else x.dtype)


class Run(fx.Interpreter):
    """A run of a graph, also on tensors with other strides than traced."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph.owning_module, garbage_collect_values=False, graph=graph)  # type: ignore[arg-type]  # it has one

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (aten.view.default, aten._unsafe_view.default):
            return args[0].reshape(args[1])
        if target is aten.slice_scatter.default and len(args) > 4:  # vmap's rule for it counts up to the end that is given
            args = (*args[:4], min(args[4], args[0].shape[args[2]]), *args[5:])
        return target(*args, **kwargs)


class TakenApart(Run):
    """One run of a joint graph.

    values: the values of the placeholders, in their order
    labels: None for a batch of one sample, where every gradient is the sample's.  Axes of size 1 would be ambiguous
    samples: N of this run
    """

    def __init__(self, joint: Joint, labels: Labels | None, values: Sequence[Any]) -> None:
        super().__init__(joint.graph)
        gradients = [*joint.gradients.values()]
        self.joint, self.labels, self.samples = joint, labels or Labels(joint.samples), joint.samples
        self.forms: dict[fx.Node, Any] = {}  # for each sum over samples a form, or several for several results
        self._rows: dict[fx.Node, Tensor] = {}  # the written-out rows of gradients
        self._needed = self.labels.found.keys() | behind([*joint.outputs, *([] if labels else gradients)])
        self.run(*values, enable_io_processing=False)
        if labels is None:
            self._rows = {node: self.env[node][None][: self.samples] for node in gradients}
            self.forms = {node: Dense(rows) for node, rows in self._rows.items()}

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "output" or (node.op == "call_function" and node not in self._needed):
            return None
        if self.labels[node] is SUM:
            self.forms[node] = self._form(node)
            return None
        # Torch's own method would note where each operation comes from, for which compiling takes longer.
        found = getattr(self, str(node.op))(node.target, *self.fetch_args_kwargs_from_env(node))
        if node in self.joint.axes:
            self.samples = found.shape[self.joint.axes[node]]
        return found

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An operation's arguments.  Of sums over samples only the sizes are read."""
        sums = {x: self.forms[x].like.new_empty(x.meta["val"].shape) for x in node.all_input_nodes if self.labels[x] is SUM}
        values = self.env | sums if sums else self.env
        args: Any = fx.map_arg(node.args, values.__getitem__)
        if node.target is aten.convolution_backward.default and self.labels[node]:
            args = (*args[:-1], [args[-1][0], False, False])
        return args, fx.map_arg(node.kwargs, values.__getitem__)

    def _flat(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[list[Any], Any]:
        """An operation's arguments in one list, and the tree that they came from."""
        flat, spec = tree_flatten((node.args, node.kwargs))
        return [values.get(x) if isinstance(x, fx.Node) else x for x in flat], spec

    def _called(self, node: fx.Node, values: list[Any], spec: Any, output: int | None) -> Any:
        """An operation's result from its flattened arguments.  output: the number of the only one that is wanted"""
        if output is not None and node.target is aten.convolution_backward.default:
            values[-3:] = [output == k for k in range(3)]
        made = self.call_function(node.target, *tree_unflatten(values, spec))
        return made if output is None else made[output]

    def _each(self, node: fx.Node, parts: Mapping[int, Tensor], at: Mapping[int, At], output: int | None = None) -> Any:
        """An operation for each sample.

        parts: {place among the flattened arguments: its part for each sample}    at: where the samples were in some of them
        """
        values, spec = self._flat(node, self.env)

        def one(*tensors: Tensor) -> Any:
            own = list(values)
            for n, x in zip(parts, tensors):
                own[n] = x.flatten(at[n].dim, at[n].dim + 1) if n in at and at[n].outer > 1 else x
            return self._called(node, own, spec, output)

        return vmap(one)(*parts.values())

    # Forms.

    def _form(self, node: fx.Node) -> Form | list[Form]:
        contraction = self.labels.contraction_of(node)
        if contraction is not None:
            return self._contracted(contraction)
        if node.target is operator.getitem:
            one: Form = self.forms[node.args[0]][node.args[1]]  # type: ignore[index]
            return one
        if isinstance(node.meta["val"], tuple | list):
            return [Dense(rows) for rows in self._row_by_row(node)]
        sums = [x for x in node.all_input_nodes if self.labels[x] is SUM]
        name, first, sizes = name_of(node), self.forms[sums[0]], node.meta["val"].shape
        if name == "view":  # whose sizes may differ in this run
            sizes = torch.Size(fx.map_arg(node.args[1], self.env.__getitem__))  # type: ignore[arg-type]  # sizes
        elif not all(isinstance(s, int) for s in sizes):
            return Dense(self._row_by_row(node))
        if name in ("view", "clone", "alias", "unsqueeze", "squeeze"):
            return reshaped(first, sizes)
        if name == "copy" and sums == [node.args[1]] and first.shape == sizes:
            return first
        if name == "permute" and len(sizes) == 2:
            return transposed(first, (0, 1), sizes) if node.args[1][0] % 2 else first  # type: ignore[index, operator]  # a list of sizes
        if name == "add" and len(sums) == 2 and not node.kwargs and first.shape == self.forms[sums[1]].shape:
            return add([first, self.forms[sums[1]]])
        return Dense(self._row_by_row(node))

    def _row_by_row(self, node: fx.Node) -> Any:
        """An operation on sums over samples, for each sample."""
        if node.target is aten.cat.default:  # torch's vmap rule for it holds for one N only
            given: Any = node.args
            tensors, dim = given[0], given[1] if len(given) > 1 else 0
            rows = [
                self.forms[x].dense() if x in self.forms else self.env[x].expand(self.samples, *self.env[x].shape)
                for x in tensors
            ]
            return torch.cat(rows, dim + 1 if dim >= 0 else dim)
        flat: list[Any] = tree_leaves((node.args, node.kwargs))
        return self._each(node, {n: self.forms[x].dense() for n, x in enumerate(flat) if self.labels[x] is SUM}, {})

    def _contracted(self, found: Contraction) -> Form:
        node, (values, _) = found.node, self._flat(found.node, self.env)
        is_plain = all((at.dim, at.outer, at.inner) == (0, 1, 1) for at in found.at.values())
        if node.target is aten.mm.default:
            return self._outer(values, found.at)
        if node.target is aten.convolution_backward.default and is_plain:
            return self._convolved(values, node.args, found.output)
        if node.target is aten.embedding_dense_backward.default:
            g, index = (unfolded(values[n], found.at[n], self.samples) for n in (0, 1))
            padding = node.args[3] if node.args[3] >= 0 else None  # type: ignore[operator]
            return lookup(index.expand(g.shape[:-1]), g, torch.Size((node.args[2], g.shape[-1])), padding)  # type: ignore[arg-type]
        if node.target is aten._embedding_bag_backward.default:
            return self._of_bags(values, found.at)
        parts = {n: unfolded(values[n], at, self.samples) for n, at in found.at.items()}
        if name_of(node) in ("index_put", "scatter_add") and 0 not in parts:
            # vmap expands the destination, and inductor (torch 2.13, pytorch#183986) then writes all samples to one memory.
            parts[0] = values[0].new_zeros([self.samples, *values[0].shape]) + values[0]
        return Dense(self._each(node, parts, found.at, found.output))

    def _of_bags(self, values: Sequence[Any], at: Mapping[int, At]) -> Form:
        """The form of sums or means of a table's entries."""
        g, index, lengths, entries, mode, weights = (values[n] for n in (0, 1, 4, 6, 8, 10))
        index, padding = unfolded(index, at[1], self.samples), values[11] if len(values) > 11 else -1
        g = (g / lengths[:, None] if mode == 1 else g)[:, None].expand(*index.shape, g.shape[-1])
        g = g if weights is None else g * weights.view(*index.shape, 1)
        return lookup(index, g, torch.Size((entries, g.shape[-1])), padding if padding >= 0 else None)

    def _outer(self, values: Sequence[Tensor], at: Mapping[int, At]) -> Outer:
        """The form of a product of left (O, M) and right (M, I), with the samples in M."""
        if (at[0].outer, at[0].inner) == (1, 1):
            return Outer(values[0].permute(1, 0), values[1])
        left, right = unfolded(values[0].mT, at[0].moved(0), self.samples), unfolded(values[1], at[1], self.samples)
        return Outer(left.flatten(1, -2), right.flatten(1, -2))  # N *outer inner O, and I

    def _convolved(self, values: Sequence[Any], args: Sequence[Any], output: int | None) -> Form:
        g, x, w = values[:3]
        if output == 2:
            return Dense(g.flatten(2).sum(2))
        stride, padding, dilation, is_transposed, _, groups = args[4:10]
        x = x.expand(g.shape[0], *x.shape[1:])
        return weight_gradient(x.conj(), g, w.shape, stride, padding, dilation, groups, is_transposed)

    # Results from forms.

    def rows(self, gradient: fx.Node) -> Tensor:
        """A gradient's rows, N × the parameter's shape."""
        if gradient not in self._rows:
            self._rows[gradient] = self.forms[gradient].dense()
        return self._rows[gradient]

    def norms(self, max_bytes: int = 0) -> Tensor:
        """The norms over all parameters, N in double precision.

        max_bytes: bytes of rows that may be written out, where that is cheaper, and are kept for `weighted`
        """
        found: list[Tensor] = []
        for gradient in self.joint.gradients.values():  # of two parameters it may be the same
            if (form := self.forms.get(gradient)) is None:  # no sample's loss reaches the parameter
                continue
            held = size(written_bytes(form))
            is_cheaper = isinstance(form, Dense) or float(form.saving(fresh=True)) > 0  # or the rows are there already
            if held <= max_bytes and gradient not in self._rows and is_cheaper:
                self.rows(gradient)
                max_bytes -= held
            found.append(self._squares(form, self._rows.get(gradient)))
        return reduce(torch.add, found).sqrt()

    def rounded(self, norms: Tensor) -> Tensor:
        """Norms in the parameters' precision, float32 at least."""
        kinds = (self.forms[node].like.dtype for node in self.joint.gradients.values() if node in self.forms)
        return norms.to(reduce(torch.promote_types, kinds, torch.float32))

    @staticmethod
    def _squares(form: Form, rows: Tensor | None) -> Tensor:
        """Squares in double precision, where squares of floats don't overflow."""
        if rows is None and type(form) is Outer and form.positions == 1:
            factors = form.flat or [x[:, 0] for x in form.held]
            lengths = (torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in factors)
            return torch.mul(*lengths).square()
        if rows is None and isinstance(form, Dense):
            rows = form.values
        if rows is None:
            return squares(form).to(torch.float64)
        # A number's rows have no second axis.
        return torch.linalg.vector_norm(rows[:, None].flatten(1), dim=1, dtype=torch.float64).square()

    def weighted(self, w: Tensor | None = None, taken: Tensor | None = None) -> dict[fx.Node, Tensor]:
        """Σₙ wₙ gₙ by node, from the original sums with weighted gradients, or from rows that were kept.

        w: N; None for ones
        taken: N booleans, which samples enter the sum; None for all. The others need not be finite
        """
        values = dict(self.env)
        w = w if w is None or taken is None else w.where(taken, 0)
        for node in self.joint.graph.nodes:
            if self.labels[node] is not SUM or node.op != "call_function":
                continue
            found = self.labels.contraction_of(node) or Contraction(node, {}, 0)
            own, spec = self._flat(found.node, values)
            if taken is not None:  # 0 · inf is NaN
                for n, at in found.at.items():
                    own[n] = own[n].where(over(taken, own[n], at), 0) if own[n].is_floating_point() else own[n]
            if w is not None and found.at:
                own[found.gradient] = own[found.gradient] * over(w, own[found.gradient], found.at[found.gradient])
            values[node] = self._called(found.node, own, spec, found.output)
        sums = {node: values[node] for node in self.forms}
        for gradient, rows in self._rows.items():
            kept = rows if taken is None else rows.where(taken.view(-1, *[1] * (rows.ndim - 1)), 0)
            sums[gradient] = kept.sum(0) if w is None else torch.tensordot(w.to(rows.dtype), kept, 1)
        return sums


def squares(form: Form) -> Tensor:
    """Squared norms of rows, N: an operation that no compiler traces into, since values decide how it computes them."""
    if isinstance(form, Outer):
        return _squares("Outer", (form.left, form.right), list(form.shape))
    if isinstance(form, Lookup):
        return _squares("Lookup", (form.g, form.index), [form.entries])
    if isinstance(form, Convolution):
        lists = form.shape, form.stride, form.padding, form.dilation
        return _squares("Convolution", form.held, [form.groups, *(n for numbers in lists for n in numbers)])
    return form.matrix().square().sum(1)


@torch.library.custom_op("autograd_hacks::squares", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _squares(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    with without_autocast(held[:1]):
        return _made(kind, held, numbers).norms().square()


@_squares.register_fake
def _(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    return held[0].new_empty(held[0].shape[0], dtype=accumulation_dtype(held[0].dtype))


def _made(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Form:
    if kind == "Outer":
        return Outer(held[0], held[1], torch.Size(numbers))
    if kind == "Lookup":
        return Lookup(held[1], held[0], numbers[0])
    n, lists = held[0].ndim - 2, list(numbers[1:])
    stride, padding, dilation = (lists[2 + n * k : 2 + n * (k + 1)] for k in (1, 2, 3))
    return Convolution(held[0], held[1], torch.Size(lists[: 2 + n]), stride, padding, dilation, numbers[0])
