"""Checks whether a document's outputs depend on the values of another document in the same packed sample."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import ProbeFailed, SamplesMixed
from autograd_hacks.probe.batch import kept_samples
from autograd_hacks.probe.documents import Documents, documents_of
from autograd_hacks.support.internals import tree_flatten, tree_unflatten
from autograd_hacks.support.layout import differs, rounding_of
from autograd_hacks.support.trees import tensors_of
from autograd_hacks.support.untouched import untouched

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def check_values(model: nn.Module, recorder: Recorder, arguments: Arguments, documents: Documents) -> None:
    """Replaces the tokens of some documents and compares the outputs of the others.  Each pair of documents is tried.

    Raises SamplesMixed if those outputs change, ProbeFailed if no argument has tokens that can be replaced.
    """
    draws = torch.Generator().manual_seed(0)

    def run(given: Arguments) -> list[Tensor]:
        with untouched(model, given) as copied, recorder.aside(), torch.no_grad():
            args, kwargs = copied(given)
            return [x.detach() for x in tensors_of(model(*args, **kwargs))]

    outputs = run(arguments)
    for kept in kept_samples(documents.count, draws) if documents.count > 1 else ():
        others = _replaced(recorder, arguments, documents, kept)
        if others is None:
            raise ProbeFailed(
                "verify could not check that documents are independent. Apart from the argument that separates documents, "
                "no argument has values for each position, (B, T, ...), that can be replaced. Use documents with other "
                "tokens."
            )
        again = run(others)
        for slot, (x, y) in enumerate(zip(outputs, again)):
            weights = documents.over(x, kept)
            if weights is not None and bool((differs(x, y, rounding_of(x)) & (weights > 0)).any()):
                raise SamplesMixed(
                    f"documents mix: when the tokens of some documents were replaced, the model's output {slot}, of shape "
                    f"{tuple(x.shape)}, changed at the positions of others. Mask attention by document, and check whatever "
                    "else reads all positions."
                )


def _replaced(recorder: Recorder, arguments: Arguments, documents: Documents, kept: Tensor) -> Arguments | None:
    """The arguments with the tokens of some documents replaced by tokens of other positions; None if nothing changes.

    kept: D booleans, False for documents to replace
    """
    leaves, spec = tree_flatten(arguments)
    shape, changed = tuple(documents.ids.shape), False
    for n, x in enumerate(leaves):
        if not isinstance(x, Tensor) or tuple(x.shape[:2]) != shape or x.dtype == torch.bool:
            continue
        is_kept = documents.over(x.new_zeros(x.shape, dtype=torch.float32), kept.float())
        rolled = x.detach().flatten(0, 1).roll(1, 0).view(x.shape)
        new = x.detach().where(is_kept > 0, rolled) if is_kept is not None else x
        tried = [*leaves[:n], new, *leaves[n + 1 :]]
        if not torch.equal(new, x) and _are_same(recorder, tree_unflatten(tried, spec), documents):
            leaves, changed = tried, True
    made: Arguments = tree_unflatten(leaves, spec)
    return made if changed else None


def _are_same(recorder: Recorder, arguments: Arguments, documents: Documents) -> bool:
    """Whether the arguments describe the same documents."""
    assert recorder.segments is not None  # documents exist only with segments
    try:
        return torch.equal(documents_of(recorder.segments, *arguments).ids, documents.ids)
    except ValueError:
        return False
