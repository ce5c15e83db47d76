"""Autograd's graph: its nodes, and what they save."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from autograd_hacks.support.internals import RAW, SAVED, AccumulateGrad, class_of_function, current_task, without_subclasses
from autograd_hacks.support.internals import made as made
from autograd_hacks.support.switch import Switch

Leaf: Any = AccumulateGrad
"""The node at which a parameter or another leaf ends the graph; its ``variable`` is the leaf."""

CHECKPOINT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint.  Its own backward would add to parameters' ``.grad``."""
IDENTITIES = frozenset(("_DDPSinkBackward", "RegisterPostBackwardFunctionBackward", "BackwardHookFunctionBackward"))
"""Functions of torch that pass gradients on unchanged, and notify its engine or its wrappers."""

OF_DEVICES = {f"native_{name}": (f"cudnn_{name}", f"miopen_{name}") for name in ("batch_norm", "batch_norm_backward")}
"""By operation, those that devices have instead, with the same inputs, and nodes that save the same, see `spelt`."""
USUAL = dict.fromkeys(("CudnnBatchNormBackward0", "MiopenBatchNormBackward0"), "NativeBatchNormBackward0")


@cache
def spelt(kind: type, name: str) -> str:
    """The name under which nodes of a type save a value."""
    return name if hasattr(kind, SAVED + name) else {"eps": "epsilon"}.get(name, name)


NEW: list[RemovableHandle] = []
"""The hooks on gradients of nodes and tensors that users have registered while a model was hooked, the newest last."""
Handle = TypeVar("Handle")


def own_hook(handle: Handle) -> Handle:
    """Says that a hook is the library's: it is no new hook of a user's, for which every hooked model would look."""
    if NEW and NEW[-1] is handle:
        NEW.pop()
    return handle


def node_of(parameter: Tensor) -> Node:
    """The node at which a parameter ends the graph."""
    with without_subclasses():  # a subclass would put its own node in between
        return get_gradient_edge(parameter).node


class Value(NamedTuple):
    """A tensor of the forward, as the output of a node in the graph."""

    node: Node
    number: int  # the output's number at the node


def nodes_behind(roots: Iterable[Node], ends: Set[Node] = frozenset()) -> dict[Node, None]:
    """Some nodes and all behind them, always in the same order.  ends: nodes at which to stop"""
    found, waiting = dict[Node, None](), list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            if node not in ends:
                waiting += [ahead for ahead, _ in node.next_functions if ahead is not None]
    return found


def leaves_behind(roots: Iterable[Node], ends: Set[Node] = frozenset()) -> list[Tensor]:
    """The parameters and other leaves at which the graph behind some nodes ends."""
    every: Any = nodes_behind(roots, ends)
    return [node.variable for node in every if type(node) is Leaf]


def shape_of(value: Value) -> torch.Size:
    return torch.Size(_made_at(value).shape)


def dtype_of(value: Value) -> torch.dtype:
    dtype: torch.dtype = _made_at(value).dtype
    return dtype


def _made_at(value: Value) -> Any:
    node: Any = value.node
    return node.variable if type(node) is Leaf else made(node)[value.number]


def inputs_of(node: Node) -> Iterator[Value]:
    return (Value(ahead, number) for ahead, number in node.next_functions if ahead is not None)


def line_of(node: Node) -> str:
    """The line that made a node, which torch notes while it looks for anomalies."""
    noted: Any = node.metadata
    frames = noted.get("traceback_")
    return "" if not frames else f" ({frames[-1].split(', in ')[0].strip()})"


_OF_RESULTS = tuple(RAW + name for name in ("result", "output", "rstd", "mean", "save_", "logsumexp", "philox"))
"""The first part of the names of attributes under which nodes save their own results."""


@cache
def raw_names(kind: type) -> tuple[str, ...]:
    """The attributes under which nodes of a type keep tensors as hooks have packed them."""
    return tuple(name for name in dir(kind) if name.startswith(RAW))


@cache
def _raws_of(kind: type) -> Callable[[Any], Sequence[Any]]:
    return attrgetter(*raw_names(kind), "next_functions", "next_functions")  # of two names it makes a tuple


def _raws(node: Any, attribute: str) -> Sequence[Any]:
    """What a node keeps there: of an index, one for each axis."""
    raw = getattr(node, attribute, None)
    return raw if isinstance(raw, tuple | list) else (raw,)


@cache
def _operand_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in raw_names(kind) if not name.startswith(_OF_RESULTS))


def operands_of(node: Node) -> Iterator[Tensor]:
    """The tensors that a node saves and that have no graph: such as inputs that need no gradient.

    Tensors that a user's hooks have packed are left out."""
    for name in _operand_names(type(node)):
        kept = getattr(node, name)
        for raw in kept if isinstance(kept, tuple | list) else (kept,):
            x = getattr(raw, "data", None) if getattr(raw, "unpack_hook", True) is None else None
            if isinstance(x, Tensor) and not x.requires_grad:
                yield x


def is_users(node: object) -> bool:
    """Whether a node belongs to a user's autograd.Function, not torch's own."""
    kind: Any = type(node)
    return isinstance(node, BackwardCFunction) and not class_of_function(kind).__module__.startswith("torch.")


def is_collective(node: Any) -> bool:
    """Whether a node exchanges gradients with other processes."""
    is_functions = isinstance(node, BackwardCFunction)
    return (is_functions and class_of_function(type(node)).__module__ == "torch.distributed.nn.functional") or bool(
        re.search("__c10d_functional_(?!_wrap_tensor|wait_tensor)", node.name())
    )


def number_of(node: Any, name: str) -> int | None:
    """An integer that a node saves, with its sign, which autograd drops."""
    number = getattr(node, f"{SAVED}{name}")
    return None if number is None else signed(number)


def signed(number: int) -> int:
    """An integer with the sign that autograd has dropped."""
    return number if number < 2**63 else number - 2**64


def kept_by(node: Any, name: str) -> Any:
    """A value that a node saves under a name.  It stays available to the running pass, even if hooks have packed it."""
    raw, name = getattr(node, RAW + name, None), spelt(node.__class__, name)
    if isinstance(raw, tuple | list):  # an index of several axes
        is_packed = any(getattr(own, "unpack_hook", None) is not None for own in raw)
        return [_unpacked(own) for own in raw] if is_packed else getattr(node, SAVED + name)
    return getattr(node, SAVED + name) if getattr(raw, "unpack_hook", None) is None else _unpacked(raw)


def _unpacked(raw: Any) -> Any:
    if (unpack := raw.unpack_hook) is None:
        return raw.data
    with Switch.paused_here():  # a checkpoint runs layers
        x = unpack(raw.data)
    if _is_handed_out_once(raw):
        _put_back(raw.data, unpack, x)
    return x


def saved_by(node: Any, names: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Tensors that a node saves, without its graph; none of them if hooks have packed one, or it is in half precision.

    names: by the node's name"""
    own = names.get(node.name(), ())
    if [name for name in own if getattr(node, RAW + name).unpack_hook is not None]:
        return {}
    found = {name: getattr(node, SAVED + name).detach() for name in own}
    return {} if [x for x in found.values() if x.dtype.itemsize < 4] else found


def is_packed(node: Any, by_users: bool = False) -> bool:
    """Whether hooks have packed something that a node saves; or hooks that aren't torch's own, which may change it."""
    every = _raws_of(node.__class__)(node)[:-2]
    raws = [own for raw in every for own in (raw if type(raw) in (tuple, list) else (raw,))]
    hooks = [hook for raw in raws if raw is not None and (hook := raw.unpack_hook) is not None]
    return any(not (by_users and (getattr(hook, "__module__", None) or "").startswith("torch.")) for hook in hooks)


def is_recomputed(node: Any, *names: str) -> bool:
    """Whether a checkpoint recomputes what a node saves, by default anything of it."""
    attributes = [RAW + name for name in names] or raw_names(node.__class__)
    return any(_is_handed_out_once(raw) for name in attributes for raw in _raws(node, name))


def put_back_by(node: Any) -> Callable[[], None]:
    """Returns a function that restores what checkpoints recomputed for a node.

    Checkpoints give each recomputed tensor out only once per pass.  Call the function after each call of the node."""
    kept = [raw for name in raw_names(node.__class__) for raw in _raws(node, name) if _is_handed_out_once(raw)]
    taken = [(raw.data, raw.unpack_hook, raw.unpack_hook(raw.data)) for raw in kept]

    def put_back() -> None:
        for at, unpack, x in taken:
            _put_back(at, unpack, x)

    put_back()
    return put_back


def _is_handed_out_once(raw: Any) -> bool:
    """Whether a checkpoint has packed it."""
    return getattr(raw, "unpack_hook", None) is not None and type(raw.data).__module__ == "torch.utils.checkpoint"


def _put_back(packed: Any, unpack: Any, x: Any) -> None:
    frame = dict(zip(unpack.__code__.co_freevars, unpack.__closure__))["frame"].cell_contents
    task, handle = current_task(), _Handle()
    frame.recomputed[task][handle] = x
    packed.handles[task] = handle


class _Handle:
    """Represents a tensor that a checkpoint has recomputed."""
