"""Which layouts fit what traces show, against the definition: no kept sample has changed, or by no more than rounding."""

import pytest
import torch
from torch import Tensor

from autograd_hacks.probe.layout import Fits, Layout, differs, rounding_of

SAMPLES = 4
LAYOUTS = {
    (4, 3): [Layout(0)],
    (3, 4): [Layout(1)],
    (4, 4): [Layout(0), Layout(1)],
    (8, 4, 3): [Layout(1), Layout(0, "N·T"), Layout(0, "T·N")],
}


def changed(x: Tensor, y: Tensor, exactly: bool) -> Tensor:
    same = (x == y) | ((x != x) & (y != y))
    return ~same if exactly else differs(x, y, rounding_of(x))


def entries(layout: Layout, shape: torch.Size, sample: int) -> Tensor:
    """Which entries are a sample's."""
    where = torch.zeros(shape, dtype=torch.bool)
    layout.samples_first(where, SAMPLES)[sample] = True
    return where


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("seed", range(12))
def test_layouts_fit_by_definition(shape: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    real = torch.randn(shape)
    if seed % 3 == 0:
        real[tuple(int(torch.randint(size, ())) for size in shape)] = torch.nan
    fits, expected, seen = Fits(real, SAMPLES), {True: LAYOUTS[shape], False: LAYOUTS[shape]}, {True: False, False: False}
    for _ in range(3):
        kept = torch.randperm(SAMPLES) < 2
        # Some samples by rounding and some for good, along a layout that may be the right one for both, one or none.
        other, true = real.clone(), LAYOUTS[shape][seed % len(LAYOUTS[shape])]
        for sample in range(SAMPLES):
            how = (0.0, 1e-7, 1.0)[int(torch.randint(3, ()))] if kept[sample] else 1.0
            other += how * entries(true, real.shape, sample) * real.abs().nan_to_num()
        fits.see(other, kept.nonzero()[:, 0], (~kept).nonzero()[:, 0])
        for exactly in (True, False):
            change = changed(real, other, exactly)
            expected[exactly] = [
                at
                for at in expected[exactly]
                if not any((change & entries(at, real.shape, n)).any() for n in range(SAMPLES) if kept[n])
            ]
            seen[exactly] |= bool(change.any())
            found, has_changed = fits.layouts(range(len(shape)), exactly)
            assert set(found) == set(expected[exactly])
            assert has_changed == seen[exactly]


def test_a_sample_off_by_rounding_hides_no_other() -> None:
    real = torch.ones(4, 4)
    other = real.clone()
    other[0, 1] += 1e-6
    other[1, 2] += 1.0
    fits = Fits(real, 4)
    fits.see(other, torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert Layout(0) not in fits.layouts(range(2), False)[0]
