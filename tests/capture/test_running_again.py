"""Parameters that are read where no layer and no function of torch's is seen; nothing is run again for their rows."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, one_loss_at_a_time, squares
from rarely import crossed
from steps import check
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import ProbeFailed, SamplesMixed, StaleRecord


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # of one gradient
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum_to_size(scale.shape)


class Scaled(nn.Module):
    """A scale that an autograd.Function reads."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        Scaled.seen += 1
        return Multiply.apply(x, self.scale)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Written(nn.Module):
    """A parameter that is written by index."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        h[..., 0] = self.first
        return h * x.sum(-1, keepdim=True)


class Checkpointed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Noisy(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.dropout(x, 0.5, self.training)) + torch.rand(len(x), 1).to(x)


class Overwriting(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Choosy(Scaled):
    """Which way depends on the numbers of the batch, and is the same for all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Choosy, self).forward(row) if row[0] > 0 else row for row in x])


class Iterating(Scaled):
    """A buffer that each forward changes, and that the output depends on, as in spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(3))
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x: Tensor) -> Tensor:
        self.u.mul_(0.9)
        return super().forward(x) * self.u * torch.rand((), generator=self.generator)


KINDS = [Scaled, Scripted, Written, Checkpointed, Noisy, Overwriting, Choosy, Iterating]


def whole(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(3, 3), kind(), nn.Linear(3, 2)).double()


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@crossed(kind=KINDS, param_grad=[True, False])
def test_rows(kind: type[nn.Module], param_grad: bool) -> None:
    model = whole(kind)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in (4, 3, 1, 5):
            x, changing = torch.randn(n, 3).double(), dict(model.named_buffers())
            generators = [torch.default_generator, *([model[2].generator] if kind is Iterating else [])]
            before = [g.get_state() for g in generators], {name: b.clone() for name, b in changing.items()}
            squares(model(x)).mean().backward()
            after = [g.get_state() for g in generators], {name: b.clone() for name, b in changing.items()}
            grads = autograd_hacks.per_sample_grads(model)
            w = torch.linspace(-1, 2, n).double()
            sums, norms = grads.weighted_sum(w), grads.norms()
            rows = grads.dense()
            assert all(map(torch.equal, [g.get_state() for g in generators], after[0]))
            assert all(torch.equal(b, after[1][name]) for name, b in changing.items())

            def losses(
                x: Tensor = x, before: Any = before, generators: Any = generators, changing: Any = changing
            ) -> Tensor:
                for generator, state in zip(generators, before[0]):
                    generator.set_state(state)
                for name, b in changing.items():
                    b.data = before[1][name].clone()
                return squares(model(x))

            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, losses)
            for name, row in expected.items():
                torch.testing.assert_close(rows[name], row)
                torch.testing.assert_close(sums[name], torch.tensordot(w, row, 1))
            torch.testing.assert_close(norms, torch.cat([row.reshape(n, -1) for row in expected.values()], 1).norm(dim=1))
        how = [row.how for row in autograd_hacks.describe(model).rows if row.parameter.startswith("2.")]
        assert {each.startswith("graph: ") for each in how} == {True}


def test_it_runs_once_a_step() -> None:
    model, counts = whole(Scaled), []
    with autograd_hacks.add_hooks(model):
        for n in (3, 9, 3, 9):
            before = Scaled.seen
            squares(model(torch.randn(n, 3).double())).mean().backward()
            autograd_hacks.compute_grad1(model)
            counts.append(Scaled.seen - before)
    assert counts == [1] * 4


class Counting(Scaled):
    """A state of its own that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("kind", [Counting, Scaled])
def test_rows_are_those_of_the_forward_whatever_has_changed_since(kind: type[nn.Module]) -> None:
    model, x = whole(kind), torch.randn(4, 3).double()

    def losses() -> Tensor:
        if kind is Counting:
            model[2].calls = 4
        return squares(model(x))

    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, losses)
            losses().mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            autograd_hacks.compute_grad1(model)
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad1, expected[name])


@pytest.mark.parametrize("changed", ["the input", "a weight"])
def test_what_rows_depend_on_has_changed(changed: str) -> None:
    model, x = (
        Bare(lambda m, x: x @ (m.a @ m.b), a=torch.randn(3, 4), b=torch.randn(4, 3)).double(),
        torch.randn(4, 3).double(),
    )
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            squares(model(x)).mean().backward()
            if changed == "the input":
                x.normal_()
            else:
                torch.optim.SGD(model.parameters(), 0.1).step()
            told = "overwritten in place" if changed == "the input" else r"before optimizer.step\(\)"
            with pytest.raises(StaleRecord, match=told):
                autograd_hacks.compute_grad1(model)


class Mean(Scaled):
    detaches = False

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return super().forward(x) - (mean.detach() if self.detaches else mean)


class Detached(Mean):
    detaches = True


class Inside(Mean):
    """What mixes inside hardly shows in what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-6 + x


class Last(Scaled):
    """Only the last sample goes to the others, detached."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x[-1:].detach().clamp(min=0.1))


@crossed(alone=[True, False], probe=[True, False], kind=[Mean, Detached, Inside, Last])
def test_samples_that_mix_inside(kind: type[nn.Module], probe: bool, alone: bool) -> None:
    model, x = whole(kind), 2 * torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
    with autograd_hacks.add_hooks(model, probe=probe, independent=True):
        squares((model[2] if alone else model)(x)).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


def test_a_part_that_takes_no_other_samples() -> None:
    class Sorted(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if (x[1:, 0] < x[:-1, 0]).any():
                raise ValueError("unsorted")
            return super().forward(x)

    model, x = whole(Sorted), torch.arange(12.0).view(4, 3).double()
    with autograd_hacks.add_hooks(model):
        check(model, x, run=lambda x: model[2](x))
    with autograd_hacks.add_hooks(model, independent=True), pytest.raises(ProbeFailed, match="ValueError: unsorted"):
        model[2](x)


def test_a_loss_inside_a_part() -> None:
    class Loss(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return squares(super().forward(x)).sum()

    model, x = whole(Loss), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        model[2](x).backward()
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, lambda loss: loss[None], x, run=lambda x: model[2](x)))
