"""The numbers that public functions take: one table of their ranges, and the check by it that each function begins with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import signature
from math import inf
from numbers import Integral, Real
from sys import maxsize
from typing import Any, TypeVar

import torch
from torch import Tensor

from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.trees import unpacked

F = TypeVar("F", bound=Callable[..., Any])
_LEFT_OUT: Any = object()
_CONTAINERS: dict[str, tuple[str, Callable[[Any], list[Any] | None]]] = {
    "": ("a {}", lambda x: [x]),
    "dictionary": ("a {}, or a dictionary of such", lambda x: [*x.values()] if isinstance(x, Mapping) else [x]),
    "tree": ("a {}, or a tree of such", lambda x: [own for own in tree_leaves(unpacked(x)) if own is not None]),
}
"""{name: what messages say, and the numbers of a value; None if it is no such container}.  A tree needn't have any."""


def is_number(value: object) -> bool:
    """Whether a value is a real number, NumPy's included, or a tensor without axes that holds one."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class Range:
    """The numbers that an argument may be.

    interval: with '[' or ']' if a bound is in it, with '(' or ')' if not: '(0, 1]'
    inside: a container of numbers of the range, see `_CONTAINERS`
    kind: what the numbers are, for messages; whole ones if it says so
    """

    def __init__(self, interval: str, inside: str = "", kind: str = "number") -> None:
        text, self._numbers_in = _CONTAINERS[inside]
        self.text, self._is_tree = text.format(f"{kind} in {interval}"), inside == "tree"
        self.low, self.high = map(float, interval[1:-1].split(", "))
        self._ends = [bound for bound, end in ((self.low, interval[0]), (self.high, interval[-1])) if end in "[]"]
        self._fits = is_whole if kind.startswith("whole") else is_number
        self.plain: tuple[type, ...] = (int,) if self._fits is is_whole else (float, int)
        """The types of most numbers, where one may be given."""

    def refusal(self, value: Any) -> type[TypeError | ValueError] | None:
        """None for a number in the range, ValueError for another number, TypeError for anything else."""
        held = self._numbers_in(value)
        if held is None or not all(map(self._fits, held)):
            return TypeError
        are_inside = all(self.low < x < self.high or x in self._ends for x in held)
        return None if are_inside and (held or self._is_tree) else ValueError


def whole(interval: str, inside: str = "") -> Range:
    return Range(interval, inside, "whole number")


_NAMES = {
    whole("(-inf, inf)"): "seed",
    whole("(-inf, inf)", "tree"): "batch_dim compile.batch",
    whole("[0, inf)"): "first group.groups verify.rows",
    whole("[1, inf)"): """ahead bands chunk_size dim draws entries every k max_pairs micro_batch_size parts
    per_user project rank samples steps
    """,
    # Where a budget is for what is kept, from batch to batch or from norms to sums, 0 keeps nothing.
    Range(
        "[0, inf]", kind="number of bytes"
    ): "compile.max_bytes compute_hess.max_bytes compute_hess_over.max_bytes over.max_bytes",
    Range("[1, inf)", kind="whole number of bytes"): "max_bytes",
    Range("(0, 1)"): "delta tolerance",
    Range("(0, 1]"): "threshold noise_for.rate",
    Range("[0, 1)"): "smoothing",
    Range("[0, 1]"): "coverage quantile",
    Range("(0, inf)"): "batch_size damping deviation epsilon expected_batch_size rate scale",
    Range("(0, inf]"): "max_grad_norm max_norm",  # see also `check_bound`
    Range("(0, inf]", "dictionary"): "clip_and_noise_.max_norm PrivateTraining.max_norm",
    Range("[0, inf)"): "linear_operator.damping noise_multiplier",
    Range("[0, inf]"): "bound PrivateStep.deviation",
}
RANGES = {name: allowed for allowed, names in _NAMES.items() for name in names.split()}
"""{name of an argument, or 'function.argument' where it differs from others of that name: its range}.  None is allowed, too,
where it is the default."""


def check(who: str, page: str, *optional: str, **numbers: Any) -> None:
    """Raises TypeError or ValueError for numbers outside of their range in `RANGES`.

    who: the function that was given them
    page: the end of the message, where the arguments are explained
    optional: those that may be None
    """
    for name, value in numbers.items():
        allowed = RANGES.get(f"{who}.{name}") or RANGES[name]
        if not (
            (type(value) in allowed.plain and allowed.low < value < allowed.high) or (value is None and name in optional)
        ) and (error := allowed.refusal(value)):
            expected = allowed.text + ", or None" * (name in optional)
            raise error(f"{who} was given {name}={value!r}; expected {expected}" + page)


def check_word(who: str, page: str, allowed: Collection[object], **given: object) -> None:
    """Raises ValueError for an argument that is none of the allowed words.  The others are as in `check`."""
    for name, word in given.items():
        if word not in allowed:
            raise ValueError(f"{who} was given {name}={word!r}; expected one of {', '.join(map(repr, allowed))}" + page)


def checked(page: str) -> Callable[[F], F]:
    """A decorator: before the function does anything it runs `check` on its numbers.  None is legal where it is the default.

    Functions in which processes agree on errors call `check` there instead, so that none waits for one that was given less.
    """

    def of(f: F) -> F:
        who = f.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        slots: list[tuple[str, int, Range, tuple[str, ...]]] = []
        for place, p in enumerate(signature(f).parameters.values()):
            if allowed := RANGES.get(f"{who}.{p.name}") or RANGES.get(p.name):
                optional = (p.name,) if p.default is None else ()
                slots.append((p.name, maxsize if p.kind is p.KEYWORD_ONLY else place, allowed, optional))

        @wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name, place, allowed, optional in slots:
                value = args[place] if place < len(args) else kwargs.get(name, _LEFT_OUT)
                if value is _LEFT_OUT or (type(value) in allowed.plain and allowed.low < value < allowed.high):
                    continue
                check(who, page, *optional, **{name: value})
                if is_whole(value):  # NumPy's as Python's: keys of random numbers are made from their repr
                    if place < len(args):
                        args = (*args[:place], int(value), *args[place + 1 :])
                    else:
                        kwargs[name] = int(value)
            return f(*args, **kwargs)

        return call  # type: ignore[return-value]

    return of


def check_bound(who: str, max_norm: object, noise: object, page: str, name: str = "max_norm") -> None:
    """Raises ValueError for an infinite bound beside noise, which is a multiple of it.

    max_norm: a bound, or several by pattern
    noise: the noise multiplier, or the epsilon that it follows from; 0 or None for no noise
    name: the bound's name
    """
    bounds = max_norm.values() if isinstance(max_norm, Mapping) else [max_norm]
    if noise and inf in bounds:
        raise ValueError(
            f"{who} was given {name}={max_norm!r} and noise of {noise}; expected a finite {name}, because the noise is a "
            "multiple of it, or no noise" + page
        )
