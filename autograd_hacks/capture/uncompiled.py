"""What torch.compile has made of a hooked model, or of parts of it: forwards that are recorded run as they are written.

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
from autograd_hacks.support.internals import COMPILER, disable_dynamo
from autograd_hacks.support.stance import as_written
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import modules_of, tensors_of

Call = Callable[..., Any]


class Uncompiled:
    """Stands around the call of a module that is compiled, or may come to be: what is recorded runs as it is written, and
    all else compiled.  It also puts back what an interrupt leaves, for which torch calls no hook.

    It is in ``_compiled_call_impl``, which most copies and pickles of a module leave out.

    compiled: what ``module.compile()`` has put in its place, or None
    """

    def __init__(self, layer: nn.Module, recorder: Recorder, compiled: Call | None) -> None:
        self.layer, self.recorder, self.compiled = weakref.ref(layer), recorder, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer()
        if torch.compiler.is_dynamo_compiling():
            # The compiler follows this, too, so that evaluation is one graph: it runs for as long as these are so.
            if Switch.enabled and not Switch.pauses and torch.is_grad_enabled() and not torch.compiler.is_exporting():
                return _run(self, args, kwargs, True)
        elif torch.compiler.is_compiling():  # traced in another way, for export or by the library's own analysis
            pass
        elif Switch.on() and (torch.is_grad_enabled() or any(x.requires_grad for x in tensors_of((args, kwargs)))):
            return _run(self, args, kwargs, False) if COMPILER in sys.modules else self._call(layer, args, kwargs)
        return (layer._call_impl if self.compiled is None else self.compiled)(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_compiled: bool) -> Any:
        """The module's call as it is written.  is_compiled: whether compiled code calls it"""
        layer: Any = self.layer()
        has_own = _is_wrapped(layer)
        is_said = self.recorder.said_uncompiled
        if not is_said and (is_compiled or has_own or not isinstance(self.compiled, Uncompiled | None)):
            self.recorder.said_uncompiled = True
            warnings.warn(
                f"{type(getattr(layer, '_orig_mod', layer)).__name__} is compiled, and compiled code has no hooks: forward "
                "passes that autograd_hacks records run it as it is written. Compiled code runs under torch.no_grad(), "
                "within autograd_hacks.pause_hooks(), and after autograd_hacks.remove_hooks.",
                stacklevel=2,
            )
        with as_written(has_own):
            return self._call(layer, args, kwargs)

    def _call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return layer._call_impl(*args, **kwargs)
        except Exception:  # which the layer's own hooks hear of
            raise
        except BaseException:
            self.recorder.interrupt()
            raise

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # all that is left in a copy of a module


# Left alone by the compiler, which is imported when it is called first, and which says why it can't go on where it meets it.
_run: Any = disable_dynamo(Uncompiled.run)
_run._torchdynamo_disable = True
_run._torchdynamo_disable_msg = (
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
    for module in modules_of(model) if COMPILER in sys.modules else ():
        if not isinstance(module._compiled_call_impl, Uncompiled | None) or _is_wrapped(module):
            put_around(module, recorder)
    put_around(model, recorder)
    for name in INSTEAD:
        vars(model).setdefault(name, Instead(vars(model)["_compiled_call_impl"], name))


def put_around(module: nn.Module, recorder: Recorder) -> None:
    there: Any = module._compiled_call_impl
    if not isinstance(there, Uncompiled) or there.recorder is not recorder:
        vars(module)["_compiled_call_impl"] = Uncompiled(module, recorder, there)


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a module is what torch.compile has returned, or its method ``forward`` is."""
    forward = getattr(module, "forward", None)
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def take_from_around(module: nn.Module, recorder: Recorder) -> None:
    """Puts back what is compiled."""
    holder, key = vars(module), "_compiled_call_impl"
    while isinstance(around := holder.get(key), Uncompiled):  # several, of hooked models that this one is a part of, too
        if around.recorder is recorder:
            holder[key] = around.compiled
        holder, key = vars(around), "compiled"
    if vars(module).get("_compiled_call_impl") is None:
        vars(module).pop("_compiled_call_impl", None)
    for name in INSTEAD:
        method = vars(module).get(name)
        if isinstance(method, Instead) and method.around.recorder is recorder:
            del vars(module)[name]
