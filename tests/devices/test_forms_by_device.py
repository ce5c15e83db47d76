"""The laws of forms on each device, and shapes of all verbs on the meta device, where a tensor of the CPU is noticed."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import forms
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.forms import Form, RandomMap

shapes = st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple)


def drawn(data: st.DataObject, device: torch.device | str) -> Form:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    with torch.device(device):
        return data.draw(forms(data.draw(st.integers(0, 4)), data.draw(shapes)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tests/forms has the laws on the CPU")
@settings(max_examples=200)
@given(st.data())
def test_every_verb_equals_its_definition(data: st.DataObject) -> None:
    form = drawn(data, "cuda")
    double = {"dtype": torch.float64, "device": form.like.device}
    v, w = torch.randn(form.shape, **double), torch.randn(form.samples, **double)
    random, written = RandomMap("p", form.shape, 40, 3), form.dense().reshape(form.samples, form.shape.numel())
    columns = [(a[:, :, None] * b[:, None]).flatten(1).mT for _, a, b in random.columns(torch.zeros(0, **double))]
    for got, by_hand in [
        (form.norms(), written.norm(dim=1)),
        (form.dot(v), written @ v.flatten()),
        (form.weighted_sum(w), (w @ written).view(form.shape)),
        (form.gram(form), written @ written.mT),
        (form.second_moment(w), (w @ written.square()).view(form.shape)),
        (form.project(random), written @ torch.cat(columns, 1)),
        (form.cross(form), written.mT @ written),
        (form[: form.samples // 2].dense().flatten(1), written[: form.samples // 2]),
        (form.norms(100), written.norm(dim=1)),
    ]:
        assert_close(got, by_hand)


@settings(max_examples=40)
@given(st.data())
def test_shapes_on_the_meta_device(data: st.DataObject) -> None:
    """Each verb returns a meta tensor of the right shape, or torch says which operation wants values."""
    with refused_at_most_for_values():
        form = drawn(data, "meta")
        samples, shape = form.samples, tuple(form.shape)
        double = {"dtype": torch.float64, "device": "meta"}
        v, w = torch.randn(shape, **double), torch.randn(samples, **double)
        for verb, expected in [
            (form.dense, (samples, *shape)),
            (form.norms, (samples,)),
            (lambda: form.dot(v), (samples,)),
            (lambda: form.weighted_sum(w), shape),
            (lambda: form.gram(form), (samples, samples)),
            (lambda: form.second_moment(w), shape),
            (lambda: form.project(RandomMap("p", form.shape, 40, 3)), (samples, 40)),
            (lambda: form[:1].dense(), (min(samples, 1), *shape)),
        ]:
            with refused_at_most_for_values():
                found: Tensor = verb()
                assert found.is_meta
                assert tuple(found.shape) == expected


class refused_at_most_for_values:
    """Errors that torch raises because meta tensors have no values are passed over, and no others."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None or not issubclass(kind or object, NotImplementedError | RuntimeError):
            return False
        assert not re.search("(same|expected) device", str(error)), error
        return "meta" in str(error).lower()


def test_a_tensor_of_the_cpu_is_noticed() -> None:
    with pytest.raises(AssertionError, match="expected device"), refused_at_most_for_values():
        torch.ones(3, 3, device="meta") @ torch.ones(3)
    with pytest.raises(AssertionError), refused_at_most_for_values():
        assert torch.ones(3).is_meta
