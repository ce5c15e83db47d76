"""Everything that a model's forward can reach and change: attributes, containers, closures, globals, generators, iterators.

No mathematics.
"""

import copy
import io
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import AsyncGeneratorType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from autograd_hacks.errors import ProbeFailed
from autograd_hacks.support.parts import is_part
from autograd_hacks.support.restored import undone_by
from autograd_hacks.support.trees import like_its_kind, slots_of

_ATOMS = (str, bytes, int, float, complex, torch.dtype, torch.device, torch.ScriptObject, ModuleType, CodeType)

_HOSTS = ("lightning", "pytorch_lightning")
"""Packages whose classes run models and hold a whole program.  The search stops at them."""

_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


class Holder(NamedTuple):
    """An object that holds others, by key."""

    where: str
    content: Callable[[], dict[Any, Any]]  # returns what it holds now
    fill: Callable[[dict[Any, Any]], None]  # makes it hold something else
    kept: dict[Any, Any]  # what it held
    copied: list[Any]  # the keys of the values that are copied

    def put(self, content: dict[Any, Any]) -> None:
        now = self.content()
        if now.keys() != content.keys() or not all(map(operator.is_, now.values(), content.values())):
            self.fill(content)


class Reach:
    """Everything that a model can reach now.  Raises ProbeFailed if the state of something can't be restored.

    roots: where to begin, by name
    shared: tensors that stay where they are
    strict: whether it raises
    """

    def __init__(self, roots: Mapping[str, Any], shared: Iterable[Tensor] = (), strict: bool = True) -> None:
        self.strict = strict
        self.holders: list[Holder] = []
        # For random generators and files: functions that read and set their state, and the old state.
        self.states: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self._note_state(random.getstate, random.setstate)
        self._shared = {id(x): x for x in shared}
        self._memo: dict[int, Any] = {}  # copies, by the id of the original
        self._then: dict[int, Any] = {}  # the same, for the old state
        self._kept: list[Any] = []  # keeps objects alive, so that no id is used again
        self._numpy: Any = sys.modules.get("numpy")
        if self._numpy is not None:
            self._note_state(self._numpy.random.get_state, self._numpy.random.set_state)
        hooks = {name: getattr(torch_module, name) for name in _GLOBAL_HOOKS}
        waiting, seen = [*roots.items(), *hooks.items()], set[int]()
        while waiting:
            where, thing = waiting.pop()
            if thing is not None and not isinstance(thing, _ATOMS) and id(thing) not in seen:
                seen.add(id(thing))
                self._kept.append(thing)
                waiting += self._enter(where, thing)

    def _is_copied(self, value: Any) -> bool:
        is_array = self._numpy is not None and isinstance(value, self._numpy.ndarray)
        return isinstance(value, Tensor) or type(value) is tuple or is_array or _is_iterator(value)

    def keep(self, *others: Any) -> None:
        """Copies tensors, arrays and iterators now, because they may change before they are needed."""
        self._memo = dict(self._shared)
        for holder in self.holders:
            self._copies(holder)
        self.copy_of(others, "")
        self._then = self._memo

    def _copies(self, holder: Holder) -> dict[Any, Any]:
        return {key: self.copy_of(holder.kept[key], f"{holder.where}{key}") for key in holder.copied}

    def put_back(self, copies: bool = False) -> None:
        """Restores everything except the numbers in tensors and arrays.  copies: whether to put copies in their place"""
        for holder in self.holders:
            holder.put(holder.kept | self._copies(holder) if copies else holder.kept)
        for _, put, kept in self.states:
            put(kept)

    def put_copies(self) -> Callable[[], None]:
        """Restores everything, with copies for tensors, arrays and iterators.  Returns a function that undoes this."""
        now = [(holder, holder.content()) for holder in self.holders]
        states = [(put, get()) for get, put, _ in self.states]
        self._memo = dict(self._shared)

        def undo() -> None:
            for holder, content in now:
                holder.put(content)
            for put, value in states:
                put(value)

        with undone_by(undo):
            self.put_back(copies=True)
        return undo

    def copy_of(self, value: Any, where: str) -> Any:
        """A copy of a value that a forward may change, or of a tuple of such values.  Returns all else itself."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        original, value = value, self._then.get(id(value), value)
        if isinstance(value, Tensor) and not is_lazy(value):
            found: Any = like_its_kind(value, value.detach().clone())
            if isinstance(value, nn.Parameter):
                found = nn.Parameter(found, value.requires_grad)
            elif value.requires_grad:
                with torch.enable_grad():  # not a leaf: a forward could not write into that
                    found = like_its_kind(value, found.requires_grad_().clone())
        elif type(value) is tuple:
            parts = [self.copy_of(part, f"{where}[{n}]") for n, part in enumerate(value)]
            found = value if all(map(operator.is_, parts, value)) else tuple(parts)
        elif self._numpy is not None and isinstance(value, self._numpy.ndarray):
            found = value.copy()
        elif _is_iterator(value):
            try:
                found = copy.deepcopy(value, dict(self._memo))
            except Exception as error:  # copying may raise anything
                raise _refused(where, value, f"{type(error).__name__}: {error}") from error
        else:
            return value
        self._kept.append(original)
        self._memo[id(original)] = found
        return found

    def _enter(self, where: str, thing: Any) -> list[tuple[str, Any]]:
        """Records what an object holds, or its state.  Returns the objects to which it leads."""
        if isinstance(thing, GeneratorType | AsyncGeneratorType):
            if self.strict:
                raise _refused(where, thing, "Python can't copy it")
            return []
        if self._has_state(thing) or isinstance(thing, Tensor):
            return []
        if _is_iterator(thing):
            if self.strict:
                self.copy_of(thing, where)  # now, before anything runs
            return []
        if isinstance(thing, dict):
            return self._hold(where, lambda: dict(dict.items(thing)), partial(refill, thing))
        if isinstance(thing, list | deque | set):
            return self._hold(where, lambda: dict(enumerate(thing)), lambda kept: refill(thing, list(kept.values())))
        if isinstance(thing, tuple | frozenset):
            return [(f"{where}[{n}]", part) for n, part in enumerate(thing)]
        if isinstance(thing, MethodType):
            return [(where, thing.__self__), (where, thing.__func__)]
        if isinstance(thing, partial):
            return [(where, part) for part in (thing.func, *thing.args, *thing.keywords.values())]
        if isinstance(thing, FunctionType):
            return self._enter_function(where, thing)
        if isinstance(thing, type):
            return self._enter_class(where, thing)
        return self._enter_object(where, thing)

    def _hold(
        self, where: str, content: Callable[[], dict[Any, Any]], fill: Callable[[dict[Any, Any]], None]
    ) -> list[tuple[str, Any]]:
        kept = content()
        self.holders.append(Holder(f"{where}.", content, fill, kept, [key for key, x in kept.items() if self._is_copied(x)]))
        return [(f"{where}.{key}", value) for key, value in kept.items()]

    def _note_state(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self.states.append((get, put, get()))

    def _has_state(self, thing: Any) -> bool:
        """Whether an object is a random generator or a file.  If so, its state is recorded."""
        of_numpy: Any = self._numpy and self._numpy.random
        if isinstance(thing, torch.Generator) or (of_numpy and isinstance(thing, of_numpy.RandomState)):
            self._note_state(thing.get_state, thing.set_state)
        elif isinstance(thing, random.Random):
            self._note_state(thing.getstate, thing.setstate)
        elif of_numpy and isinstance(thing, of_numpy.Generator):
            bits = thing.bit_generator
            self._note_state(lambda: bits.state, partial(setattr, bits, "state"))
        elif isinstance(thing, io.IOBase):
            if not thing.closed and thing.readable() and thing.seekable():
                self._note_state(thing.tell, thing.seek)
        else:
            return False
        return True

    def _enter_function(self, where: str, function: FunctionType) -> list[tuple[str, Any]]:
        if _is_known(function):
            return []
        found = [(where, default) for default in function.__defaults__ or ()]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if _content_of_cell(name, cell):
                found += self._hold(where, partial(_content_of_cell, name, cell), partial(_fill_cell, cell))
        space, names = function.__globals__, _mentioned(function.__code__)
        used = [name for name in names if name in space and not isinstance(space[name], ModuleType | type)]
        if used:
            found += self._hold(where, lambda: {name: space[name] for name in used if name in space}, space.update)
        return found

    def _enter_class(self, where: str, kind: type) -> list[tuple[str, Any]]:
        if _is_known(kind):
            return []

        def content() -> dict[str, Any]:
            own = {name: x for name, x in vars(kind).items() if not name.startswith("__")}
            return {name: x for name, x in own.items() if not isinstance(x, type) and not hasattr(x, "__get__")}

        def fill(kept: dict[str, Any]) -> None:
            for name in content().keys() - kept.keys():
                delattr(kind, name)
            _set_all(setattr, kind, kept)

        return self._hold(where, content, fill)

    def _enter_object(self, where: str, thing: Any) -> list[tuple[str, Any]]:
        is_module = isinstance(thing, nn.Module) and not isinstance(thing, torch.jit.ScriptModule)
        if not is_module and _is_known(type(thing)):
            return []
        found: list[tuple[str, Any]] = [] if _is_known(type(thing)) else [(where, type(thing))]
        if isinstance(own := getattr(thing, "__dict__", None), dict):
            held = self._hold(where, lambda: dict(own), partial(refill, own))
            # If processes hold parts of parameters, whole ones replace them while the model runs.
            parts = thing._parameters if is_module and any(map(is_part, thing._parameters.values())) else None
            found += [(at, value) for at, value in held if parts is None or value is not parts]
        if slots_of(thing):
            found += self._hold(where, partial(slots_of, thing), partial(_set_all, object.__setattr__, thing))
        if is_module and not _is_known(type(thing)):
            methods = _mentioned(type(thing).forward.__code__) if isinstance(type(thing).forward, FunctionType) else ()
            own_methods = [getattr(type(thing), name, None) for name in ("forward", *methods)]
            found += [(where, method) for method in own_methods if isinstance(method, FunctionType)]
        return found


def _refused(where: str, thing: Any, why: str) -> ProbeFailed:
    return ProbeFailed(
        f"independence of samples: the check runs the model again, but can't restore {where}, of type "
        f"{type(thing).__name__} ({why}). Nothing has been run. Pass what it yields to the model as an argument, or use an "
        "object that copy.deepcopy accepts. Training that is not private can leave the check out: independent=False."
    )


def _is_known(thing: Any) -> bool:
    """Whether a class or function belongs to Python, torch, this package or a trainer, and holds nothing of the user's."""
    top = (getattr(thing, "__module__", None) or "builtins").partition(".")[0]
    return top in ("torch", "numpy", "autograd_hacks", *_HOSTS) or (
        top in sys.stdlib_module_names and top not in ("types", "__main__")
    )


def _is_iterator(thing: Any) -> bool:
    return isinstance(thing, Iterator) and not isinstance(thing, io.IOBase) and _is_known(type(thing))


def _mentioned(code: CodeType) -> list[str]:
    """The names used in a function's code, including the functions that it defines."""
    inside = [name for const in code.co_consts if isinstance(const, CodeType) for name in _mentioned(const)]
    return [*code.co_names, *inside]


def _content_of_cell(name: str, cell: Any) -> dict[str, Any]:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # the cell is still empty
        return {}


def _set_all(put: Callable[[Any, str, Any], None], owner: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        put(owner, name, value)


def _fill_cell(cell: Any, kept: dict[str, Any]) -> None:
    (cell.cell_contents,) = kept.values()


def refill(box: Any, content: Any) -> None:
    """Restores a container's content and order, without calling methods of the user's own class."""
    if isinstance(box, dict):
        kind: Any = OrderedDict if isinstance(box, OrderedDict) else dict
        if list(dict.keys(box)) != list(content):
            kind.clear(box)
        for key, value in content.items():
            kind.__setitem__(box, key, value)
        return
    box.clear()
    (box.update if isinstance(box, set) else box.extend)(content)
