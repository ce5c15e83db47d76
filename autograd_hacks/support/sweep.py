"""Brings gradients through a graph as autograd's engine does, but calls no hooks, only the nodes themselves."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from autograd_hacks.errors import SamplesMixed, UnseenGradient
from autograd_hacks.support.copies import is_known, places_of
from autograd_hacks.support.graph import (
    CHECKPOINT,
    IDENTITIES,
    Leaf,
    Value,
    dtype_of,
    is_packed,
    is_users,
    made,
    nodes_behind,
    own_hook,
    put_back_by,
    shape_of,
)
from autograd_hacks.support.internals import class_of_function, functorch_config
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

Made = TypeVar("Made")

Grads = list[Tensor | None]
"""The gradients that one pass brings to a node, by the number of the node's output."""


def sweep(given: Mapping[Value, Tensor], arrive: Callable[[Node, Grads], None], ends: Collection[Node] = ()) -> None:
    """Brings gradients down to the leaves.

    given: by value, the gradient with which the pass begins
    arrive: called for each node before the node runs, with its gradients
    ends: nodes that are not called
    """

    def run() -> None:
        nodes = nodes_behind([value.node for value in given], frozenset(ends))
        left = Counter(ahead for node in nodes if node not in ends for ahead, _ in node.next_functions)  # the edges to it
        brought: dict[Node, Grads] = {}
        for value, grad in given.items():
            _add(brought, value, grad)
        ready = [node for node in dict.fromkeys(value.node for value in given) if not left[node]]
        while ready:
            node = ready.pop()
            grads = brought.pop(node, None)
            if grads is not None:
                arrive(node, grads)
            if type(node) is Leaf or node in ends:
                continue
            (found,) = [None] if grads is None else _call(node, [grads], False)
            for place, (ahead, number) in enumerate(node.next_functions):
                if ahead is None:
                    continue
                _add(brought, Value(ahead, number), None if found is None else found[place])
                left[ahead] -= 1
                if not left[ahead]:
                    ready.append(ahead)

    as_one_pass(run)


def _add(brought: dict[Node, Grads], value: Value, grad: Tensor | None) -> None:
    """Adds a gradient to those that have arrived at a value, as the engine does."""
    if grad is not None:
        own, grad = brought.setdefault(value.node, [None] * max(1, len(made(value.node)))), fitted(grad, value)
        own[value.number] = grad if (before := own[value.number]) is None else before + grad


def fitted(grad: Tensor, value: Value) -> Tensor:
    """A gradient with the value's dtype, and with the value's shape if that was broadcast."""
    grad = grad if grad.layout == torch.strided else grad.to_dense()
    if grad.is_nested:
        return grad
    if grad.shape != (shape := shape_of(value)):
        grad = grad.sum_to_size(shape)
    dtype = dtype_of(value)
    return grad if grad.dtype == dtype else grad.to(dtype)


def call_node(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
    """The gradients that a node computes from those at its outputs."""
    if all(grad is None for grad in grads):
        return None
    if not issubclass(type(node), BackwardCFunction):
        found = node(*grads)
        return found if isinstance(found, tuple) else (found,)
    if node.name() in IDENTITIES:
        return grads
    zeros = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) if g is None else g for g, x in zip(grads, made(node)))
    with _put_back(node):
        found = node.apply(*zeros)
    # The function returns a gradient for each argument of its forward, but only tensors have edges.
    returned = zip(found if isinstance(found, tuple) else (found,), node.needs_input_grad)
    of_tensors = iter([grad for grad, asks in returned if asks])
    return [None if ahead is None else next(of_tensors) for ahead, _ in node.next_functions]


@contextmanager
def _put_back(node: Any) -> Iterator[None]:
    """A context that restores a user's function, which may free what it saved for backward, or count its calls.

    Later passes then find everything unchanged."""
    function = class_of_function(type(node))
    held = [(put, get()) for owner in (function, function.backward) for get, put in places_of(owner)]
    boxes = [vars(node), *vars(node).values(), *(x for _, x in held)]
    boxes += [vars(x) for x in boxes if hasattr(x, "__dict__") and not is_known(type(x))]
    kept = [(box, copy(box)) for box in boxes if isinstance(box, dict | list | set | deque)]
    # A compiled backward may write into what it saved, unless the graph is kept, as torch takes it to be here.
    donates = bool(getattr(getattr(function, "metadata", None), "bw_donated_idxs", None))
    saved = [(x, x.clone()) for x in node.saved_tensors] if donates else []

    def undo() -> None:
        for x, before in saved:
            x.data.copy_(before)  # without a new version
        for put, x in held:
            put(x)
        for box, content in kept:
            box.clear()
            (box.update if isinstance(box, dict | set) else box.extend)(content)

    with restored(undo), functorch_config.patch(donated_buffer=False) if donates else nullcontext():
        yield


def _call(node: Any, passes: Sequence[Grads], several: bool) -> Sequence[Sequence[Tensor | None] | None]:
    """The gradients that a node computes, for one or several passes."""
    if node.name() == CHECKPOINT:  # its own backward would run the user's function, and add to parameters' .grad
        raise UnseenGradient(
            "the gradient of a parameter comes through a reentrant checkpoint, which can't be run for rows. Call "
            "checkpoint(..., use_reentrant=False)."
        )
    put_back = put_back_by(node) if several else lambda: None

    def run() -> list[Sequence[Tensor | None] | None]:
        found = []
        for grads in passes:
            found.append(call_node(node, grads))
            put_back()
        return found

    # Of a node in C++ that doesn't show what it saves, the running pass needs what a checkpoint recomputes, once.
    return outside_passes(run) if node.name().startswith("torch::autograd::") else run()


def as_one_pass(run: Callable[[], Made]) -> Made:
    """A function's result inside a backward pass.  There, checkpoints recompute only once what they return several times."""
    found, makes_graph = list[Made](), torch.is_grad_enabled()

    def begin(_: object = None) -> None:
        with torch.set_grad_enabled(makes_graph), Switch.paused_here():  # checkpoints run the user's modules
            found.append(run())

    if current_task() != NO_TASK:
        begin()
    else:
        with torch.enable_grad():
            root = torch.zeros((), device="cpu", requires_grad=True).clone()
        own_hook(root.grad_fn.register_prehook(begin))  # type: ignore[union-attr]  # it has a graph
        root.backward()
    return found[0]


def outside_passes(run: Callable[[], Made]) -> Made:
    """A function's result outside the running backward pass, in which nodes compute only what that pass needs."""
    if current_task() == NO_TASK:
        return run()
    makes_graph = torch.is_grad_enabled()
    streams = [torch.cuda.current_stream()] if torch.cuda.is_initialized() else []
    is_paused = Switch.here.paused

    def in_thread() -> Made:
        with torch.set_grad_enabled(makes_graph), ExitStack() as stack:
            if is_paused:
                stack.enter_context(Switch.paused_here())
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return run()

    with ThreadPoolExecutor(1) as threads:  # the running pass belongs to a thread
        return threads.submit(in_thread).result()


APART = 2**12
"""How far what a user's node makes of the whole may be from the sum of what it makes of parts, in units of magnitudes."""


def by_node(
    node: Any, place: int, grads: Sequence[Tensor | None], owners: Sequence[Tensor | None], samples: int, shape: torch.Size,
    where: str,
) -> Tensor:  # fmt: skip
    """The rows of any value, ``(N, *shape)``, from the node's own derivative for each sample's part of the gradients.

    grads: at each output of the node
    owners: the sample of each entry
    place: the number of the node's input that is the value
    where: the node, for messages

    Raises SamplesMixed if a user's node makes something else of the whole than of the parts: it may clip gradient.
    """
    whole = [samples] if is_users(node) and samples else []
    like = next(g for g in grads if g is not None)

    def made_of(given: Sequence[Grads]) -> Tensor:
        def run() -> list[Tensor | None]:
            with Switch.paused_here():  # a user's Function may run layers
                return [None if made is None else made[place] for made in _call(node, given, True)]

        found = run()
        if any(row is None for row in found) and current_task() != NO_TASK:  # the pass doesn't need the value's gradient
            found = outside_passes(run)
        return torch.stack([like.new_zeros(shape) if row is None else row.to_dense().sum_to_size(shape) for row in found])

    parts = [[None if x is None else x >= 0 if n == samples else x == n for x in owners] for n in (*range(samples), *whole)]
    every = made_of([[None if g is None or x is None else g.where(x, 0) for g, x in zip(grads, part)] for part in parts])
    if whole and every[0].numel():
        own, allowed = every.detach()[:-1], APART * torch.finfo(every.dtype).eps
        apart, most = (every.detach()[-1] - own.sum(0)).abs().nan_to_num(0, 0, 0), own.abs().sum(0).max()
        if bool((apart > allowed * most).any()):  # terms may cancel, and rounding is relative to them: so with other signs
            draws = torch.Generator("cpu").manual_seed(0)
            turned = [
                None if g is None else g * (torch.randint(2, g.shape, generator=draws, device="cpu").to(g) * 2 - 1)
                for g in grads
            ]
            most = made_of([turned]).detach().abs().max()
        if bool((apart > allowed * most).any()):
            raise SamplesMixed(
                f"{where}: its backward is not linear in the gradient. What it makes of the batch's is not the sum of what "
                "it makes of the samples', so there are no rows of what it was given. Change gradients by hooks on tensors."
            )
    return every[:samples]


def factor_of(node: Any) -> Tensor | None:
    """What a node multiplies each entry of a gradient by, as an activation does, in the shape of its only input;
    or whether it keeps each entry.

    None if it does anything else: what it makes of random numbers isn't their product with what it makes of ones.
    """
    is_others = isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"
    if torch.is_grad_enabled() or len(node.next_functions) != 1 or len(made(node)) != 1 or is_others or is_packed(node):
        return None
    like, value = made(node)[0], Value(*node.next_functions[0])
    if torch.finfo(like.dtype).eps > 1e-6:  # half precision tells no small entry from rounding
        return None
    ones = torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
    drawn = ones + torch.rand(ones.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(ones)
    own, found, nan = ((call_node(node, [g]) or [None])[0] for g in (ones, drawn, ones * torch.nan))
    if own is None or found is None or own.numel() != ones.numel() or own.is_complex() or ones.is_complex():
        return None
    own, apart = fitted(own, value), (found - own * drawn.view_as(own)).abs()
    if not bool((apart <= 8 * torch.finfo(own.dtype).eps * own.abs()).all()):
        return None
    is_kept = nan is not None and bool((fitted(nan, value).nan_to_num(1.0) == own).all())  # or left out, each entry
    return own != 0 if is_kept else own


def called_with(node: Any, number: int, place: int, rows: Tensor) -> Tensor:
    """The rows of an input of a node, from those of an output.  The node is called for each row."""
    value, to, like = Value(node, number), Value(*node.next_functions[place]), rows.dtype
    grads = [[None] * number + [fitted(row, value)] + [None] * (len(made(node)) - number - 1) for row in rows]
    found = [None if outs is None else outs[place] for outs in _call(node, grads, True)]
    x = torch.stack([rows.new_zeros(shape_of(to)) if g is None else fitted(g, to) for g in found])
    return x.to(like.to_complex() if x.is_complex() else like.to_real())  # as steps expect it, in autocast too
