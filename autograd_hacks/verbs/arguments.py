"""Checks of verbs' arguments: directions, groups, names, sizes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.errors import ON_VERBS
from autograd_hacks.forms import Form
from autograd_hacks.support.layout import differs, rounding_of


def check_direction(v: Mapping[str, Tensor], like: Mapping[str, Tensor | Form], who: str = "dot") -> None:
    """Raises unless ``v`` is a direction in the space of the parameters, {name: shape}.  like: these, or their forms"""
    check_kind(who, ON_VERBS, Mapping, "a direction, {name: tensor} for each trainable parameter", v=v)
    if wrong := differing(v, like):
        raise ValueError(f"{who}: the direction is {wrong}; expected an entry for each of {some(list(like))}." + ON_VERBS)
    for name, own in like.items():
        x, shape, like_it = v[name], own.shape, own.like if isinstance(own, Form) else own
        is_number = isinstance(x, Tensor) and (x.is_floating_point() or (x.is_complex() and like_it.is_complex()))
        if not is_number or x.shape != shape:
            raise ValueError(
                f"{who}: the direction's entry for {name!r} is {kind_of(x)}; expected a floating-point tensor of shape "
                f"{tuple(shape)}, and a complex one only for complex parameters." + ON_VERBS
            )


def numbered(ids: Tensor, groups: int | None, samples: int) -> tuple[Tensor, int]:
    """The group number of each sample, and the number of groups.  groups: that, or None for ids that aren't numbers"""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"group: ids are {kind_of(ids)}; expected a tensor of N integers: ids.long()." + ON_VERBS)
    if ids.shape != (samples,):
        raise ValueError(f"group: ids have shape {tuple(ids.shape)}; expected ({samples},), one for each sample." + ON_VERBS)
    if groups is None:
        names, numbers = ids.unique(return_inverse=True)
        return numbers, len(names)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < groups:
        raise ValueError(
            f"group: ids go from {int(ids.min())} to {int(ids.max())}; expected [0, {groups}), because groups={groups}. "
            "Raise it." + ON_VERBS
        )
    return ids, groups


TRIED = 1024
"""How many numbers of a piece of rows are used to check that a function is elementwise."""


def elementwise(f: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    """``f`` with a check that raises ValueError if it is not elementwise.  name: of the parameter whose rows it gets"""

    def checked(rows: Tensor) -> Tensor:
        number = torch.arange(0, rows.numel(), max(1, rows.numel() // TRIED), device=rows.device)
        at = number // max(1, rows.shape[1]), number % max(1, rows.shape[1])
        with torch.no_grad():  # copies, because f may overwrite its argument
            some = torch.cat([rows[at], 1 - 2 * rows[at]])
            lines = [some.clone()[None], some.clone()[:, None]] if len(number) else []
            beside = [f(line) for line in lines]
        is_overwritten = any(line._version for line in lines)
        found = rows if is_overwritten else f(rows)
        if is_overwritten or not isinstance(found, Tensor) or found.shape != rows.shape:
            got = "overwrote them" if is_overwritten else f"returned {kind_of(found)}"
            raise ValueError(
                f"reduce, at {name!r}: the function got rows of shape {tuple(rows.shape)} and {got}; expected a new tensor "
                "of the same shape: lambda g: g.clamp(-1, 1). For the sum of norms take grads.norms().sum()." + ON_VERBS
            )
        apart = [x.flatten()[: len(number)] for x in beside if isinstance(x, Tensor) and x.numel() == len(some)]
        own = found[at].detach()
        if len(apart) < len(beside) or any(x.dtype != own.dtype or differs(x, own, rounding_of(own)).any() for x in apart):
            raise ValueError(
                f"reduce, at {name!r}: the function's value for a number changes with the other numbers in the tensor; "
                "expected an elementwise one without random numbers. Divide by norms by scaled(1 / grads.norms())."
                + ON_VERBS
            )
        return found

    return checked


def chosen_samples(index: slice | Tensor, samples: int) -> Tensor:
    """The numbers of the selected samples, a vector.  index: a slice, a mask of N booleans, or sample numbers"""
    if isinstance(index, slice):
        return torch.tensor(range(samples)[index], dtype=torch.long, device="cpu")
    is_vector = isinstance(index, Tensor) and index.ndim == 1 and not (index.is_floating_point() or index.is_complex())
    if not is_vector or index.dtype == torch.uint8:  # torch takes uint8 for a mask
        raise TypeError(
            f"select: the index is {kind_of(index)}; expected a slice, or a vector of booleans or integers: index.long()"
            + ON_VERBS
        )
    try:
        return torch.arange(samples, device="cpu")[index.cpu()]
    except IndexError as error:
        raise IndexError(
            f"select: {error}; expected a mask of {samples} booleans or numbers in [{-samples}, {samples})" + ON_VERBS
        ) from None


def name_among(key: object, named: Sequence[tuple[str, Tensor]], trained: Collection[str]) -> str:
    """The name of the trainable parameter that ``key``, a name or the parameter itself, refers to, or a KeyError.

    named: all names of the model's parameters    trained: the names of those that train
    """
    wanted = next((p for name, p in named if p is key or (isinstance(key, str) and name == key)), None)
    names = [name for name, p in named if p is wanted]
    if (first := next((name for name in names if name in trained), None)) is not None:
        return first
    wrong = f"the parameter {names[0]!r} is frozen" if names else f"there is no trainable parameter {key!r}"
    if isinstance(key, Tensor) and not names:
        wrong = f"{kind_of(key)} is not a parameter of the model"
    elif isinstance(key, int | slice):
        wrong = f"{key!r} is not a parameter. Select samples by select(index)"
    last = [name for name in trained if isinstance(key, str) and f".{name}".endswith(f".{key}")]
    close = [*last, *get_close_matches(str(key), [name for name in trained if name not in last], 3)]
    listing = ", ".join(map(repr, close[:5] or list(trained)[:5])) + ("" if close or len(trained) <= 5 else " ...")
    raise KeyError(f"{wrong}; expected a trainable parameter, or its name: {listing}")


def check_kind(who: str, page: str, kinds: Any, expected: str, **given: object) -> None:
    """Raises TypeError for arguments of other types.  expected: what to give, and the end `page`, for the message"""
    for name, value in given.items():
        if not isinstance(value, kinds):
            raise TypeError(f"{who} was given {name}={kind_of(value)}; expected {expected}" + page)


def check_loader(who: str, loader: object, page: str) -> None:
    """Raises TypeError for what has no batches."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{who} was given loader={loader!r}; expected batches, such as a DataLoader" + page)


def check_state(who: str, state: object, own: Collection[str], page: str) -> None:
    """Raises unless a state has the entries that ``state_dict()`` of the same object has.  own: these"""
    if not isinstance(state, Mapping) or not set(own) <= state.keys():
        found = some(list(map(str, state))) or "no entry" if isinstance(state, Mapping) else kind_of(state)
        raise ValueError(f"{who}.load_state_dict was given {found}; expected its state_dict(): {some(list(own))}" + page)


def kind_of(value: object) -> str:
    """A description of a value, for messages."""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def some(names: Sequence[str]) -> str:
    """The first five names and the number of others."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def differing(given: Collection[str], expected: Collection[str]) -> str:
    """What is wrong with some names, for messages: "without 'a', and with 'b' too many"."""
    missing, extra = [n for n in expected if n not in given], [n for n in given if n not in expected]
    parts = [f"without {some(missing)}"] * bool(missing) + [f"with {some(extra)} too many"] * bool(extra)
    return ", and ".join(parts)
