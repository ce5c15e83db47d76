"""What torch.compile has made of a hooked model, or of parts of it: forwards that are recorded run as they are written.

No mathematics.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.support.internals import COMPILER, disable_dynamo
from autograd_hacks.support.stance import as_written
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import modules_of, tensors_of

Call = Callable[..., Any]


class Guard:
    """Stands around the call of a module, to put back what an interrupt leaves: torch calls no hook for these.

    It is in ``_compiled_call_impl``, which most copies and pickles of a module leave out.
    """

    def __init__(self, layer: nn.Module, recorder: Recorder) -> None:
        self.layer, self.recorder = weakref.ref(layer), recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer()
        try:
            return layer._call_impl(*args, **kwargs)
        except Exception:  # which the layer's own hooks hear of
            raise
        except BaseException:
            self.recorder.interrupt()
            raise

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _none, ()


def _none() -> None:
    """What is left of a guard in a copy of a layer."""


class Uncompiled(Guard):
    """Stands around the call of a module that is compiled, or may come to be: what is recorded runs as it is written, and
    all else compiled.

    compiled: what ``module.compile()`` has put in its place, or None
    """

    def __init__(self, layer: nn.Module, recorder: Recorder, compiled: Call | None) -> None:
        super().__init__(layer, recorder)
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The compiler follows this, too, so that evaluation is one graph: it runs for as long as these are so.
            if Switch.enabled and not Switch.pauses and torch.is_grad_enabled() and not torch.compiler.is_exporting():
                return _from_compiled(self, args, kwargs)
        elif Switch.on() and (torch.is_grad_enabled() or any(x.requires_grad for x in tensors_of((args, kwargs)))):
            return _apart(self, args, kwargs) if COMPILER in sys.modules else super().__call__(*args, **kwargs)
        layer: Any = self.layer()
        return (layer._call_impl if self.compiled is None else self.compiled)(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_compiled: bool) -> Any:
        """The module's call as it is written.  is_compiled: whether compiled code calls it"""
        layer: Any = self.layer()
        has_own = _is_wrapped(layer)
        if is_compiled or has_own or not isinstance(self.compiled, Guard | None):
            self._say(layer)
        with as_written(has_own):
            return super().__call__(*args, **kwargs)

    def _say(self, layer: nn.Module) -> None:
        if not self.recorder.said_uncompiled:
            self.recorder.said_uncompiled = True
            warnings.warn(
                f"{type(getattr(layer, '_orig_mod', layer)).__name__} is compiled, and compiled code has no hooks: forward "
                "passes that autograd_hacks records run it as it is written. Compiled code runs under torch.no_grad(), "
                "within autograd_hacks.pause_hooks(), and after autograd_hacks.remove_hooks.",
                stacklevel=2,
            )


def _run_apart(around: Uncompiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return around.run(args, kwargs, False)


def _run_from_compiled(around: Uncompiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return around.run(args, kwargs, True)


# Left alone by the compiler, which is imported when the first is called.  The second it meets, and says why it can't go on.
_apart: Any = disable_dynamo(_run_apart)
_from_compiled: Any = disable_dynamo(_run_from_compiled)
_from_compiled._torchdynamo_disable = True
_from_compiled._torchdynamo_disable_msg = (
    "a model that autograd_hacks has hooked runs as it is written where it is recorded, and fullgraph=True asks for one "
    "graph. Leave fullgraph out, or compile first and hook what torch.compile has returned: add_hooks(compiled)"
)


class Instead:
    """In the place of a hooked model's methods that overwrite what stands around its calls, or copy it.

    name: the method's, one of `INSTEAD`
    """

    def __init__(self, around: Uncompiled, name: str) -> None:
        self.around, self.name = around, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.around.layer()
        made = getattr(type(layer), self.name)(layer, *args, **kwargs)
        if made is None:
            put_around(layer, self.around.recorder)
        else:
            vars(made).pop("_compiled_call_impl", None)
        return made

    def __reduce__(self) -> tuple[type[partial[Any]], tuple[Any, nn.Module]]:
        layer: Any = self.around.layer()
        return partial, (getattr(type(layer), self.name), layer)  # a copy's own


INSTEAD = ("compile", "_replicate_for_data_parallel")  # DataParallel's


def put_around_all(model: nn.Module, recorder: Recorder) -> None:
    """Has the model, and what is compiled inside, run as it is written where it is recorded."""
    if COMPILER in sys.modules:
        for module in modules_of(model):
            if is_compiled(module):
                put_around(module, recorder)
    put_around(model, recorder)
    for name in INSTEAD:
        vars(model).setdefault(name, Instead(vars(model)["_compiled_call_impl"], name))


def put_around(module: nn.Module, recorder: Recorder) -> None:
    there: Any = module._compiled_call_impl
    if isinstance(there, Uncompiled) and there.recorder is recorder:
        return
    is_own = isinstance(there, Guard) and there.recorder is recorder
    vars(module)["_compiled_call_impl"] = Uncompiled(module, recorder, None if is_own else there)


def is_compiled(module: nn.Module) -> bool:
    return not isinstance(module._compiled_call_impl, Guard | None) or _is_wrapped(module)


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a module is what torch.compile has returned, or its method ``forward`` is."""
    forward = getattr(module, "forward", None)
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def take_from_around(module: nn.Module, recorder: Recorder) -> None:
    """Puts back what is compiled."""
    around = vars(module).get("_compiled_call_impl")
    if isinstance(around, Guard) and around.recorder is recorder:
        del vars(module)["_compiled_call_impl"]
        if isinstance(around, Uncompiled) and around.compiled is not None:
            vars(module)["_compiled_call_impl"] = around.compiled
    while isinstance(around, Uncompiled):  # of another hooked model, which this one is a part of
        inner = around.compiled
        if isinstance(inner, Uncompiled) and inner.recorder is recorder:
            around.compiled = inner.compiled
        around = inner
    for name in INSTEAD:
        method = vars(module).get(name)
        if isinstance(method, Instead) and method.around.recorder is recorder:
            del vars(module)[name]
