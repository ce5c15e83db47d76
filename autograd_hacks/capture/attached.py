"""What is attached to modules: hooks, and guards around calls.  No mathematics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks.capture.recorder import Recorder


class Hook:
    """A hook: calls a method of the recorder's with a module's path and what torch gives hooks.

    Behind a forward it also says whether it stands first.  A copy of its module, by deepcopy or pickle, gets a hook that
    only removes itself.
    """

    def __init__(self, recorder: Recorder, then: Callable[..., Any], path: str = "") -> None:
        self.recorder, self.then, self.path = recorder, then, path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled forward has no hooks; its gradients are noticed when they arrive
            return None
        reads = self.recorder.forward.reads
        with reads.aside():
            if not output:
                changed = self.then(self.path, module, args, kwargs)
                if changed is not None:
                    reads.replace((args, kwargs), changed)
                return changed
            # Whether no hook came before but the library's own, which hand on what the module returned.
            for hook in module._forward_hooks.values():
                if hook is self or not isinstance(hook, Hook):
                    break
            changed = self.then(self.path, module, args, kwargs, *output, hook is self)
            if changed is not None:
                reads.replace(output[0], changed)
            return changed

    def __reduce__(self) -> tuple[type[_Unhooked], tuple[()]]:
        return _Unhooked, ()


def own_hooks(recorder: Recorder, module: nn.Module) -> list[tuple[dict[int, Any], int, Hook]]:
    """A recorder's hooks on a module: where they are, and by which key."""
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    entries = [(table, key, hook) for table in tables for key, hook in table.items()]
    return [(table, key, hook) for table, key, hook in entries if isinstance(hook, Hook) and hook.recorder is recorder]


def drop(module: nn.Module, hooks: dict[int, Any], key: int) -> None:
    """Takes a hook off, as its handle would."""
    del hooks[key]
    module._forward_hooks_with_kwargs.pop(key, None)
    module._forward_hooks_always_called.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)


class Guard:
    """Stands around the call of a layer for which something is switched while it runs, to switch it back after an interrupt.

    torch calls no hook for what is no Exception.
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
            self.recorder.interrupt(layer)
            raise

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _none, ()


def _none() -> None:
    """What is left of a guard in a copy of a layer."""


def guard(layer: nn.Module, recorder: Recorder) -> None:
    if layer._compiled_call_impl is None:
        layer._compiled_call_impl = Guard(layer, recorder)


class _Unhooked:
    """What is left of a hook in a copy of a hooked model, until the copy first runs."""

    def __call__(self, module: nn.Module, *_: object) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                drop(module, hooks, key)
