"""``python -m autograd_hacks``: an overview, the pages, explanations of errors, and a check of your own model."""

import argparse
import copy
import importlib.metadata
import os
import pkgutil
import platform
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import EXPLAINED, ProbeFailed, SamplesMixed, VerificationFailed
from autograd_hacks.support.contexts import cuda_devices_of, random_state, with_random_state
from autograd_hacks.support.display import percent, text_table
from autograd_hacks.support.pages import explained, folder
from autograd_hacks.support.ranges import check
from autograd_hacks.support.trees import tensors_of

TOOLS = [
    *("einops", "numpy", "scipy", "tqdm", "opacus", "transformers", "lightning", "accelerate", "skorch", "torchjd"),
    "laplace-torch",
]
"""Tools with an integration, by their names on PyPI."""
WHERE = "expected module:function, a function without arguments that returns a model and the arguments of its forward"
ENGINE = "expected module:function, a function of (model, batch, loss) that returns rows, norms or a Gram matrix"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the doctor found a fault, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        "python -m autograd_hacks",
        description=f"autograd_hacks {autograd_hacks.__version__}: the gradient of every sample's own loss, from one pass",
    )
    parser.add_argument("--version", action="version", version=f"autograd_hacks {autograd_hacks.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="print versions and devices, and check rows, also of your model")
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, x), (model, (x, ...)) or, by keyword, (model, {'x': x}); "
        "with --engine also (model, batch, loss)",
    )
    doctor.add_argument(
        "--engine",
        metavar="MODULE:FUNCTION",
        help="check another engine's numbers: a function of (model, batch, loss) that returns rows by parameter, norms, or "
        "a Gram matrix, as check_rows accepts them",
    )
    doctor.add_argument(
        "--coverage",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="with --engine: the smallest share of the parameters to accept, 1 for all; below it the exit status is 1",
    )
    docs = commands.add_parser("docs", help="open the pages in a browser; build them first if they aren't built")
    explain = commands.add_parser("explain", help="print more about an error: the section that its last line names")
    explain.add_argument("name", nargs="?", metavar="NAME", help="a section or an error class; without it, all are listed")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "explain":
        return _explain(options.name, explain)
    if options.command == "docs":
        return _docs(docs)
    try:
        check("doctor", "", coverage=options.coverage)
        engine = None if options.engine is None else _function(options.engine, ENGINE)
        given = _made_for_the_purpose() if options.model is None else _returned_by(options.model, engine is not None)
    except ValueError as error:
        doctor.error(str(error))
    print("\n".join(_machine()), end="\n\n")
    if engine is not None:
        return _check_engine(engine, given, options.engine, options.model or "a small model", options.coverage)
    return _check(given, options.model or "a small model")


def _docs(parser: argparse.ArgumentParser) -> int:
    """Opens the built pages.  Builds them first, without running notebooks, if they aren't there."""
    build = folder() / "build.py"
    site = build.parent / "_build" / "html" / "index.html"
    if not site.exists() and build.exists():
        subprocess.run([sys.executable, build, "-q", "-D", "nb_execution_mode=off", "-b", "html"], check=False)
    if not site.exists():
        parser.error("pip installs no built pages. In a clone, pip install '.[docs]' installs what builds them")
    print(site)
    webbrowser.open(site.as_uri())
    return 0


def _explain(name: str | None, parser: argparse.ArgumentParser) -> int:
    """Prints one section; or the names of all sections, each with the error classes that it explains."""
    if name is not None:
        try:
            print(explained(name))
        except (KeyError, FileNotFoundError) as error:
            parser.error(str(error.args[0]))
        return 0
    sections = [(known, section) for known, section in EXPLAINED.items() if known[0].islower()]
    classes = [(known, section) for known, section in EXPLAINED.items() if known[0].isupper()]
    print("python -m autograd_hacks explain NAME prints a section. The sections are:\n")
    rows = [(name, own[0], " ".join(known for known, section in classes if section == own)) for name, own in sections]
    print(text_table([("name", "section", "errors"), *sorted(rows)]))
    return 0


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


class Given(NamedTuple):
    """A model, its forward's positional and keyword arguments, and optionally a loss of model and batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Tensor] | None = None


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
            checked = autograd_hacks.check_rows(model, batch, loss, numbers)
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


if __name__ == "__main__":
    sys.exit(main())
