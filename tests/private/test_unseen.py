"""What private steps refuse though no gradient shows it, and what is like it and accepted."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import clipped
from rarely import crossed
from steps import backward, rows_of
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

pytestmark = pytest.mark.usefixtures("double")

BOUND = 2.0


def step(model: nn.Module, **options: Any) -> Tensor:
    return autograd_hacks.private.clip_and_noise_(model, BOUND, 0.0, 10.0, **options).norms


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "two uses": lambda x: (x > 3).float() + 9 * (x > 3).float().flip(0),
    "two uses, one of bits": lambda x: (y := (x > 3).float()).view(torch.int32).clamp(max=1) + 9 * y.flip(0),
    "parts of memory": lambda x: (x > 3).float().clone().index_fill_(0, torch.tensor([0]), 0) + (x > 3).float().roll(1, 0),
    "an index": lambda x: x.gather(1, (x[:, :1] > 3).long().cumsum(0).clamp(max=3)),
    "a place in an order": lambda x: (x[:, :1] > 3).long().argsort(dim=0, stable=True).argsort(0).double(),
    "an order that is an index": lambda x: x.gather(1, (x[:, :1] > 3).long().argsort(dim=0, stable=True) % 4),
    "codes in an order": lambda x: torch.eye(2)[(x[:, 0] > 3).long().sort(stable=True).values][:, :1],
    "numbers of values": lambda x: (x > 3).long().unique(return_inverse=True)[1].double(),
    "a count that is an index": lambda x: x[:, (x > 3).sum()][:, None],
    "a branch where one is large": lambda x: x * 2 if (x > 3).any() else x,
    "a branch where all are small": lambda x: x if (x < 3).all() else x * 2,
    "a branch of equal samples": lambda x: x if torch.equal(x[0] > 3, x[1] > 3) else x * 2,
    "a branch by the largest": lambda x: x * 2 if int(x[:, 0].argmax()) == 0 else x,
    "a branch by the mean": lambda x: x * 2 if x[:, 0].mean() > 0.5 else x,
    "cut to the longest": lambda x: x[:, : int((x[:, :3] < 3).sum(1).max())].sum(1, keepdim=True),
    "places in all rows": lambda x: (x > 3).float().take(torch.arange(24).flip(0).view(6, 4)),
    "a mask that chooses nothing": lambda x: torch.zeros_like(x).index_put((x.flip(0) > 3,), torch.tensor(1.0).to(x)),
    "no law": lambda x: torch.bucketize(x - x.mean(0), torch.tensor([9.0])).float(),
    "no law, another shape": lambda x: torch.count_nonzero((x - x.mean(0) - 9).relu(), 1)[:, None].float(),
}


@pytest.mark.parametrize("how", UNSEEN)
def test_samples_that_meet_are_refused_where_runs_see_nothing(how: str) -> None:
    """A rare value tells of the others; in runs with other samples of this batch none is there."""
    model = Bare(lambda m, x: m.b(m.a(x) * (1 + UNSEEN[how](x))), a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    with autograd_hacks.add_hooks(model, independent=True):
        for _ in range(2):
            backward(model, torch.rand(6, 4))
            with pytest.raises(SamplesMixed, match=r"laws of operations|another answer|replaced\."):
                step(model)


def test_tokens_that_are_made_for_all_frames_keep_samples_apart() -> None:
    """As TimeSformer makes them: the first N of N T are kept, which are of parameters alone.  A value is read."""

    def forward(m: Any, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        frames = torch.cat([m.token.expand(len(x) * x.shape[1], 1, -1), m.a(x.flatten(0, 1))], 1) + m.places
        return frames[:, 1:].reshape(len(x), -1, 6).tanh().mean(1) * frames[: len(x), 0]

    model: Any = Bare(forward, a=nn.Linear(4, 6))
    model.token, model.places = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(1, 5, 6))
    x = torch.randn(4, 3, 4, 4)
    norms, _ = clipped(rows_of(model, x), BOUND)
    with autograd_hacks.add_hooks(model, independent=True):
        backward(model, x)
        assert_close(step(model), norms)


BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sorted": lambda made, order: made[order.argsort()],
    "written": lambda made, order: torch.empty_like(made).index_put((order,), made),
    "added": lambda made, order: torch.zeros_like(made).index_add(0, order, made),
    "places": lambda made, order: made[torch.empty_like(order).scatter(0, order, torch.arange(len(order)))],
}


@pytest.mark.parametrize("back", BACK)
def test_experts_whose_tokens_are_sorted_keep_samples_apart(back: str) -> None:
    """Laws don't show it, since an order depends on all samples' values; nor do they say that samples meet."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h, expert = m.a(x).flatten(0, 1), (x.flatten(0, 1)[:, 0] > 0).long()
        order = expert.argsort(stable=True)
        ends = torch.stack([expert == 0, expert == 1]).sum(1).cumsum(0).int()
        made = torch._grouped_mm(h[order], m.experts, ends)  # it has no law
        return (h + BACK[back](made * m.scales[expert[order], None], order)).unflatten(0, x.shape[:2])

    model: Any = Bare(forward, a=nn.Linear(8, 8))
    model.experts, model.scales = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.rand(2))
    model.float()
    with autograd_hacks.add_hooks(model, independent=True):
        for x in torch.randn(2, 4, 5, 8, dtype=torch.float32):
            norms, _ = clipped(rows_of(model, x), BOUND)
            backward(model, x)
            assert_close(step(model), norms, rtol=1e-4, atol=0)


def test_an_argument_that_only_other_samples_read_is_refused_where_runs_see_nothing() -> None:
    model: Any = Bare(lambda m, x: m.b(m.scale * (x.roll(1, 0) > 3)), b=nn.Linear(4, 2))
    model.scale = nn.Parameter(torch.ones(4))
    with autograd_hacks.add_hooks(model, independent=True):
        backward(model, torch.rand(6, 4))
        with pytest.raises(SamplesMixed, match="other samples than those on its axis"):
            step(model)


SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda h: h / len(h),
    "a power": lambda h: h * (-1) ** len(h),
    "a branch": lambda h: h.relu() if len(h) > 5 else -h,
    "a sum of ones": lambda h: h / torch.ones(len(h)).sum(),
    "a row of a table": lambda h: h + torch.arange(27.0).view(9, 3)[len(h)],
    "one size": lambda h: h * (2 if len(h) == 4 else 1),
    "every other": lambda h: h * (1 - 2 * (torch.arange(len(h)) % 2))[:, None],
    "the first one": lambda h: torch.cat([-h[:1], h[1:]]),
    "the last one": lambda h: torch.cat([h[:-1], -h[-1:]]),
    "places of a table": lambda h: h + torch.arange(27.0).view(9, 3)[: len(h)],
    "sizes alone": lambda h: nn.functional.group_norm(h.view(-1, 3, 1), 1).view(len(h), 3) + torch.zeros(len(h), 1),
    "equal samples": lambda h: h / len(h) + 0 * float(h.detach()[0, 0]),  # with others instead nothing changes
    "a loop": lambda h: torch.stack([x.softmax(0) for x in h]),
    "a seed": lambda h: h + (torch.manual_seed(0), torch.randn(len(h), 3))[1],
    "its own seed": lambda h: h * torch.randperm(len(h), generator=torch.Generator().manual_seed(0))[:, None],
    "drawn": lambda h: h + torch.randn(len(h), 3) + torch.randn(len(h), 3, generator=DRAWS),
    "a fixed table": lambda h: h + torch.randn(3, generator=torch.Generator().manual_seed(0)),
}
DRAWS = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("how", SIZED)
def test_outputs_that_depend_on_the_number_of_samples_or_their_places_are_refused(how: str, begins: bool) -> None:
    """A drawn batch's size, and a sample's place in it, tell whether one sample more was there; from any step on."""
    model, refused = Bare(lambda m, x: m.b(m.now[0](m.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), 0
    with autograd_hacks.add_hooks(model, independent=True):
        numbers = (3, 6, 4, 5) if how == "the last one" else (7, 6, 4, 5)
        for n, samples in enumerate([7, 6, 4, 5] * begins + [*numbers]):
            model.now = [SIZED[how] if n >= 4 * begins else torch.tanh]
            backward(model, torch.randn(1, 4).repeat(samples, 1) if how == "equal samples" else torch.randn(samples, 4))
            try:
                step(model)
            except SamplesMixed as error:
                refused += "size is private" in str(error)
    most = {"drawn": 0, "a fixed table": 0, "sizes alone": 0, "a loop": 0, "a branch": 2, "one size": 2}
    assert refused == most.get(how, 4)


@pytest.mark.parametrize(("tells", "dtype"), [("batch", torch.double), ("table", torch.double), ("digits", torch.bfloat16)])
def test_places_of_which_the_first_batch_tells_nothing(tells: str, dtype: torch.dtype) -> None:
    """The first batch, or the buffer, has zeros; with digits all is there, in half precision."""
    model: Any = Bare(lambda m, x: m.a(x) * (1 + m.table[: len(x), None]), a=nn.Linear(4, 3, bias=False))
    table = {"batch": torch.arange(9.0), "table": torch.zeros(9), "digits": torch.arange(9) % 2 * 0.04}
    model.register_buffer("table", table[tells])
    with autograd_hacks.add_hooks(model.to(dtype), independent=True):
        for n in range(2):
            with pytest.raises(SamplesMixed, match="size is private") if n or tells == "digits" else nullcontext():
                backward(model, torch.randn(4 + n, 4, dtype=dtype) * (n > 0 or tells != "batch"))
                step(model)
            model.table.add_(torch.arange(9) % 2)


COUNTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda z, y: F.cross_entropy(z.mT, y),
    "smoothed": lambda z, y: F.cross_entropy(z.mT, y, label_smoothing=0.1),
    "masked": lambda z, y: (
        (F.cross_entropy(z.mT, y.relu(), reduction="none") * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1)
    ),
    "chosen": lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0]),
    "for each sample": lambda z, y: F.cross_entropy(z.mT, y, reduction="none").mean(1).mean(),
}


@pytest.mark.parametrize("how", COUNTED)
def test_a_loss_made_inside_is_not_divided_by_other_samples_tokens(how: str) -> None:
    """The clipped row of a sample would follow others' labels.  Where all tokens count it follows none."""
    model = Bare(lambda m, x, y: COUNTED[how](m.b(x), y), b=nn.Linear(4, 3))
    with autograd_hacks.add_hooks(model, independent=True):
        for some in (False, True, False):
            x, y = torch.randn(6, 5, 4), torch.randint(3, (6, 5))
            y[0, : 3 * some] = -100
            model(x, y).backward()
            with pytest.raises(SamplesMixed) if some and how != "for each sample" else nullcontext():
                step(model, loss_type="mean")


KEEPS: dict[str, Callable[[Any, Tensor], object]] = {
    "in place": lambda m, h: m.seen.mul_(0.9).add_(h.mean(0)),
    "a part": lambda m, h: m.seen[1:].copy_(h[0, 1:]),
    "another buffer": lambda m, h: setattr(m, "seen", 0.9 * m.seen + h.mean(0)),
    "a parameter": lambda m, h: m.frozen.copy_(h[0]),
    "into an argument": lambda m, h: torch.lerp(m.seen, h.mean(0), 0.1, out=m.seen),
    "several": lambda m, h: torch._foreach_add_([m.seen], [h.mean(0)]),
    "a number": lambda m, h: m.seen.fill_(float(h.mean())),
    "a module's number": lambda m, h: setattr(m, "most", float(h.max())),
    "an object of a module": lambda m, h: [m.seen.add_(m.box.last), setattr(m.box, "last", h[0])],
    "nothing, in a view": lambda m, h: [m.seen.expand(2, -1) * h[:1], bool((h == h).all())],
    "nothing": lambda m, h: [m.seen.add_(1), setattr(m, "most", m.most + 1)],
}


@crossed(how=KEEPS, samples=[1, 4])
def test_what_a_forward_leaves_behind_is_refused_for_one_sample_too(how: str, samples: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        with torch.no_grad():
            KEEPS[how](m, h)
        return (h - m.seen - m.frozen) / m.most

    model: Any = Bare(forward, a=nn.Linear(4, 3))
    model.register_buffer("seen", torch.zeros(3))
    model.box = SimpleNamespace(last=torch.zeros(3))
    model.frozen, model.most = nn.Parameter(torch.zeros(3), requires_grad=False), 1.0
    with autograd_hacks.add_hooks(model, independent=True):
        for n in range(2):
            with nullcontext() if "nothing" in how or (n == 0 and "object" in how) else pytest.raises(SamplesMixed):
                backward(model, torch.randn(samples, 4))
                step(model)
