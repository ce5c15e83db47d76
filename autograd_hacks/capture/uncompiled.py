"""Runs hooked modules uncompiled while they are recorded, if torch.compile has compiled the model or parts of it.

No mathematics.
"""

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import ON_COMPILING
from autograd_hacks.support.contexts import as_written
from autograd_hacks.support.internals import COMPILER, disable_dynamo
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import tensors_of

Call = Callable[..., Any]


class Uncompiled:
    """Wraps the call of a module that is, or may become, compiled.  Recorded calls run uncompiled; all others run compiled.

    It also cleans up after an interrupt, for which torch calls no hook.  It is stored in ``_compiled_call_impl``, which most
    copies and pickles of a module leave out.

    compiled: what ``module.compile()`` has stored there, or None
    """

    def __init__(self, layer: nn.Module, recorder: Recorder, compiled: Call | None) -> None:
        self.layer, self.recorder, self.compiled = weakref.ref(layer), recorder, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer()
        if torch.compiler.is_dynamo_compiling():
            # The compiler traces this too, so that evaluation is one graph.  Its guards hold as long as these values do.
            if not Switch.pauses and torch.is_grad_enabled() and not torch.compiler.is_exporting():
                return _run(self, args, kwargs, True)
        elif torch.compiler.is_compiling():  # traced in another way: for export, or by this library's own analysis
            pass
        elif Switch.on() and (torch.is_grad_enabled() or any(x.requires_grad for x in tensors_of((args, kwargs)))):
            return _run(self, args, kwargs, False) if COMPILER in sys.modules else self._call(layer, args, kwargs)
        return (layer._call_impl if self.compiled is None else self.compiled)(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_compiled: bool) -> Any:
        """Runs the module's call uncompiled.  is_compiled: whether compiled code calls it"""
        layer: Any = self.layer()
        has_own = _is_wrapped(layer)
        is_said = self.recorder.said_uncompiled
        if not is_said and (is_compiled or has_own or not isinstance(self.compiled, Uncompiled | None)):
            self.recorder.said_uncompiled = True
            warnings.warn(
                f"{type(getattr(layer, '_orig_mod', layer)).__name__} is compiled, but compiled code has no hooks. Forward "
                "passes that autograd_hacks records run uncompiled. Compiled code still runs under torch.no_grad(), "
                "within autograd_hacks.pause_hooks(), and after autograd_hacks.remove_hooks. For compiled passes write "
                "step = autograd_hacks.compile(model, 'norms') with the model before it was compiled, and call step."
                + ON_COMPILING,
                stacklevel=2,
            )
        with as_written(has_own or self.recorder.kinds.independent):  # the tape has what runs as it is written
            return self._call(layer, args, kwargs)

    def _call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return layer._call_impl(*args, **kwargs)
        except Exception:  # the layer's own hooks see it
            raise
        except BaseException:
            self.recorder.interrupt()
            raise

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a module gets None instead


# The compiler skips this function (and is imported at the first call).  If it can't, it shows the message below.
_run: Any = disable_dynamo(Uncompiled.run)
_run._torchdynamo_disable = True
_run._torchdynamo_disable_msg = (
    "a model hooked by autograd_hacks runs uncompiled while it is recorded, but fullgraph=True requires one graph. "
    "Leave fullgraph out, or compile first and hook what torch.compile returned: add_hooks(compiled)"
)


class Instead:
    """Replaces the methods of a hooked model that overwrite the wrapper around its calls, or copy it.

    name: the method's name, one of `INSTEAD`
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
        return partial, (getattr(type(layer), self.name), layer)  # the copy's own method


INSTEAD = ("compile", "_replicate_for_data_parallel")  # the second is DataParallel's


def put_around_all(model: nn.Module, recorder: Recorder) -> None:
    """Wraps the model, and compiled modules inside it, so that recorded calls run uncompiled."""
    modules = recorder.tree.modules() if COMPILER in sys.modules else ()
    wrapped = {kind for kind in set(map(type, modules)) if _is_wrapped(kind)}
    for module in modules:
        own = module.__dict__
        if ("forward" in own or "_compiled_call_impl" in own or type(module) in wrapped) and (
            not isinstance(module._compiled_call_impl, Uncompiled | None) or _is_wrapped(module)
        ):
            put_around(module, recorder)
    put_around(model, recorder)
    for name in INSTEAD:
        vars(model).setdefault(name, Instead(vars(model)["_compiled_call_impl"], name))


def put_around(module: nn.Module, recorder: Recorder) -> None:
    there: Any = module._compiled_call_impl
    if not isinstance(there, Uncompiled) or there.recorder is not recorder:
        vars(module)["_compiled_call_impl"] = Uncompiled(module, recorder, there)


def _is_wrapped(module: nn.Module | type[nn.Module]) -> bool:
    """Whether torch.compile returned the module, or compiled its method ``forward``, or that of a class."""
    forward = getattr(module, "forward", None)
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def take_from_around(module: nn.Module, recorder: Recorder) -> None:
    """Removes the wrapper and restores the compiled call."""
    holder, key = vars(module), "_compiled_call_impl"
    while isinstance(around := holder.get(key), Uncompiled):  # several, if other hooked models contain this one
        if around.recorder is recorder:
            holder[key] = around.compiled
        holder, key = vars(around), "compiled"
    if vars(module).get("_compiled_call_impl") is None:
        vars(module).pop("_compiled_call_impl", None)
    for name in INSTEAD:
        method = vars(module).get(name)
        if isinstance(method, Instead) and method.around.recorder is recorder:
            del vars(module)[name]
