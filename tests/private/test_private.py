"""The private step against rows of one backward pass per sample, clipped and added up by hand."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import perceptron, with_spare
from oracle import clipped, squares
from rarely import crossed
from refused import check_each
from steps import rows_of
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, ProbeFailed, SamplesMixed

pytestmark = pytest.mark.usefixtures("double")

EXPECTED, BOUND = 10.0, 2.0


def hooked(param_grad: bool = False) -> nn.Module:
    model = perceptron()
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    return model


def backward(model: nn.Module, x: Tensor) -> None:
    autograd_hacks.backward(squares(model(x)))


def expected(model: nn.Module, x: Tensor, groups: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms, and the sum of the clipped rows over the expected number, without noise."""
    rows = rows_of(model, x)
    if groups is not None:
        rows = {name: torch.stack([own[groups == u].sum(0) for u in groups.unique()]) for name, own in rows.items()}
    norms, sums = clipped(rows, BOUND, EXPECTED)
    assert (norms > BOUND).any()
    return norms, sums


def assert_grads(model: nn.Module, sums: dict[str, Tensor]) -> None:
    assert_close({name: p.grad for name, p in model.named_parameters()}, sums)


def step(model: nn.Module, multiplier: float = 0.0, **options: Any) -> Tensor:
    return autograd_hacks.private.clip_and_noise_(model, BOUND, multiplier, EXPECTED, **options).norms


@pytest.mark.parametrize("param_grad", [True, False])
def test_the_sum_over_the_expected_number(param_grad: bool) -> None:
    model = hooked(param_grad)
    for x in torch.randn(2, 6, 4):
        norms, sums = expected(model, x)
        backward(model, x)
        assert_close(step(model), norms)
        assert_grads(model, sums)


def test_noise_is_normal_and_drawn_parameter_by_parameter() -> None:
    """As Opacus draws it: `torch.normal` of noise · bound for each parameter in order, then divided."""
    model, x = hooked(), torch.randn(6, 4)
    _, sums = expected(model, x)
    backward(model, x)
    step(model, 1.5, noise=torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        assert_close(p.grad, sums[name] + torch.normal(0.0, 1.5 * BOUND, p.shape, generator=draws) / EXPECTED)


def test_users() -> None:
    model, x = hooked(), torch.randn(6, 4)
    users = torch.tensor([7, 3, 7, 3, 9, 9])
    norms, sums = expected(model, x, users)
    backward(model, x)
    assert_close(step(model, groups=users), norms)
    assert_grads(model, sums)


@crossed(first=[True, False], wrong=[torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_contributes_nothing(first: bool, wrong: float) -> None:
    model, x = hooked(), torch.randn(6, 4)
    if not first:
        backward(model, x)
        step(model)
    _, sums = expected(model, x[[0, 1, 3, 4, 5]])
    bad = x.clone()
    bad[2, 1] = wrong
    backward(model, bad)
    norms = step(model)
    assert norms.isfinite().tolist() == [True, True, False, True, True, True]
    assert_grads(model, sums)
    users = torch.tensor([0, 1, 0, 1, 2, 2])
    _, sums = expected(model, x[[0, 1, 3, 4, 5]], users[[0, 1, 3, 4, 5]])
    backward(model, bad)
    assert step(model, groups=users).isfinite().all()
    assert_grads(model, sums)


@pytest.mark.parametrize("first", [True, False])
def test_an_empty_batch_is_noise(first: bool) -> None:
    model, x = hooked(), torch.randn(6, 4)
    if not first:
        backward(model, x)
        step(model)
    for groups in (None, torch.zeros(0, dtype=torch.long)):
        backward(model, x[:0])
        assert step(model, 1.0, groups=groups, noise=torch.Generator().manual_seed(1)).shape == (0,)
        draws = torch.Generator().manual_seed(1)
        for p in model.parameters():
            assert_close(p.grad, torch.normal(0.0, BOUND, p.shape, generator=draws) / EXPECTED)


def test_a_parameter_that_no_loss_reached_has_noise() -> None:
    model = with_spare(nn.Linear(4, 2), nn.Linear(2, 2))
    autograd_hacks.add_hooks(model, independent=True)
    backward(model, torch.randn(5, 4))
    step(model, 1.0)
    assert model.spare.weight.grad is not None
    assert model.spare.weight.grad.all()
    assert model.frozen.weight.grad is None


def test_micro_batches() -> None:
    model, x = hooked(), torch.randn(6, 4)
    norms, sums = expected(model, x)
    found = []
    for part in x.split(4):
        backward(model, part)
        found.append(step(model, add=True))
    assert_close(torch.cat(found), norms)
    assert_grads(model, sums)
    with autograd_hacks.accumulate(model):
        for part in x.split(4):
            backward(model, part)
    step(model)
    assert_grads(model, sums)


def test_refusals() -> None:
    model, eager, x, verb = hooked(), hooked(param_grad=True), torch.randn(6, 4), autograd_hacks.private.clip_and_noise_
    backward(model, x)
    backward(eager, x)
    check_each(
        *[(ValueError, r"clip_and_noise_ was given .*expected", lambda given=given: verb(model, *given))
          for given in ((0, 1.0, 5), (1.0, -1, 5), (1.0, 1.0, 0), (1.0, 1.0, float("inf")), (float("nan"), 1.0, 5))],
        (TypeError, "expected_batch_size=None; expected a number", lambda: verb(model, 1.0, 1.0, None)),
        (ValueError, r"expected \(6,\), one for each sample",
         lambda: step(model, groups=torch.zeros(5, dtype=torch.long))),
        (ValueError, "expected a finite max_norm", lambda: verb(model, float("inf"), 1.0, 5)),
        (ValueError, "unclipped gradient", lambda: step(eager, add=True)),
    )  # fmt: skip
    assert step(model, 1.0).isfinite().all()
    check_each((NothingRecorded, "spend privacy budget that the accountant", lambda: step(model, 1.0)))


def test_a_user_without_finite_samples_is_among_the_norms() -> None:
    model, x = hooked(), torch.randn(6, 4)
    users, kept = torch.tensor([7, 7, 2, 2, 9, 7]), torch.tensor([True, True, False, False, False, True])
    norms, sums = expected(model, x[kept], users[kept])
    x[~kept] = float("nan")
    backward(model, x)
    assert_close(step(model, groups=users), torch.tensor([float("nan"), norms[0], float("nan")]), equal_nan=True)
    assert_grads(model, sums)
    x[:] = float("nan")
    backward(model, x)
    assert step(model, groups=users).isnan().tolist() == [True] * 3
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_both_parts_of_complex_numbers_have_the_noise() -> None:
    """One sample moves the sum by max_norm, all of it in one part if it likes."""
    model = nn.Linear(60, 50, dtype=torch.complex64)
    autograd_hacks.add_hooks(model, param_grad=False)
    autograd_hacks.backward(squares(model(torch.zeros(2, 60, dtype=torch.complex64))) * 0)
    autograd_hacks.private.clip_and_noise_(model, 2.0, 3.0, 5.0, noise=torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    for p in model.parameters():
        assert p.grad is not None
        noise = torch.normal(0.0, 6.0, (*p.shape, 2), generator=draws, dtype=torch.float32) / 5
        assert_close(torch.view_as_real(p.grad), noise)
    assert model.weight.grad is not None
    assert all(1.14 < part.std() < 1.26 for part in (model.weight.grad.real, model.weight.grad.imag))


@crossed(independent=[True, False], param_grad=[True, False])
def test_samples_that_know_of_each_other_are_refused_before_noise_is_drawn(param_grad: bool, independent: bool) -> None:
    """By a way that has no gradient."""
    centred = Bare(lambda m, h: h - h.mean(0).detach())
    model, x = nn.Sequential(nn.Linear(4, 3), centred, nn.Linear(3, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model, param_grad=param_grad, independent=independent):
        for _ in range(3):
            model.zero_grad()
            backward(model, x)
            before = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
            state = torch.get_rng_state()
            with pytest.raises(SamplesMixed, match=r"by the laws of operations .* at sub .*test_private.py"):
                step(model, 1.0)
            assert torch.equal(torch.get_rng_state(), state)
            assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0)


class Divided(torch.autograd.Function):
    """x, whose gradient is divided by a statistic of the batch."""

    is_on = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + ctx.saved_tensors[0].abs().mean()) if Divided.is_on else g * 1


BACKWARDS: dict[str, Any] = {
    "function": lambda h, mean: Divided.apply(h),
    "hook on a tensor": lambda h, mean: [h.register_hook(lambda g: g / (1 + mean)), h][1],
    "hook on a node": lambda h, mean: [h.grad_fn.register_prehook(lambda g: (g[0] / (1 + mean),)), h][1],
}


@pytest.mark.parametrize("how", BACKWARDS)
def test_a_backward_that_knows_of_other_samples_is_refused_in_each_kind_of_forward(how: str) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(BACKWARDS[how](h, h.detach().abs().mean()).tanh().sum(1))

    model = Bare(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model, independent=True):
        for length in (5, 5, 6, 7):
            backward(model, torch.randn(6, length, 4))
            with pytest.raises(SamplesMixed):
                step(model)


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
            with pytest.raises(SamplesMixed, match="laws of operations"):
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
    "sizes alone": lambda h: nn.functional.group_norm(h.view(-1, 3, 1), 1).view(len(h), 3) + torch.zeros(len(h), 1),
    "a loop": lambda h: torch.stack([x.softmax(0) for x in h]),
}


@pytest.mark.parametrize("how", SIZED)
def test_outputs_that_depend_on_the_number_of_samples_are_refused(how: str) -> None:
    """A drawn batch's size tells whether one sample more was there."""
    model, refused = Bare(lambda m, x: m.b(SIZED[how](m.a(x))), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), 0
    with autograd_hacks.add_hooks(model, independent=True):
        for samples in (7, 6, 4, 5):
            backward(model, torch.randn(samples, 4))
            try:
                step(model)
            except SamplesMixed as error:
                refused += "size is private" in str(error)
    assert refused == {"sizes alone": 0, "a loop": 0, "a branch": 2, "one size": 1}.get(how, 4)


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
            with nullcontext() if how == "nothing" or (n == 0 and "object" in how) else pytest.raises(SamplesMixed):
                backward(model, torch.randn(samples, 4))
                step(model)


def test_what_begins_to_know_of_other_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Function that was harmless before, or by a number that Python had read for a log."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        h = checkpoint(Divided.apply, h, use_reentrant=False) if m.is_checkpointed else Divided.apply(h)
        mean = h.detach().abs().mean().item()
        return m.b(h / (1 + mean) if m.divides else h)

    model = Bare(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    for begins in ("function", "checkpointed", "number"):
        model.is_checkpointed = begins == "checkpointed"  # type: ignore[assignment]
        with autograd_hacks.add_hooks(model, independent=True):
            for n in range(5):
                monkeypatch.setattr(Divided, "is_on", n > 2 and begins != "number")
                model.divides = n > 2 and begins == "number"  # type: ignore[assignment]
                backward(model, torch.randn(6, 4))
                with pytest.raises(SamplesMixed) if n > 2 else nullcontext():
                    step(model)


@crossed(param_grad=[True, False], probe=[True, False])
def test_a_forward_that_was_not_asked_is_shown_independent_afterwards(probe: bool, param_grad: bool) -> None:
    model, x = perceptron(), torch.randn(6, 4)
    norms, sums = expected(model, x)
    with autograd_hacks.add_hooks(model, probe=probe, param_grad=param_grad):
        for _ in range(3):
            backward(model, x)
            assert_close(step(model), norms)
            assert_grads(model, sums)
        for _ in range(3):  # later forwards show it themselves
            backward(model, torch.randn(6, 4))
            step(model)


def test_arguments_that_nobody_has_kept_can_not_be_shown_independent() -> None:
    model = hooked()
    for n in range(2):
        backward(model, torch.randn(6, 4))
        if n:  # the second forward was asked
            step(model)
            continue
        with pytest.raises(ProbeFailed, match=r"clip_and_noise_ .*add_hooks\(model, independent=True\)"):
            step(model)


def test_layers_called_by_themselves_are_not_shown_independent() -> None:
    model, x = hooked(), torch.randn(6, 4)
    for mixes in (True, False):
        h = x
        for layer in model:
            h = layer(h) - layer(h).mean(0).detach() if mixes else layer(h)
        autograd_hacks.backward(squares(h))
        with pytest.raises(ProbeFailed, match="clip_and_noise_ needs" if mixes else "called by itself"):
            step(model)


@pytest.mark.parametrize("parts", [1, 2])
def test_half_precision_is_rounded_after_the_noise(parts: int) -> None:
    """Rounded before it, the sum of many samples would move by many bounds with one sample more."""
    model, x = nn.Linear(4, 2).to(torch.bfloat16), torch.ones(1040, 4, dtype=torch.bfloat16)
    row = {p: own[0].float() for p, own in zip(model.parameters(), rows_of(model, x[:1]).values())}
    row = {p.shape: own * BOUND / torch.stack([g.norm() for g in row.values()]).norm() for p, own in row.items()}
    autograd_hacks.add_hooks(model, param_grad=False)
    for samples in range(1030, 1041):
        # Noise that leaves one sample's part.
        others = {shape: (1 - samples) * own / EXPECTED for shape, own in row.items()}
        for n, part in enumerate(x[:samples].chunk(parts)):
            autograd_hacks.backward(squares(model(part)), "sum")
            step(model, float(n == parts - 1), add=n > 0, noise=lambda _, shape, __, others=others: others[shape])
        for p in model.parameters():
            assert p.grad is not None
            assert_close(p.grad.float(), row[p.shape] / EXPECTED, rtol=0.1, atol=0.02 * BOUND / EXPECTED)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype).weight.grad += 1
        backward(model, x.to(dtype))
        with pytest.raises(ValueError, match="isn't what it has set"):
            step(model, add=True)
    model.zero_grad(set_to_none=False)
    step(model, add=True)
