"""Rows that are kept while the model, and whatever they were made of, go on."""

import torch

from autograd_hacks.forms import Dense, Form, Lookup, Outer
from autograd_hacks.verbs.grads import PerSampleGrads


def kept(grads: PerSampleGrads) -> PerSampleGrads:
    """The same rows in memory of their own: products as copies of their factors, all others written out."""
    every = torch.arange(grads.samples, device="cpu")  # to take rows by their numbers copies them
    with grads.reading():
        own = {n: form[every.to(form.like.device)] if _stays(form) else Dense(form.dense()) for n, form in grads.items()}
        made = grads.with_forms(own, grads.samples)
    made._versions = made._versions[len(grads._versions) :]
    return made


def size_kept(grads: PerSampleGrads) -> int:
    """How many bytes `kept` takes."""
    size = 0
    for form in grads.values():
        if _stays(form):
            size += sum(x.numel() * x.element_size() for leaf in form.leaves() for x in leaf.held)
        else:
            size += form.samples * form.shape.numel() * form.like.element_size()
    return size


def _stays(form: Form) -> bool:
    """Whether a form is cheap as it is."""
    return not form.sources and all(isinstance(leaf, Outer | Lookup) for leaf in form.leaves())
