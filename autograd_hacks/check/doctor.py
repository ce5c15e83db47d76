"""A check of one's own model, or of another engine's numbers, on this machine: ``python -m autograd_hacks doctor``."""

import copy
import importlib.metadata
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from torch import Tensor

import autograd_hacks
from autograd_hacks.check.check_rows import check_rows
from autograd_hacks.errors import ProbeFailed, SamplesMixed, VerificationFailed
from autograd_hacks.support.contexts import cuda_devices_of, random_state, with_random_state
from autograd_hacks.support.display import percent, text_table
from autograd_hacks.support.trees import tensors_of

TOOLS = [
    *("einops", "numpy", "scipy", "tqdm", "opacus", "transformers", "lightning", "accelerate", "torchjd"),
    "laplace-torch",
]
"""Tools with an integration, by their names on PyPI."""
WHERE = "expected module:function, a function without arguments that returns a model and the arguments of its forward"
ENGINE = "expected module:function, a function of (model, batch, loss) that returns rows or norms"


class Given(NamedTuple):
    """A model, its forward's positional and keyword arguments, and optionally a loss of model and batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Tensor] | None = None


def named(model: str | None, engine: str | None) -> tuple[Given, Callable[..., Any] | None]:
    """What is to be checked: a model with its arguments, and another engine.

    model: ``module:function``, which returns a model and its arguments; None for a small model
    engine: ``module:function``; None for this library

    Raises ValueError if a function isn't there, fails, or returns something else.
    """
    return (
        _made_for_the_purpose() if model is None else _returned_by(model, with_loss=engine is not None),
        None if engine is None else _function(engine, ENGINE),
    )


def examine(given: Given, engine: Callable[..., Any] | None, of: str, name: str | None, coverage: float) -> int:
    """Prints versions and devices, and checks rows.  Returns the exit status, 1 if there is a fault.

    of, name: the model's name and the engine's    coverage: the smallest share of the parameters to accept from an engine
    """
    print("\n".join(_machine()), end="\n\n")
    return _check(given, of) if engine is None else _check_engine(engine, given, str(name), of, coverage)


def _machine() -> list[str]:
    threads = torch.get_num_threads()
    devices = ["CPU", *(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))]
    devices += ["MPS"] if torch.backends.mps.is_available() else []
    return [
        f"autograd_hacks  {autograd_hacks.__version__}, in {Path(autograd_hacks.__file__).parent}",
        f"torch           {torch.__version__}, {threads} thread{'s' * (threads > 1)}",
        f"Python          {platform.python_version()}, {platform.platform()}",
        f"devices         {', '.join(devices)}",
        f"tools           {', '.join(f'{name} {_version(name)}' for name in TOOLS)}",
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _made_for_the_purpose() -> Given:
    device, draws = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    return Given(model.to(device), (torch.randn(8, 1, 8, 8, generator=draws, device="cpu").to(device),), {})


def _function(place: str, expected: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    expected: the end of a message, what the function should be
    Raises ValueError if there is no such function.
    """
    module, _, name = place.partition(":")
    if module.endswith(".py"):
        raise ValueError(f"{place!r} is the name of a file; {expected}, here {Path(module).stem}:{name}")
    sys.path.insert(0, os.getcwd())  # python -m does this; a console script doesn't
    function = _tried(pkgutil.resolve_name, place, what=f"importing {place!r}", expected=expected)
    if not callable(function):
        raise ValueError(f"{place!r} is not the name of a function; {expected}")
    return cast(Callable[..., Any], function)


def _returned_by(place: str, with_loss: bool) -> Given:
    """The result of calling ``module:function``.

    with_loss: whether it may also return a loss
    Raises ValueError if there is no such function, it fails, or it returns something else.
    """
    returned = _tried(_function(place, WHERE), what=f"{place}()", expected=WHERE)
    is_long = with_loss and isinstance(returned, tuple) and len(returned) == 3 and callable(returned[2])
    if not (isinstance(returned, tuple) and (len(returned) == 2 or is_long) and isinstance(returned[0], nn.Module)):
        kinds = ", ".join(type(x).__name__ for x in returned) if isinstance(returned, tuple) else type(returned).__name__
        more = " or (model, batch, loss)" if with_loss else ""
        raise ValueError(f"{place} returned {kinds}; {WHERE}: (model, x), (model, (x, mask)) or (model, {{'x': x}}){more}")
    model, given, loss = returned if is_long else (*returned, None)
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):  # what Hugging Face's tokenizers return
        return Given(model, (), dict(given), loss)
    return Given(model, given if isinstance(given, tuple) else (given,), {}, loss)


def _tried(function: Callable[..., Any], *args: Any, what: str, expected: str) -> Any:
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {error}; {expected}") from error


def _check_engine(engine: Callable[..., Any], given: Given, name: str, of: str, coverage: float) -> int:
    """Compares an engine's numbers with one plain backward pass for each sample.

    name: the engine's name
    of: the model's name
    coverage: the smallest share of the parameters to accept
    """
    model, batch = given.model, given.kwargs or given.args
    loss = given.loss or partial(_squares, bool(given.kwargs))
    state = random_state(cuda_devices_of(model))  # so that both draw the same dropout masks
    try:
        with with_random_state(state):
            numbers = engine(copy.deepcopy(model), batch, loss)  # engines hook and wrap the model
        with with_random_state(state):
            checked = check_rows(model, batch, loss, numbers)
    except VerificationFailed as error:
        print(f"{of}: the numbers of {name} are wrong. {error}")
        return 1
    except Exception as error:  # the doctor reports whatever the engine or the model raises
        print(f"{of}: {name} could not be checked. {type(error).__name__}: {error}")
        return 1
    is_enough = checked.share >= coverage
    found = f"the numbers of {name} equal autograd's, for {percent(checked.share)} of the parameters"
    print(checked, f"\n\n{of}: {found}", "" if is_enough else f"; {percent(coverage)} were asked for", sep="")
    return 0 if is_enough else 1


def _squares(by_name: bool, model: nn.Module, *batch: Any) -> Tensor:
    """N losses for any model: half the squared norm of each sample's outputs.  Samples are on axis 0.

    by_name: whether the batch is a dictionary of the model's arguments
    """
    returned = model(**batch[0]) if by_name else model(*batch)
    outputs = [x for x in tensors_of(returned) if x.requires_grad and x.ndim]
    if not outputs:
        raise ValueError("the model returned no output with a batch axis, so there is no loss; return (model, batch, loss)")
    return torch.stack([x.square().reshape(len(x), -1).sum(1) for x in outputs]).sum(0) / 2


def _check(given: Given, name: str) -> int:
    """Runs a step and compares rows with autograd's.  Returns the exit status."""
    model, args, kwargs, _ = given
    with autograd_hacks.add_hooks(model):
        try:
            with torch.enable_grad():
                outputs = [x for x in tensors_of(model(*args, **kwargs)) if x.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
            if not autograd_hacks.per_sample_grads(model, "sum").samples:
                print(f"{name}: nothing was checked, because the batch has no samples. Return a batch of three or more")
                return 1
            autograd_hacks.verify(model, samples=2, args=args, kwargs=kwargs)
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
