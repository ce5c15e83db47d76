"""Patterns for the names of a model's parameters."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch.nn as nn

from autograd_hacks.errors import ON_VERBS

NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
NORMS = "norms"
"""The pattern that means all biases and the parameters of norm layers."""
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+")
"""The prefixes that wrappers add to parameters' names."""


def names_matching(
    only: str | Iterable[str], model: nn.Module, trained: Collection[str], what: str = "only", page: str = ON_VERBS
) -> list[str]:
    """The names of the trainable parameters that patterns match, or whose modules' names they match.  '*' matches any text,
    '?' any character.

    what: the name of the argument that holds the patterns, for the message
    page: the end of the message, where that argument is explained
    Raises ValueError for a pattern that matches none, TypeError for what isn't a name or has none.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    of_norms = {id(p) for m in model.modules() if isinstance(m, NORM_LAYERS) for p in m._parameters.values()}
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else []
    wrong = [type(pattern).__name__ for pattern in patterns if not isinstance(pattern, str)]
    if wrong or not patterns:
        expected = "expected names of parameters or modules, or patterns: '8.*'"
        raise TypeError(f"{what}={wrong or only!r} names no parameter; {expected}" + page)
    first = {id(p): name for name, p in reversed(named) if name in trained}  # a shared parameter has several names
    chosen = set[str]()
    for pattern in patterns:
        if pattern == NORMS:
            matching = [(name, p) for name, p in named if p.ndim < 2 or id(p) in of_norms]
        else:
            matching = [(name, p) for name, p in named if any(matches(n, pattern) for n in (name, unwrapped(name)))]
        meant = {first[id(p)] for _, p in matching if id(p) in first}
        if not meant:
            close = get_close_matches(pattern, list(trained), 3, 0.4) or list(trained)[:5]
            raise ValueError(
                f"{what}: {pattern!r} matches {'only frozen parameters' if matching else 'no parameter'}; expected the name "
                f"of a trainable parameter or of a module, or a pattern: {', '.join(map(repr, close))}." + page
            )
        chosen |= meant
    return [name for name in trained if name in chosen]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or the name of a module that has it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def unwrapped(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return WRAPPERS.sub("", name)
