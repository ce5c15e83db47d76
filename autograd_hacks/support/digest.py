"""What tells batches and weights from others, in any process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hashlib import _Hash

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def digest_of(*things: object, before: str = "") -> str:
    """What tells nested tensors, arrays, numbers, text and objects that hold such from others.  before: to go on from"""
    found = hashlib.sha256(before.encode())
    _take(things, found, [])
    return found.hexdigest()


def _take(thing: Any, found: _Hash, around: list[object]) -> None:
    """around: what this is a part of, from outside in"""
    if isinstance(thing, _PLAIN):
        _add(repr(thing).encode(), found)
        return
    depth = next((n for n, outer in enumerate(around) if outer is thing), None)
    if depth is not None:  # as a batch that refers to its data set, which has it
        _add(f"again {depth}".encode(), found)
        return
    around = [*around, thing]
    _add(type(thing).__qualname__.encode(), found)
    if isinstance(thing, Tensor):
        _take_tensor(thing.detach(), found, around)
    elif isinstance(thing, Mapping):
        _take([list(thing), *thing.values()], found, around)
    elif isinstance(thing, list | tuple):
        _add(str(len(thing)).encode(), found)
        for value in thing:
            _take(value, found, around)
    elif callable(getattr(thing, "tobytes", None)):  # an array, an image
        kind = getattr(thing, "dtype", None)
        _add(repr([getattr(thing, name, None) for name in ("shape", "size", "mode")] + [str(kind)]).encode(), found)
        if str(kind) == "object":  # whose bytes are addresses
            _take(thing.tolist(), found, around)
        else:
            _add(thing.tobytes(), found)
    elif own := _attributes(thing):
        _take(own, found, around)
    else:
        _add(_ADDRESS.sub("", repr(thing)).encode(), found)


def _take_tensor(own: Tensor, found: _Hash, around: list[object]) -> None:
    if own.is_nested:
        _take(list(own.unbind()), found, around)
        return
    if own.is_sparse:
        _take([tuple(own.shape), own._indices(), own._values()], found, around)
        return
    own = (own if own.layout == torch.strided else own.to_dense()).resolve_conj().resolve_neg().cpu().contiguous()
    _add(repr((tuple(own.shape), own.dtype)).encode(), found)
    _add(own.reshape(-1).view(torch.uint8).numpy().tobytes() if own.numel() else b"", found)


def _add(what: bytes, found: _Hash) -> None:
    found.update(f"{len(what)} ".encode())  # or "1", "12" would be "11", "2"
    found.update(what)


def _attributes(thing: object) -> dict[str, Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(thing).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    found = {name: getattr(thing, name) for name in names if not name.startswith("__") and hasattr(thing, name)}
    return found | (vars(thing) if hasattr(thing, "__dict__") else {})
