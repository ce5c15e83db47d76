"""Squared norms and projections as operations that a compiler doesn't trace into.  They read values (rows are written out if
positions cancel), or draw a random map."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from autograd_hacks.forms.base import Dense, Form
from autograd_hacks.forms.convolution import Convolution
from autograd_hacks.forms.experts import Experts
from autograd_hacks.forms.lookup import Lookup
from autograd_hacks.forms.outer import Outer
from autograd_hacks.forms.projection import RandomMap
from autograd_hacks.support.contexts import without_autocast

_operation = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))  # values decide the way


@_operation("autograd_hacks::squares_of_products")
def _of_products(left: Tensor, right: Tensor) -> Tensor:
    return _norms(Outer(left, right))


@_operation("autograd_hacks::squares_of_lookups")
def _of_lookups(g: Tensor, index: Tensor, entries: int) -> Tensor:
    return _norms(Lookup(index, g, entries))


@_operation("autograd_hacks::squares_of_windows")
def _of_windows(
    g: Tensor,
    x: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    return _norms(Convolution(x, g, torch.Size(shape), stride, padding, dilation, groups))


for _known in (_of_products, _of_lookups, _of_windows):
    _known.register_fake(lambda g, *_: g.new_empty(g.shape[0]))


def _norms(form: Form) -> Tensor:
    with without_autocast([form.like]):
        return form.norms().square()


def squares(form: Form) -> Tensor:
    """The rows' squared norms, N; can be traced into any graph."""
    if isinstance(form, Outer):
        return _of_products(form.left, form.right)
    if isinstance(form, Lookup):
        return _of_lookups(form.g, form.index, form.entries)
    if isinstance(form, Convolution):
        settings = [list(x) for x in (form.shape, form.stride, form.padding, form.dilation)]
        return _of_windows(form.g, form.x, *settings, form.groups)
    if isinstance(form, Experts):
        return form.squares()
    return form.matrix().square().sum(1)


@_operation("autograd_hacks::projection_of_products")
def _project_products(left: Tensor, right: Tensor, name: str, shape: Sequence[int], dim: int, seed: int) -> Tensor:
    return _projection(Outer(left, right, torch.Size(shape)), name, dim, seed)


@_operation("autograd_hacks::projection_of_lookups")
def _project_lookups(g: Tensor, index: Tensor, entries: int, name: str, dim: int, seed: int) -> Tensor:
    return _projection(Lookup(index, g, entries), name, dim, seed)


@_operation("autograd_hacks::projection_of_rows")
def _project_rows(rows: Tensor, name: str, dim: int, seed: int) -> Tensor:
    return _projection(Dense(rows), name, dim, seed)


for _projects in (_project_products, _project_lookups, _project_rows):
    _projects.register_fake(lambda x, *given: x.new_empty(x.shape[0], given[-2]))


def _projection(form: Form, name: str, dim: int, seed: int) -> Tensor:
    with without_autocast([form.like]):
        return form.project(RandomMap(name, form.shape, dim, seed)).to(form.like.dtype)


def projection(form: Form, name: str, dim: int, seed: int) -> Tensor:
    """J R, (N, dim), for the random map of a parameter; can be traced into any graph."""
    if isinstance(form, Outer):
        return _project_products(form.left, form.right, name, list(form.shape), dim, seed)
    if isinstance(form, Lookup):
        return _project_lookups(form.g, form.index, form.entries, name, dim, seed)
    return _project_rows(form.dense(), name, dim, seed)
