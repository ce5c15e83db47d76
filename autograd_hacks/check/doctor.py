"""A check of one's own model on this machine: ``python -m autograd_hacks doctor``."""

import importlib.metadata
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

import autograd_hacks
from autograd_hacks.errors import ProbeFailed, SamplesMixed
from autograd_hacks.support.display import text_table
from autograd_hacks.support.trees import tensors_of

TOOLS = [
    *("einops", "numpy", "scipy", "tqdm", "opacus", "transformers", "lightning", "accelerate", "torchjd"),
    "laplace-torch",
]
"""Tools with an integration, by their names on PyPI."""
WHERE = "expected module:function, a function without arguments that returns a model and the arguments of its forward"


class Example(NamedTuple):
    """A model, and its forward's positional and keyword arguments."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def print_machine() -> None:
    """Prints versions and devices."""
    threads = torch.get_num_threads()
    devices = ["CPU", *(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))]
    devices += ["MPS"] if torch.backends.mps.is_available() else []
    versions = dict.fromkeys(TOOLS, "-") | {own.name: own.version for own in importlib.metadata.distributions()}
    print(
        f"autograd_hacks  {autograd_hacks.__version__}, in {Path(autograd_hacks.__file__).parent}",
        f"torch           {torch.__version__}, {threads} thread{'s' * (threads > 1)}",
        f"Python          {platform.python_version()}, {platform.platform()}",
        f"devices         {', '.join(devices)}",
        f"tools           {', '.join(f'{name} {versions[name]}' for name in TOOLS)}",
        sep="\n",
        end="\n\n",
    )


def small_model() -> Example:
    device, draws = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    return Example(model.to(device), (torch.randn(8, 1, 8, 8, generator=draws, device="cpu").to(device),), {})


def returned_by(place: str) -> Example:
    """The result of calling ``module:function``.

    Raises ValueError if there is no such function, it fails, or it returns something else.
    """
    module, _, name = place.partition(":")
    if module.endswith(".py"):
        raise ValueError(f"{place!r} is the name of a file; {WHERE}, here {Path(module).stem}:{name}")
    sys.path.insert(0, os.getcwd())  # python -m does this; a console script doesn't
    function = _tried(pkgutil.resolve_name, place, what=f"importing {place!r}")
    if not callable(function):
        raise ValueError(f"{place!r} is not the name of a function; {WHERE}")
    returned = _tried(function, what=f"{place}()")
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
        kinds = ", ".join(type(x).__name__ for x in returned) if isinstance(returned, tuple) else type(returned).__name__
        raise ValueError(f"{place} returned {kinds}; {WHERE}: (model, x), (model, (x, mask)) or (model, {{'x': x}})")
    model, given = returned
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):  # what Hugging Face's tokenizers return
        return Example(model, (), dict(given))
    return Example(model, given if isinstance(given, tuple) else (given,), {})


def _tried(function: Callable[..., Any], *args: Any, what: str) -> Any:
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}; {WHERE}") from error


def examine(given: Example, name: str) -> int:
    """Runs a step and compares rows with autograd's.  Returns the exit status, 1 if there is a fault.  name: the model's"""
    model, args, kwargs = given
    with autograd_hacks.add_hooks(model):
        try:
            with torch.enable_grad():
                outputs = [x for x in tensors_of(model(*args, **kwargs)) if x.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
            if not autograd_hacks.per_sample_grads(model, "sum").samples:
                print(f"{name}: nothing was checked, because the batch has no samples. Return a batch of three or more")
                return 1
            autograd_hacks.verify(model, rows=2, args=args, kwargs=kwargs)
            rows = autograd_hacks.describe(model, trained=True).rows
            independence, status = _independence(model, args, kwargs)
        except Exception as error:  # the doctor reports whatever the user's model raises
            print(f"{name}: the check failed. {type(error).__name__}: {error}")
            return 1
    print(text_table([("parameter", "layer", "how its rows are computed"), *(row.cells()[:3] for row in rows)]))
    print(f"\n{name}: the per-sample gradients of {len(rows)} parameters equal autograd's")
    print(f"{name}: {independence}")
    return status


def _independence(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    """Whether samples are independent, in words, and as an exit status."""
    try:
        autograd_hacks.verify(model, args=args, kwargs=kwargs, independent=True)
    except SamplesMixed as error:
        return f"samples are not independent. Private training needs independent samples. {error}", 1
    except ProbeFailed as error:
        return f"samples were not shown to be independent. Private training needs that. {error}", 0
    return f"samples are independent. {autograd_hacks.describe(model).independence}".strip(), 0
