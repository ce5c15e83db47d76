"""Runs a function, or a module, for each sample with copies of the parameters of its own, in the user's graph: autograd
brings each copy its sample's gradient, of losses of any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from autograd_hacks.errors import SamplesMixed, where
from autograd_hacks.probe.layout import Layout, Layouts
from autograd_hacks.rules.recompute import is_recomputed
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import tensors_of
from autograd_hacks.support.untouched import untouched

Leaves = list[Any]


def by_sample(
    func: Callable[..., Any], args: Any, kwargs: Any, copies: Mapping[int, Tensor], places: Mapping[int, Layout], to: Layout,
    samples: int,
) -> Tensor:  # fmt: skip
    """What a function returns that is called for each sample alone, its output laid out as for all of them at once.

    copies, places: by a leaf's number in (args, kwargs) what stands in its place for each sample, ``(N, *shape)``, and where
    samples are in the other tensors that have some    to: where they are in the output
    """
    leaves, spec = tree_flatten((args, kwargs))
    parts = [places[n].samples_first(leaves[n], samples) for n in places]

    def one(own: Sequence[Tensor], sample: Sequence[Tensor]) -> Tensor:
        mine = list(leaves)
        for n, x in zip(copies, own):
            mine[n] = x
        for (n, at), x in zip(places.items(), sample):
            mine[n] = at.batch_of_one(x)
        found_args, found_kwargs = tree_unflatten(mine, spec)
        return to.one_of(func(*found_args, **found_kwargs))

    every = list(copies.values())
    try:
        with no_word_of_speed():
            rows = vmap(one, randomness="different")(every, parts)
    except RuntimeError:  # what vmap can't run, by torch's own page on its limits
        rows = torch.stack([one([x[n] for x in every], [x[n] for x in parts]) for n in range(samples)])
    return to.back(rows).contiguous()  # as a function of the batch returns it, which may be viewed otherwise


@contextmanager
def no_word_of_speed() -> Iterator[None]:
    """A context in which vmap doesn't warn of operations that it runs sample by sample."""
    functorch: Any = torch._C._functorch  # torch has no types for these
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


def by_group(leaves: Leaves, copies: Mapping[int, Tensor]) -> Tensor:
    """The products of rows, group by group, by copies of the groups' matrices, one stack for each row.

    leaves: the rows, ``(R, I)``, the stack, and where each group ends    copies: by the stack's number R groups I O
    """
    ((number, stacks),) = copies.items()
    rows, ends = (x for n, x in enumerate(leaves) if isinstance(x, Tensor) and n != number)
    each = torch.arange(len(rows), device=rows.device)
    groups = torch.searchsorted(ends.long(), each, right=True)
    return torch.bmm(rows[:, None], stacks[each, groups].to(rows.dtype))[:, 0]


def module_by_sample(
    module: nn.Module, arguments: Any, copies: Mapping[str, Tensor], places: Layouts, layouts: Layouts, samples: int
) -> list[Tensor]:
    """What a module returns that runs for each sample alone, laid out as for all of them at once.

    copies: of its parameters, by name, ``(N, *shape)``    places, layouts: where samples are in the tensors among its
    arguments, and in those that it returns
    """
    leaves, spec = tree_flatten(arguments)
    numbers = [n for n, x in enumerate(leaves) if isinstance(x, Tensor)]
    parts = {n: at.samples_first(leaves[n], samples) for n, at in zip(numbers, places) if at is not None}
    rows: list[list[Tensor]] = []
    with Switch.paused_here(), untouched(module):
        for sample in range(samples):
            mine = list(leaves)
            for n, at in zip(numbers, places):
                mine[n] = leaves[n] if at is None else at.batch_of_one(parts[n][sample])
            args, kwargs = tree_unflatten(mine, spec)
            with _reparametrize_module(module, {name: own[sample] for name, own in copies.items()}):
                outputs = tensors_of(module.forward(*args, **kwargs))
            rows.append([x if at is None else at.one_of(x) for x, at in zip(outputs, layouts)])
    return [own[0] if at is None else at.back(torch.stack(own)) for own, at in zip(map(list, zip(*rows)), layouts)]


def check_alike(
    path: str,
    module: nn.Module,
    seen: Sequence[Tensor],
    found: Sequence[Tensor],
    fixed: Sequence[bool],
    precision: torch.dtype | None,
) -> None:
    """Raises where a module has returned something else for each sample than for the batch.

    fixed: of which outputs the numbers must be the same, too    precision: autocast's dtype, where it was on
    """
    pairs = [(x.detach(), y, own) for x, y, own in zip(seen, found, fixed)]
    alike = all(x.shape == y.shape and (not own or is_recomputed(x, y, precision)) for x, y, own in pairs)
    if len(seen) != len(found) or not alike:
        raise SamplesMixed(
            f"{where(path, module)} was run for each sample with a copy of its parameters (add_hooks(mode=...)), and came "
            "out different than for the batch: its samples mix, or where they are in its arguments can't be told."
        )
