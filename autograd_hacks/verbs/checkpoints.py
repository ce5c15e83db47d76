"""Weights of training, to which a model is brought one after the other.  No mathematics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_DATA_SETS
from autograd_hacks.support.parts import part_of
from autograd_hacks.verbs.arguments import kind_of

State: TypeAlias = "Mapping[str, Tensor] | str | os.PathLike[str]"
Checkpoints: TypeAlias = "Iterable[tuple[State, float]]"
"""State dictionaries, or files of such, each with a weight."""
_EXPECTED = "expected [(state, weight), ...], of state dictionaries, or their files, and numbers"


@contextmanager
def weights_of(model: nn.Module, checkpoints: list[tuple[State, float]] | None) -> Iterator[Callable[[], Iterator[float]]]:
    """What brings the model to one checkpoint after the other, and says their weights; then it is as before.

    checkpoints: as `listed` returns them
    """
    if checkpoints is None:
        yield lambda: iter([1.0])
        return
    own = model.state_dict()

    def each() -> Iterator[float]:
        for state, weight in checkpoints:
            known: Any = state
            if isinstance(state, str | os.PathLike):
                known = torch.load(state, map_location="cpu", weights_only=True)
            if not isinstance(known, Mapping) or own.keys().isdisjoint(known):
                what = list(known)[:5] if isinstance(known, Mapping) else kind_of(known)
                raise ValueError(
                    f"over was given {'a checkpoint' if isinstance(state, Mapping) else state} with {what}; expected the "
                    f"state dictionary of this {type(model).__name__}: torch.load(path)['model'] say, where more was saved "
                    "with it" + ON_DATA_SETS
                )
            model.load_state_dict(known)
            yield weight

    kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in own.items()}
    try:
        yield each
    finally:
        model.load_state_dict(kept)


def listed(model: nn.Module, checkpoints: Checkpoints | None) -> list[tuple[State, float]] | None:
    """The checkpoints as a list, in which none is overwritten as others are loaded.  Raises ValueError for other things."""
    if checkpoints is None:
        return None
    if isinstance(checkpoints, Mapping | str) or not isinstance(checkpoints, Iterable):
        raise ValueError(f"over was given checkpoints={kind_of(checkpoints)}; {_EXPECTED}" + ON_DATA_SETS)
    found = list(checkpoints)
    if not found:
        raise ValueError(f"over was given no checkpoints in its list; {_EXPECTED}" + ON_DATA_SETS)
    trained, live = {_at(p) for p in model.parameters() if p.requires_grad}, 0
    memory = trained | {_at(x) for x in (*model.parameters(), *model.buffers())}
    for number, pair in enumerate(found):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], Mapping | str | os.PathLike) or isinstance(pair[1], Mapping | str):
            raise ValueError(f"over was given {kind_of(pair)} for a checkpoint; {_EXPECTED}" + ON_DATA_SETS)
        state, weight = pair
        places = {_at(x) for x in state.values() if isinstance(x, Tensor)} if isinstance(state, Mapping) else set()
        if isinstance(state, Mapping) and not places.isdisjoint(memory):
            copied: Any = {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}
            found[number], live = (copied, weight), live + (not places.isdisjoint(trained))
    if live > 1:
        raise ValueError(
            f"{live} of the checkpoints given to over are the model's weights of now: model.state_dict() holds no copies, "
            "and training overwrites what it returned before. Save copies, copy.deepcopy(model.state_dict())" + ON_DATA_SETS
        )
    return found


def _at(x: Tensor) -> object:
    part = part_of(x)
    return part.untyped_storage().data_ptr() if part.layout == torch.strided and part.numel() else object()
