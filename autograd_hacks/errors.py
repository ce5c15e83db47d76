"""The library's exceptions.

Each message says where, what was given, what was expected and how to fix it.  It ends with the command that prints more.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch.nn as nn

__all__ = [
    "PerSampleGradientError", "NothingRecorded", "UnsupportedLayer", "UnsupportedOperation", "BatchSizeError",
    "SamplesMixed", "StaleRecord", "UnseenGradient", "ProbeFailed", "VerificationFailed", "HigherOrderError",
    "BlockTooLarge", "ParamGradSkipped", "NotReduced", "ProcessesDisagree", "ShardedParameters",
]  # fmt: skip
_POINTER = re.compile(r"\nMore: python -m autograd_hacks explain [\w-]+(?:, or https?://[^\s;]+)?")
BASE = ""
"""The address of the pages on the web, without a slash at its end; empty until there is one.  setup.cfg's project_urls has
it, too, and .ci/ready.py, which runs before a release is published, fails until both are set."""
EXPLAINED: dict[str, tuple[str, str]] = {}
"""{name: (title of a section, its page in docs/)}.  A name is what ``python -m autograd_hacks explain`` accepts, or the name
of an error class."""


def see(section: str, page: str = "errors.rst") -> str:
    """The end of a message: the command that prints a section, and its address if there is one.

    page: the section's page in docs/
    Raises ValueError if another page has a section of the same name.
    """
    name = re.sub(r"[^a-z0-9]+", "-", section.lower().replace("'", "")).strip("-")
    if EXPLAINED.setdefault(name, (section, page)) != (section, page):
        raise ValueError(f"see: {name!r} already means {EXPLAINED[name]}; it can't also mean {(section, page)}.")
    anchor = re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")
    there = f", or {BASE}/{page.removesuffix('.rst')}.html#{anchor}" if BASE else ""
    return f"\nMore: python -m autograd_hacks explain {name}{there}"


ON_TOOLS = see("A tool is not installed")
ON_HOOKS = see("The model has no hooks")
ON_PASSES = see("Several backward passes")
ON_REDUCTION = see("How the loss is reduced")
ON_PROCESSES = see("Several processes")
ON_BATCH = see("Where the batch is", "usage.rst")
ON_RULES = see("Add your own layer", "extending.rst")
ON_SCALERS = see("A GradScaler", "usage.rst")
ON_WRONG = see("Rows that are wrong")
ON_CHECKING = see("Check anyone's rows", "knock_outs.rst")
ON_VERBS = see("What verbs are given", "sums.rst")
ON_SEGMENTS = see("Documents in packed batches", "documents.rst")
ON_NOISE = see("Noise and signal", "sums.rst")
ON_METRICS = see("Metrics", "data_sets.rst")
ON_DURING_BACKWARD = see("Smaller: while backward runs", "clipping.rst")
ON_OUTPUTS = see("Rows of outputs", "sums.rst")
ON_CLIPPING = see("Clipping", "clipping.rst")
ON_PRIVATE = see("Private training", "private.rst")
ON_CURVATURE = see("What can be had", "curvature.rst")
ON_STEPS = see("Whole steps", "integrations/index.rst")
ON_OPACUS = see("Opacus", "integrations/opacus.rst")
ON_TORCHJD = see("TorchJD", "integrations/torchjd.rst")
ON_COMPILING = see("Compiled steps", "compiled.rst")
ON_DATA_SETS = see("A whole data set", "data_sets.rst")
ON_STORES = see("Stores of rows", "data_sets.rst")
A_LOSS_EACH = (
    "a vector of N losses, one for each sample. Compute them with reduction='none', and sum over any further axes: "
    "losses.flatten(1).sum(1)."
)
NO_BATCH = "was given an input without a batch axis"
A_BATCH = (
    "Give a single sample as a batch of one, x[None]; and samples in a list as one padded tensor with a mask "
    "(torch.nn.utils.rnn.pad_sequence), or as a packed sequence."
)
REENTRANT = (
    "uses torch.autograd.grad, which reentrant checkpointing doesn't allow. Check the model without checkpointing, or with "
    "use_reentrant=False."
)
"""Parts of messages that several functions raise."""


class PerSampleGradientError(RuntimeError):
    """Base of the errors below: the requested per-sample gradients don't exist, or the library can't know them."""

    explained: ClassVar[tuple[str, str]] = ("Nothing was recorded", "errors.rst")
    """The section and its page that explain the error if its message names no section."""

    def __init_subclass__(cls, section: str = "", page: str = "errors.rst") -> None:
        if section:
            cls.explained = section, page
            see(section, page)
        EXPLAINED[cls.__name__] = cls.explained

    def __str__(self) -> str:
        text = super().__str__()
        pointer = _POINTER.search(text)  # in the middle if another message quotes this one
        return _POINTER.sub("", text) + (pointer[0] if pointer else see(*self.explained))


EXPLAINED["PerSampleGradientError"] = PerSampleGradientError.explained


class NothingRecorded(PerSampleGradientError, section="Nothing was recorded"):
    """There is no backward pass to read: none has run, hooks were off, or its record was cleared."""


class UnsupportedLayer(PerSampleGradientError, section="No rule for a layer"):
    """A trainable parameter belongs to a layer that no rule covers."""


class UnsupportedOperation(PerSampleGradientError, section="A model that can't be compiled"):
    """`compile` met an operation without a rule, or a model that can't be captured as one graph."""


class BatchSizeError(PerSampleGradientError, section="Another number of samples"):
    """The layers disagree on the number of samples, or an input has no batch axis."""


class SamplesMixed(PerSampleGradientError, section="Samples that mix"):
    """A layer's output for one sample depends on other samples, so there are no per-sample gradients."""


class StaleRecord(PerSampleGradientError, section="Something was overwritten"):
    """A tensor that the record refers to was overwritten after the layer had read it."""


class UnseenGradient(PerSampleGradientError, section="Gradient by another way"):
    """A parameter received gradient along a path that no hook sees, so its rows would be incomplete."""


class ProbeFailed(PerSampleGradientError, section="A model that can't be probed"):
    """Independence of samples could not be checked.

    The model can't run with some samples replaced by others, or does something that the check can't follow.
    """


class VerificationFailed(PerSampleGradientError, section="Rows that are wrong"):
    """`verify`, `check_rows` or the check of a registered rule found per-sample gradients that differ from autograd's."""


class HigherOrderError(PerSampleGradientError, section="What is refused", page="derivatives.rst"):
    """A backward pass with ``create_graph=True`` made a graph that reaches a parameter along an unsupported path."""


class BlockTooLarge(PerSampleGradientError, section="What can be had", page="curvature.rst"):
    """A block of the Gauss-Newton matrix would exceed the memory limit."""


class ParamGradSkipped(PerSampleGradientError, section="No ordinary gradients"):
    """Ordinary parameter gradients were requested, but ``add_hooks(param_grad=False)`` skips them."""


class NotReduced(PerSampleGradientError, section="Several processes"):
    """``.grad`` would cover this process's samples only, but DistributedDataParallel reduces it over all processes."""


class ProcessesDisagree(PerSampleGradientError, section="Several processes"):
    """Processes that share a batch can't continue: one has failed, or they have hooked the model differently."""


class ShardedParameters(PerSampleGradientError, section="Several processes"):
    """A trainable parameter is split over several processes."""


def where(path: str, layer: nn.Module) -> str:
    """A layer's name for messages: its path in the model and its type."""
    return f"layer {path!r} ({type(layer).__name__})" if path else f"the model itself ({type(layer).__name__})"


@contextmanager
def needed(extra: str) -> Iterator[None]:
    """A context for importing an optional dependency.

    extra: the name in setup.cfg of the extra that installs it
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'the extra "{extra}" is not installed: {error}. Run pip install ".[{extra}]" in a clone of the library, or '
            "install the missing package by itself." + ON_TOOLS,
            name=error.name,
        ) from error
