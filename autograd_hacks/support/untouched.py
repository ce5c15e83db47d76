"""Runs a module once more without a trace in the module, or in anything that it can reach."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from autograd_hacks.support.contexts import as_written, cuda_devices_of, random_state, with_random_state, without_collection
from autograd_hacks.support.internals import versions_kept
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.reach import Reach
from autograd_hacks.support.restored import restored, switches_kept
from autograd_hacks.support.trees import tensors_of


class Aside:
    """Everything that a module and its arguments can reach now, to be restored after the module runs once more.

    keeps: whether it may change before that; runs begin with its present state

    Raises ProbeFailed if the state of something can't be restored, for example of a generator object.
    """

    def __init__(self, module: nn.Module, arguments: Any = (), keeps: bool = False) -> None:
        self.module, self._state = module, random_state(cuda_devices_of(module))
        self.trained = [p for p in module.parameters() if p.requires_grad and not is_lazy(p)]
        with without_collection():
            self.reach = Reach({"the model": module, "its arguments": arguments}, self.trained)
        self._before: list[Tensor] = []  # copies of the trained parameters, if they may change
        if keeps:
            self.reach.keep(arguments)
            self._before = [part_of(p).detach().clone() for p in self.trained]

    @contextmanager
    def run(self) -> Iterator[Callable[[Any], Any]]:
        """A context in which the module may run.  Afterwards everything is restored.

        Parameters, buffers and attributes are the same objects with the same values.  Generators and iterators continue as
        if the module had not run.  Restored too: what users' hooks keep, torch's caches of weights and its switches, and the
        random numbers of torch, Python and NumPy.

        While it runs, copies replace tensors.  Trained parameters stay, with copies of their numbers.  Gives a function
        ``copied(arguments)``, which returns a tuple of the arguments with copies of tensors.
        """
        parameters = [(p, part_of(p), part_of(p).data, p.grad) for p in self.trained]
        starts = self._before or [data for _, _, data, _ in parameters]
        cached, put_back = parametrize._cache, self.reach.put_copies()

        def undo() -> None:
            put_back()
            for p, held, data, grad in parameters:
                held.data = data
                p.grad = grad
                p.requires_grad_()
            parametrize._cache = cached

        # Otherwise a forward that writes into a parameter would seem to overwrite what the user's graph has saved.
        versions = versions_kept(tuple(held for _, held, _, _ in parameters))
        with restored(undo), versions, with_random_state(self._state), switches_kept(), as_written():
            for (p, held, _, _), start in zip(parameters, starts):
                held.data, p.grad = start.clone(), None
            # Cached values would be stale here, and with values cached here gradients would go through this graph.
            parametrize._cache = {}
            torch.set_autocast_cache_enabled(False)
            yield partial(self.reach.copy_of, where="its arguments")


def untouched(module: nn.Module, arguments: Any = ()) -> AbstractContextManager[Callable[[Any], Any]]:
    """A context in which a module may run once; see `Aside`."""
    return Aside(module, arguments).run()


_OF_MODULE = frozenset(vars(nn.Module()))
SIMPLE = (bool, int, float, str, type(None))


class Marks:
    """The plain attributes of a model's modules and the random numbers, as they were when its forward began.

    They cost little in each forward, and often decide what it does.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._random = torch.get_rng_state(), random.getstate()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.tensors: list[Tensor] = []  # kept as attributes that are no parameters or buffers
        for module in modules:
            own: dict[str, Any] = {}
            for key, x in vars(module).items():
                if type(x) in SIMPLE:
                    own[key] = x
                elif type(x) is Tensor:
                    self.tensors.append(x)
                elif key not in _OF_MODULE and type(x) in (list, tuple, dict, deque) and x:
                    self.tensors += tensors_of(list(x) if type(x) is deque else x)
            self._attributes.append((module, own))

    @contextmanager
    def put_back(self, with_torch: bool = True) -> Iterator[None]:
        """A context in which they are as they were.  with_torch: also torch's random numbers"""
        drawn, later = random.getstate(), list[tuple[nn.Module, dict[str, Any]]]()
        for module, before in self._attributes:
            own = vars(module)
            later.append((module, {k: own[k] for k, x in before.items() if k in own and own[k] is not x}))

        def undo() -> None:
            random.setstate(drawn)
            for module, own in later:
                vars(module).update(own)

        with restored(undo), with_random_state({"cpu": self._random[0]} if with_torch else {}):
            random.setstate(self._random[1])
            for (module, before), (_, own) in zip(self._attributes, later):
                vars(module).update({k: before[k] for k in own})
            yield
