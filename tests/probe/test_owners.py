"""Whose an entry of a gradient is, told by weighted copies of it."""

import torch
from hypothesis import given
from hypothesis.strategies import DrawFn, booleans, composite, integers, lists, sampled_from

from autograd_hacks.probe.owners import Weights, judged
from autograd_hacks.support.layout import Layout, candidates


@composite
def gradients(draw: DrawFn) -> tuple[torch.Tensor, int, Layout]:
    """A gradient, N, and where its samples are.  Some are sparse, some of very different sizes."""
    samples, axis = draw(integers(2, 9)), draw(integers(0, 2))
    shape = draw(lists(integers(1, 12), min_size=3, max_size=3))
    fold = draw(sampled_from(["", "N·T", "T·N"]))
    shape[axis] = samples * (draw(integers(2, 3)) if fold else 1)
    dtype = draw(sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    seed = torch.Generator().manual_seed(draw(integers(0, 2**16)))
    x = torch.randn(shape, generator=seed, dtype=torch.float32)
    if draw(booleans()):
        x *= 10 ** (6 * torch.rand(shape, generator=seed) - 3)
    if draw(booleans()):  # as of a model that reads its first token
        x[:, 1:] *= draw(sampled_from([0.0, 1e-4]))
    return x.to(dtype), samples, Layout(axis, fold)


@given(gradients(), integers(0, 9))
def test_the_layout_is_among_those_that_are_left(drawn: tuple[torch.Tensor, int, Layout], seed: int) -> None:
    x, samples, layout = drawn
    weights = Weights(samples, torch.Generator().manual_seed(seed), [x.dtype])
    others = [x * layout.over(x, weights.of_pass(k)).to(x) for k in range(weights.passes)]
    found = judged(x, others, weights, candidates(x.shape, samples, range(3)))
    assert layout in found.layouts
    assert not found.is_mixed
    # Entries that rounding hides beside others may fit several layouts; it is told how many samples own some in one of them.
    rows = [left.samples_first(x, samples).reshape(samples, -1) for left in found.layouts]
    assert found.owners in [int((own != 0).any(1).sum()) for own in rows]


@given(gradients(), integers(0, 9))
def test_an_entry_of_two_samples_is_mixed(drawn: tuple[torch.Tensor, int, Layout], seed: int) -> None:
    x, samples, layout = drawn
    weights = Weights(samples, torch.Generator().manual_seed(seed), [x.dtype])
    w = layout.over(x, weights.of_pass(0)).to(x).expand_as(x).clone()
    size = x.float().norm().to(x.dtype)
    place = tuple(int(n) for n in torch.unravel_index(torch.tensor(seed % x.numel()), x.shape))
    own = int(layout.rows(x.shape[layout.axis], samples, x.device)[place[layout.axis]])
    other = (weights.of_pass(0)[(own + 1) % samples] + weights.of_pass(0)[own]).to(x) / 2
    x[place], w[place] = size, other
    found = judged(x, [x * w], weights, candidates(x.shape, samples, range(3)))
    assert found.is_mixed
    assert not found.layouts
