"""The user's hooks on gradients, of tensors, of nodes and of modules.  They stand in no graph, and can move samples.

Those that are registered while a model is hooked are watched: a hook that only looks is left alone, and one that changes
gradient must keep samples apart."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import BackwardHook

from autograd_hacks.capture.backward import Backward
from autograd_hacks.graph.label import Label, One, Owned, entries, on_axis
from autograd_hacks.support.contexts import random_state, with_random_state
from autograd_hacks.support.graph import NEW, Leaf
from autograd_hacks.support.internals import current_node, made, sequence_number
from autograd_hacks.support.layout import differs, rounding_of
from autograd_hacks.support.trees import version_of

Labels = Mapping[int, Sequence[Label]]
"""By a node's number, whose the gradients at its outputs are.  Of others, as a loss's, each row is taken for one's own."""

_OWN = __name__.partition(".")[0] + "."


def since(first: int) -> list[tuple[dict[int, Any], int]]:
    """The user's hooks that were registered since a count, as dictionaries that torch calls, and keys."""
    found = ((handle.hooks_dict_ref(), handle.id) for handle in NEW if handle.id >= first)
    return [(hooks, key) for hooks, key in found if hooks and key in hooks and not _is_own(hooks[key])]


def _is_own(hook: Any) -> bool:
    while isinstance(hook, partial | _Watched):
        hook = hook.func if isinstance(hook, partial) else hook.hook
    return (getattr(hook, "__module__", None) or "").startswith(_OWN)


class Watch(NamedTuple):
    """Watches the hooks that were registered in a forward, or later."""

    backward: weakref.ref[Backward]
    labels: Callable[[], Labels] | None  # gives those of the forward; None if they are unknown
    samples: int

    def over(self, hooks: Sequence[tuple[dict[int, Any], int]]) -> None:
        new = [(own, key) for own, key in hooks if key in own and self.backward not in watching(own[key])]
        labels = self.labels() if new and self.labels is not None else None
        for own, key in new:
            own[key] = _Watched(self.backward, own[key], labels, self.samples)

    def late(self, first: int) -> None:
        """Refuses a pass that has ended, in which hooks were registered: they may have changed gradient unseen."""
        for hooks_of, key in since(first):
            if (own := self.backward()) is not None:
                own.refuse(
                    f"samples mix, or may: {named(hooks_of[key])} was registered while the pass ran, and may have changed "
                    "gradient unseen. Register it before the pass."
                )


def watching(hook: Any) -> tuple[weakref.ref[Backward], ...]:
    return hook.watching if isinstance(hook, _Watched) else ()


class _Watched:
    """A hook that replaces the user's and calls it."""

    def __init__(
        self, backward: weakref.ref[Backward], hook: Callable[..., Any], labels: Labels | None, samples: int
    ) -> None:
        self.backward, self.hook, self.labels, self.samples = backward, hook, labels, samples
        self.watching = (*watching(hook), backward)  # one hooked model after the other
        self.users: Callable[..., Any] = hook.users if isinstance(hook, _Watched) else hook

    def __call__(self, *args: Any) -> Any:
        backward = self.backward()
        if backward is None or not backward.hears():
            return self.hook(*args)
        before = [(x, version_of(x)) for x in _tensors(args[0]) if x is not None]
        result = self.hook(*args)
        is_overwritten = any(version_of(x) != version for x, version in before)
        if is_overwritten or (result is not None and _changed(args[0], result)):
            self._check(backward, args, result, is_overwritten)
        return result

    def _check(self, backward: Backward, args: tuple[Any, ...], result: Any, is_overwritten: bool) -> None:
        """Called when the hook has changed gradient.  Notes it in the pass unless it keeps samples apart."""
        node: Any = current_node()
        if self.samples < 2 or type(node) is Leaf or not hasattr(node, "_input_metadata"):  # a leaf is after all uses
            return
        given, found = _tensors(args[0]), _tensors(args[0] if result is None else result)
        values = [(node, n) for n in range(len(node._input_metadata))] if len(args) < 2 else [*node.next_functions]
        if isinstance(args[0], Tensor) and len(values) > 1:  # which output's it is can be told by its shape only
            own = [v for v in values if tuple(v[0]._input_metadata[v[1]].shape) == tuple(given[0].shape)]
            values = own[:1] if len({repr(self._label(*v)) for v in own}) == 1 else []
        labels, module = [self._label(*value) for value in values], _module_of(self.users)
        # A module's full backward hook gets gradients of inputs and outputs together.
        is_of_inputs = module is not None and module.setup_output_hook.__qualname__ not in self.users.__qualname__
        moved = [label for label, x, y in zip(labels, given, found) if x is not y]
        is_known = len(labels) == len(given) and not is_of_inputs and all(isinstance(label, Owned) for label in moved)
        if not is_overwritten and is_known and self._is_apart(args, given, found, labels):
            return
        what = "overwrites gradient" if is_overwritten else "changes gradient, and not sample by sample,"
        of_inputs = "changes the gradient of a module's inputs", "register x.register_hook on the input"
        what, cure = of_inputs if is_of_inputs else (what, "a new gradient of which no entry depends on another sample")
        backward.refuse(
            f"samples mix, or may: {named(self.users)} {what} at {node.name()}. No row is known behind "
            f"it. Let the hook return None, or {cure}; or change .grad after the rows are read."
        )

    def _label(self, node: Any, number: int) -> Label:
        if node is None or self.labels is None:
            return None
        rows = [on_axis(torch.arange(x.shape[0], device="cpu"), 0, len(x.shape)) if x.shape else One(0) for x in made(node)]
        found = self.labels.get(sequence_number(node), rows)
        return found[number] if number < len(found) else None

    @torch.no_grad()
    def _is_apart(self, args: tuple[Any, ...], given: Sequence[Any], found: Sequence[Any], labels: Sequence[Label]) -> bool:
        """Whether each sample's part of the result depends on its own part of the gradients only.

        Each two samples are apart in some bit of their numbers: the hook runs again without the samples that have it."""
        owners = [
            entries(label, x.shape, self.samples, x.device) if x is not None and isinstance(label, Owned) else None
            for label, x in zip(labels, given)
        ]
        most = max((int(own.max()) for own in owners if own is not None and own.numel()), default=0)
        with with_random_state(random_state({x.device for x in given if x is not None})):
            for bit, side in product(range(most.bit_length()), (0, 1)):
                kept = [None if own is None else (own.clamp(min=0) >> bit) % 2 == side for own in owners]
                parts = [x if keep is None else x.where(keep, 0) for x, keep in zip(given, kept)]
                try:
                    again = self._again(parts, args)
                except Exception:  # the user's own pass must continue
                    return False
                for x, y, keep in zip(found, parts if again is None else _tensors(again), kept):
                    if keep is not None and (y is None or bool((differs(x, y, rounding_of(x)) & keep).any())):
                        return False
        return True

    def _again(self, parts: Sequence[Any], args: tuple[Any, ...]) -> Any:
        """What the hook makes of other gradients.  args: those that it was called with"""
        own = _module_of(self.users)
        if own is None:
            return self.users(parts[0] if isinstance(args[0], Tensor) else tuple(parts), *args[1:])
        found: Sequence[Any] = tuple(parts)
        for hook in own.user_pre_hooks:
            found = found if (again := hook(own.module, found)) is None else _tensors(again)
        return found


def _tensors(given: Any) -> Sequence[Any]:
    return (given,) if isinstance(given, Tensor) else tuple(given)


@torch.no_grad()
def _changed(given: Any, result: Any) -> bool:
    pairs = zip(_tensors(given), _tensors(result))
    return any(x is not y and (x is None or y is None or not torch.equal(x, y)) for x, y in pairs)


def _module_of(hook: Any) -> BackwardHook | None:
    """What torch keeps for the hooks of a module, if this is the hook by which it calls them."""
    cells = (cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if cell != CellType())
    return next((own for own in cells if isinstance(own, BackwardHook)), None)


def named(hook: Any) -> str:
    """A hook, as text for messages."""
    hook = hook.users if isinstance(hook, _Watched) else hook
    own, of = _module_of(hook), ""
    if own is not None:
        hooks: Any = [*own.user_pre_hooks, *own.user_hooks]
        hook, of = hooks[0] if hooks else hook, f" of a {type(own.module).__name__}"
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    at = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"the backward hook {getattr(hook, '__qualname__', type(hook).__name__)}{of}{at}"
