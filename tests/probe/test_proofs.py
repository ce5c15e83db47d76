"""What mixes samples is refused at every step: by gradients, and where it is asked for by values."""

import pytest
import torch
import torch.nn as nn
from mixing import (
    MIXING,
    SIZES,
    WITHOUT_GRADIENT,
    AtEnd,
    How,
    InFront,
    centred,
    check_derivatives,
    check_refused,
    check_refused_or_right,
    check_right,
    data,
    mixes,
    pairs,
)
from nets import Between
from oracle import squares
from rarely import rarely
from torch import Tensor
from twin import Bare


@pytest.mark.parametrize("place", [Between, *rarely(AtEnd, InFront)])
@pytest.mark.parametrize("what", MIXING)
def test_samples_that_mix_are_refused_at_every_step(what: str, place: type[Between]) -> None:
    for samples in SIZES:
        model = place(MIXING[what]).double()
        assert mixes(model, data(samples)), samples
        if place is InFront or what in WITHOUT_GRADIENT:
            check_derivatives(model, (data(samples),), (data(samples),))
        else:
            check_refused(model, (data(samples),), (data(samples),))
        check_refused(model, (data(samples),), (data(samples),), independent=True)


@pytest.mark.parametrize("samples", SIZES)
def test_mixup_by_a_random_permutation(samples: int) -> None:
    def mixup(x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(samples).roll(1)]

    torch.manual_seed(1)
    check_refused(InFront(mixup).double(), *[(data(samples),)] * 3, independent=True)
    torch.manual_seed(1)
    check_refused_or_right(Between(mixup).double(), *[(data(samples),)] * 9)


# Several arguments, several outputs


def towers(items: nn.Module) -> nn.Module:
    return Bare(lambda m, x, items: m.first(x) @ m.items(items).T, first=nn.Linear(3, 4), items=items)


@pytest.mark.parametrize("samples", SIZES)
def test_two_towers(samples: int) -> None:
    """A second argument of integers, or a square matrix, has samples too."""
    ids, square = torch.randint(50, (samples,)), data(samples, samples)
    for independent in (False, True):
        check_refused(towers(nn.Embedding(50, 4)).double(), *[(data(samples), ids)] * 2, independent=independent)
        check_refused(towers(nn.Linear(samples, 4)).double(), *[(data(samples), square)] * 2, independent=independent)


@pytest.mark.parametrize("samples", SIZES)
def test_labels_that_are_taken_back(samples: int) -> None:
    for place in (Between, AtEnd, InFront):
        labels = torch.arange(samples) % 2
        check_refused(place(centred).double(), *[(data(samples), labels)] * 2, independent=place is InFront)
        check_right(place(lambda h, y: h * (1 + y[:, None])).double(), *[(data(samples), torch.arange(samples) % 3)] * 2)


class Aux(Between):
    """Keeps what a loss is to read later."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.aux = self.how(h)
        return self.last(h)


@pytest.mark.parametrize("how", [pairs, MIXING["detached"], lambda h: h - h.mean(0), lambda h: h.mean(0).square().sum()])
def test_a_loss_that_reads_what_the_model_keeps(how: How) -> None:
    for samples in SIZES:
        model = Aux(how).double()
        reads = lambda out, model=model: squares(out) + (squares(model.aux) if model.aux.ndim else model.aux)  # noqa: E731
        check_refused(model, *[(data(samples),)] * 2, losses=reads, independent=how is MIXING["detached"])
        check_right(model, *[(data(samples),)] * 2)
