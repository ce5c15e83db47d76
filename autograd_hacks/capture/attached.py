"""What is attached to modules: hooks, and guards around calls.  No mathematics."""

from __future__ import annotations

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
        if not output:
            return self.then(self.path, module, args, kwargs)
        # Whether no hook came before but the library's own, which hand on what the module returned.
        for hook in module._forward_hooks.values():
            if hook is self or not isinstance(hook, Hook):
                break
        return self.then(self.path, module, args, kwargs, *output, hook is self)

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


class _Unhooked:
    """What is left of a hook in a copy of a hooked model, until the copy first runs."""

    def __call__(self, module: nn.Module, *_: object) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                drop(module, hooks, key)
