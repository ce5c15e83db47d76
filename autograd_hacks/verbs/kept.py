"""Rows that are kept while the model goes on to other weights."""

from torch import Tensor

from autograd_hacks.forms import Dense, Form, Lookup, Outer
from autograd_hacks.support.parts import part_of
from autograd_hacks.verbs.grads import PerSampleGrads


def kept(grads: PerSampleGrads) -> PerSampleGrads:
    """The same rows, whatever becomes of the weights: written out, but for products of tensors that are none of these."""
    with grads.reading():
        written = {name: Dense(form.dense()) for name, form in grads.items() if not _stays(form, _memory_of(grads))}
        made = grads.with_forms({**grads, **written}, grads.samples)
    made._versions = made._versions[len(grads._versions) :]
    return made


def size_kept(grads: PerSampleGrads) -> int:
    """How many bytes `kept` takes, at the most."""
    memory, size = _memory_of(grads), 0
    for form in grads.values():
        if _stays(form, memory):
            size += sum(_bytes(x) for leaf in form.leaves() for x in leaf.held)
        else:
            size += form.samples * form.shape.numel() * form.like.element_size()
    return size


def _stays(form: Form, memory: set[int]) -> bool:
    """Whether a form is cheap as it is, and made of nothing that is in a model's memory."""
    return not form.sources and all(
        isinstance(leaf, Outer | Lookup) and all(_at(x) not in memory for x in leaf.held) for leaf in form.leaves()
    )


def _memory_of(grads: PerSampleGrads) -> set[int]:
    model = grads._model()
    return set() if model is None else {_at(part_of(x)) for x in (*model.parameters(), *model.buffers())}


def _at(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
