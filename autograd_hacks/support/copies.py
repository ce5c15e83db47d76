"""Copies of a model, with all that it can reach, which checks run in its place.  No mathematics."""

import copy
import io
import operator
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import AsyncGeneratorType, CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType, UnionType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from autograd_hacks.errors import PerSampleGradientError, ProbeFailed
from autograd_hacks.support.contexts import as_written, cuda_devices_of, without_collection
from autograd_hacks.support.internals import rebuilt
from autograd_hacks.support.parts import memory_of, part_of
from autograd_hacks.support.restored import restored, switches_kept
from autograd_hacks.support.trees import OF_MODULE, like_its_kind, slots_of, tensors_of, version_of

_PLAIN = (bool, int, float, str, type(None))
_ATOMS = (*_PLAIN, bytes, complex, torch.dtype, torch.device, torch.ScriptObject, ModuleType, CodeType, UnionType)
_SHARED = (*_ATOMS, torch.utils.data.Dataset, torch.optim.Optimizer)
_BOXES = (list, tuple, dict, deque)
_STATE = (*_PLAIN, *_BOXES, set, Tensor)
"""Attributes of classes that are copied."""
_KNOWN = frozenset(sys.stdlib_module_names - {"types", "collections", "test", "__main__"}) | {
    *("torch", "numpy", "autograd_hacks", "lightning", "pytorch_lightning", "datasets")
}
"""Packages whose functions and classes hold nothing of the user's."""
_ON_HEAP = 1 << 9
"""The flag of classes that Python code has made."""


Place = tuple[Callable[[], Any], Callable[[Any], object]]
"""Gets and sets what a name stands for, or the state of a file or of a generator of random numbers."""


def places_of(owner: FunctionType | type) -> list[Place]:
    """A function's closure, attributes and the globals that it names, or a class's attributes."""
    if isinstance(owner, type):
        own = {name: x for name, x in vars(owner).items() if isinstance(x, _STATE) and name[:2] != "__"}
        return [_attribute(owner, name) for name in ([] if is_known(owner) else own)]
    found = [_attribute(cell, "cell_contents") for cell in owner.__closure__ or () if cell != CellType()]  # an empty one
    if not is_known(owner):
        found += [_attribute(owner, name) for name in ("__defaults__", "__kwdefaults__", "__dict__")]
        space = owner.__globals__
        names = [name for name in _mentioned(owner.__code__) if name in space]
        found += [(partial(space.__getitem__, name), partial(space.__setitem__, name)) for name in names]
    return found


def _attribute(owner: Any, name: str) -> Place:
    put: Any = type.__setattr__ if isinstance(owner, type) else setattr
    return partial(getattr, owner, name), partial(put, owner, name)


def _mentioned(code: CodeType) -> list[str]:
    """The names used in a function's code, including the functions that it defines."""
    inside = [name for const in code.co_consts if isinstance(const, CodeType) for name in _mentioned(const)]
    return [*code.co_names, *inside]


def is_known(thing: Any) -> bool:
    """Whether a class or function holds nothing of the user's."""
    top = (getattr(thing, "__module__", None) or "builtins").partition(".")[0]
    # Code that runs without a module's name makes classes, which are on the heap, and functions of "builtins", too.
    return top in _KNOWN and not (top == "builtins" and getattr(thing, "__flags__", _ON_HEAP) & _ON_HEAP)


class Copy:
    """A copy of a model and of what it is given, with all that they reach and the random numbers, as they are now.

    Parameters share their memory; what a run writes there is undone.  Functions and classes stay: the names that they use
    stand for copies while the copy runs.  Objects of Python, torch and trainers stay, too, if they don't say how to copy
    them, and data sets.

    model, given: the copies
    before: a copy to be copied once more    marks: how an earlier forward began, from which this copy begins

    Raises ProbeFailed for what can't be copied, such as a generator object.
    """

    def __init__(
        self, model: nn.Module, given: Any = (), marks: "Marks | None" = None, before: "Copy | None" = None
    ) -> None:
        self._memo: dict[int, Any] = {}  # copies, by the id of the original
        self._alive: list[Any] = []  # originals, so that no id is used again
        self.draws: list[torch.Generator] = []  # the copied generators of random numbers
        self._is_first = before is None
        self._not_ours: set[int] = {id(p) for p in model.parameters()} | (set() if before is None else before._not_ours)
        self._places = list[tuple[Place, Any]]()  # with what each holds while the copy runs
        state, put, numpy = torch.cuda.get_rng_state, torch.cuda.set_rng_state, sys.modules.get("numpy")
        places: list[Place] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            *((partial(state, device), partial(put, device=device)) for device in cuda_devices_of(model)),
            *([] if numpy is None else [(partial(numpy.random.get_state, legacy=False), numpy.random.set_state)]),
            *(_attribute(torch_module, name) for name in ("_global_forward_pre_hooks", "_global_forward_hooks")),
            _attribute(parametrize, "_cache"),
        ]
        with without_collection():
            self._enter("the program", places)
            self._places += [(place, self._copy(held, "")) for place, held in ([] if before is None else before._places)]
            self.model: nn.Module = self._copy(model, "the model")
            self.given = self._copy(given, "its arguments")
        if marks is not None:
            self._places[:2] = [*zip(places, (marks.torch, marks.python))]
            for module, own in marks.attributes:
                vars(self._copy(module, "")).update(own)
        self._memo, self._alive = {}, []

    def again(self, given: Any) -> "Copy":
        """A copy of this copy, for one of several runs.  given: the arguments"""
        return Copy(self.model, given, before=self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the copy may run, once, with the random numbers that the original would have drawn.

        Afterwards all else is as before: what names stand for, random numbers, torch's switches and its caches of weights.
        """
        now = [(put, get()) for (get, put), _ in self._places]
        writes = _Watch(self.model.parameters(), self._not_ours)

        def undo() -> None:
            for put, held in now:
                put(held)
            for memory, numbers in writes.before.values():
                memory.copy_(numbers)

        with restored(undo), switches_kept(), as_written(), writes:
            for (_, put), held in self._places:
                put(held)
            torch.set_autocast_cache_enabled(False)  # with values cached here, gradients would go through this graph
            yield

    def _enter(self, where: str, places: Iterable[Place]) -> None:
        for place in places if self._is_first else ():  # later copies have the places of the first
            self._places.append((place, self._copy(place[0](), where)))

    def _copy(self, x: Any, where: str) -> Any:
        if isinstance(x, _SHARED):
            return x
        if id(x) in self._memo:
            return self._memo[id(x)]
        self._alive.append(x)
        if isinstance(x, FunctionType | type):
            self._memo[id(x)] = x
            self._enter(where, places_of(x))
            return x
        return self._memo.setdefault(id(x), self._copied(x, where))

    def _copied(self, x: Any, where: str) -> Any:
        kind: Any = type(x)
        if isinstance(x, Tensor):
            return _copied_tensor(x)
        if isinstance(x, torch.Generator):
            self.draws.append(x.clone_state())
            return self.draws[-1]
        if isinstance(x, GeneratorType | AsyncGeneratorType):
            raise _refused(where, x, "Python can't copy it")
        if isinstance(x, io.IOBase):
            is_read = not x.closed and x.readable() and x.seekable()
            self._enter(where, [(x.tell, x.seek)] if is_read else [])
            return x
        if kind in (weakref.ReferenceType, *weakref.ProxyTypes):
            target = x() if kind is weakref.ReferenceType else x.__repr__.__self__
            made = self._copy(target, where)
            return x if made is target else (weakref.ref if kind is weakref.ReferenceType else weakref.proxy)(made)
        if isinstance(x, MethodType):
            return MethodType(self._copy(x.__func__, where), self._copy(x.__self__, where))
        if isinstance(x, tuple):
            parts = [self._copy(part, where) for part in x]
            return x if all(map(operator.is_, parts, x)) else getattr(kind, "_make", kind)(parts)
        for base in kind.__mro__:
            self._copy(base, where)
        if isinstance(x, nn.Module) and not isinstance(x, torch.jit.ScriptModule):
            return self._copied_module(x, where)
        ways = [getattr(kind, name, None) for name in ("__deepcopy__", "__reduce__", "__reduce_ex__")]
        is_plain = ways == [None, object.__reduce__, object.__reduce_ex__]
        if is_plain and is_known(kind) and not isinstance(x, dict | list | RemovableHandle):
            return x
        try:
            if hasattr(kind, "__deepcopy__"):
                return x.__deepcopy__(self._memo)
            how = x.__reduce_ex__(4)
            return x if isinstance(how, str) else rebuilt(x, self._memo, *how, deepcopy=lambda y, _: self._copy(y, where))
        except PerSampleGradientError:
            raise
        except Exception as error:  # copying may raise anything
            self._memo.pop(id(x), None)
            if is_known(kind) and not isinstance(x, Iterator):  # locks
                return x
            if is_plain and hasattr(x, "__dict__"):  # accelerate's wrappers refuse to be pickled, for example
                return self._by_attributes(x, kind, where)
            raise _refused(where, x, f"{type(error).__name__}: {error}") from error

    def _copied_module(self, x: nn.Module, where: str) -> Any:
        kind, names, seen = type(x), ["forward"], set[str]()
        while names and not is_known(kind):  # the methods that its forward calls
            method = None if names[-1] in seen else getattr(kind, names[-1], None)
            seen.add(names.pop())
            if isinstance(method, FunctionType):
                self._copy(method, where)
                names += _mentioned(method.__code__)
        sharded: Any = sys.modules.get("torch.distributed.fsdp")
        is_sharded = sharded is not None and isinstance(x, sharded.FSDPModule)
        made = self._by_attributes(x, kind.__mro__[2] if is_sharded else kind, where)  # its class before ``fully_shard``
        vars(made).pop("_is_fsdp_managed_module", None)
        return made

    def _by_attributes(self, x: Any, kind: type, where: str) -> Any:
        made, own = self._memo.setdefault(id(x), object.__new__(kind)), getattr(x, "__dict__", {})
        for name, part in own["_modules"].items() if isinstance(x, nn.Module) else ():
            self._copy(part, f"{where}.{name}")  # first, so that messages have their paths
        for name, part in own.items():
            vars(made)[name] = self._copy(part, f"{where}.{name}")
        for name, part in slots_of(x).items():
            object.__setattr__(made, name, self._copy(part, f"{where}.{name}"))
        return made


class _Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the numbers in parameters' memory that an operation is about to write.

    parameters: the copy's    not_ours: the ids of the model's own, which a copy must not use
    before: by address, the memory and its numbers
    """

    def __init__(self, parameters: Iterable[Tensor], not_ours: Collection[int]) -> None:
        super().__init__()
        self._not_ours = not_ours
        self._shared = {memory_of(p) for p in parameters} - {0}
        self.before: dict[int, tuple[Any, Any]] = {}

    ignore_compile_internals = classmethod(lambda cls: True)  # otherwise compiled functions would run uncompiled ever after
    _should_skip_dynamo = classmethod(lambda cls: False)  # skipping imports torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tensors_of((args, kwargs)):
            if id(x) in self._not_ours:
                raise ProbeFailed(
                    "the check runs a copy of the model, but the copy used a parameter of the model itself, of shape "
                    f"{tuple(x.shape)}. Something that isn't copied led there, such as an object of a package. "
                    "Keep in the model what its forward uses, and let a loss call the model that it is given."
                )
            if func._schema.is_mutable and (at := memory_of(x)) in self._shared and at not in self.before:
                memory = part_of(x).untyped_storage()
                self.before[at] = memory, memory.clone()
        return func(*args, **kwargs or {})


def _copied_tensor(x: Tensor) -> Tensor:
    """A tensor with the same numbers: in the same memory for parameters, in its own for others, whose memory may be a data
    set's."""
    if is_lazy(x):
        return copy.deepcopy(x)
    if isinstance(x, nn.Parameter):
        is_own = nn.Parameter in type(x).__mro__  # DTensors only pass for parameters
        make: Any = partial(Tensor._make_subclass, type(x)) if is_own else nn.Parameter
        shared = make(x.data, x.requires_grad)
        vars(shared).update(vars(x))
        return shared
    made = like_its_kind(x, x.detach().clone())
    if x.requires_grad:
        made.requires_grad_()
        if not x.is_leaf:  # a forward may write into it
            with torch.enable_grad():
                made = like_its_kind(x, made.clone())
    return made


def _refused(where: str, thing: Any, why: str) -> ProbeFailed:
    return ProbeFailed(
        f"the check runs a copy of the model, but {where}, of type {type(thing).__name__}, can't be copied ({why}). Nothing "
        "has been run. Pass what it yields to the model as an argument, or use an object that copy.deepcopy accepts. "
        "Training that is not private can leave the check of independence out: independent=False."
    )


class Marks:
    """The plain attributes of a model's modules and the random numbers, as they were when its forward began.

    They cost little in each forward, and often decide what it does.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.attributes = [(own, {k: x for k, x in vars(own).items() if type(x) in _PLAIN}) for own in modules]
        every = {id(x): x for own in modules for k, x in vars(own).items() if type(x) not in _PLAIN and k not in OF_MODULE}
        objects = [own for own in every.values() if not isinstance(own, Tensor | nn.Module)]
        functions = [own for own in objects if isinstance(own, FunctionType)]
        inside = [
            *(x for own in objects for x in getattr(own, "__dict__", {}).values()),
            *(cell.cell_contents for own in functions for cell in own.__closure__ or () if cell != CellType()),
            *(x for own in functions for x in own.__defaults__ or ()),
            *(x for own in objects if isinstance(own, partial) for x in (own.args, own.keywords)),
        ]
        held = [x for x in (*every.values(), *inside) if type(x) is Tensor or (type(x) in _BOXES and x)]
        self.tensors = tensors_of([list(x) if type(x) is deque else x for x in held])  # that are no parameters or buffers
        self._versions = {
            id(x): (x, version_of(x))
            for own in modules
            for x in (*own._parameters.values(), *own._buffers.values())
            if x is not None
        }

    def written(self, model: nn.Module, is_made: Callable[[Tensor], bool]) -> list[str]:
        """The names of the parameters, buffers and plain attributes that are others since, or overwritten.

        is_made: whether something has made a tensor's present memory since"""
        named = (*model.named_parameters(), *model.named_buffers())
        before = ((name, x, self._versions.get(id(x), (None, 0))) for name, x in named)
        found = [name for name, x, (own, version) in before if own is not x or version_of(x) != version or is_made(x)]
        plain = ((name, x, vars(own).get(name)) for own, held in self.attributes for name, x in held.items())
        return found + [name for name, x, now in plain if type(x) is not type(now) or x != now]
