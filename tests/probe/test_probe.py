"""What the probe finds out: where the samples are, whether they mix, and what it costs and leaves behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_backward_per_sample, one_loss_at_a_time, squares
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import ProbeFailed, SamplesMixed, UnseenGradient


def check(model: nn.Module, *batches: Tensor, **options: Any) -> None:
    with autograd_hacks.add_hooks(model, **options):
        for x in batches:
            model.zero_grad()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_backward_per_sample(model, squares, x))
            autograd_hacks.verify(model, samples=1)


class SequenceFirst(nn.Module):
    """T N F inside, folded both ways, and PReLU with T for its channels' neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(9, 4), nn.LayerNorm(4), nn.LSTM(4, 4)
        self.inner, self.late, self.slope, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        samples, steps = tokens.shape
        x = self.slope(self.norm(self.mix(self.embed(tokens.T))[0]))
        x = torch.tanh(self.inner(x.reshape(steps * samples, 4)))  # T·N
        x = x.view(steps, samples, 4).transpose(0, 1).reshape(samples * steps, 4)
        x = torch.tanh(self.late(x)).view(samples, steps, 4)  # N·T
        return self.out(x)


@pytest.mark.parametrize("steps", [3, 4, 8])
def test_sequence_first_and_folded_rows(steps: int) -> None:
    """T = N, too, and another length and batch size in the steps after the first."""
    draw = lambda n, t: torch.randint(9, (n, t))  # noqa: E731
    check(SequenceFirst().double(), draw(4, steps), draw(4, steps + 1), draw(3, 3), draw(1, 4), draw(2, 6))


def test_folded_images() -> None:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Linear(8, 2)

        def forward(self, clips: Tensor) -> Tensor:
            frames = self.norm(self.conv(clips.flatten(0, 1)))
            by_time = self.norm(self.conv(clips.transpose(0, 1).flatten(0, 1))).unflatten(0, (clips.shape[1], len(clips)))
            x = frames.unflatten(0, clips.shape[:2]) + by_time.transpose(0, 1)
            return self.out(torch.tanh(x.flatten(2)))

    check(Video().double(), torch.randn(4, 3, 1, 3, 3).double(), torch.randn(3, 5, 1, 3, 3).double())


class Positions(nn.Module):
    """Learnt positions: by ids T or (1, T) or repeated for each sample; and a table of relative ones."""

    def __init__(self, ids: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.embed, self.positions, self.relative = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Embedding(17, 1)
        self.out, self.ids = nn.Linear(4, 2), ids

    def forward(self, tokens: Tensor) -> Tensor:
        samples, steps = tokens.shape
        x = self.embed(tokens) + self.positions(self.ids(samples, steps))
        at = torch.arange(steps)
        scores = x @ x.mT + self.relative(at - at[:, None] + 8).permute(2, 0, 1)
        return self.out(torch.tanh(scores.softmax(2) @ x))


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize(
    "ids",
    [
        lambda n, t: torch.arange(t),
        lambda n, t: torch.arange(t)[None],
        lambda n, t: torch.arange(t).expand(n, t),
        lambda n, t: torch.zeros(n, t, dtype=torch.long),
        lambda n, t: torch.zeros(t, dtype=torch.long),
    ],
    ids=["T", "1 T", "N T", "zeros N T", "zeros T"],
)
def test_positions_without_a_batch(ids: Callable[[int, int], Tensor], steps: int) -> None:
    """T = N, too."""
    check(Positions(ids).double(), torch.randint(9, (4, steps)), torch.randint(9, (4, 4)), torch.randint(9, (3, 5)))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("samples", [4, 5])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_transformers_with_time_first(norm_first: bool, samples: int, explicit: bool) -> None:
    """Arguments T N E, which layers that take axis 1 for the batch give away; T = N, too."""
    model = nn.Transformer(4, 2, 1, 1, 6, norm_first=norm_first).double()
    source, target = torch.randn(5, samples, 4).double(), torch.randn(3, samples, 4).double()
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)

    def losses() -> Tensor:
        torch.manual_seed(1)
        return squares(model(source, target, tgt_mask=mask).transpose(0, 1))

    with autograd_hacks.add_hooks(model, batch_dim=1) if explicit else autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            losses().mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, losses))
        autograd_hacks.verify(model, samples=2)


class Pair(nn.Module):
    """Arguments with samples on different axes, and a mask of N = T by T."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, others: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        y = self.left(x) + self.right(others["y"]).transpose(0, 1)
        return y if mask is None else mask @ y


def test_a_tree_of_axes() -> None:
    model, x, y = Pair().double(), torch.randn(4, 5, 3).double(), torch.randn(5, 4, 3).double()
    mask = torch.randn(5, 5).double()
    for batch_dim, args, kwargs in (
        ((0, {"y": 1}), (x, {"y": y}), {}),
        ((0, 1, None), (x, {"y": y}, mask), {}),
        ({"x": 0, "others": 1}, (), {"x": x, "others": {"y": y}, "mask": mask}),
    ):
        with autograd_hacks.add_hooks(model, batch_dim=batch_dim):
            squares(model(*args, **kwargs)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, lambda a=args, k=kwargs: squares(model(*a, **k))))
    with autograd_hacks.add_hooks(model, batch_dim=(0, 0)), pytest.raises(ValueError, match=r"sizes \{4, 5\}"):
        model(x, {"y": y})
    with autograd_hacks.add_hooks(model, batch_dim=(0,)), pytest.raises(ValueError, match=r"doesn't fit 2 positional"):
        model(x, {"y": y})


def test_a_mask_of_n_by_n() -> None:
    model, mask = Pair().double(), torch.randn(4, 4).double()
    x, y = torch.randn(4, 4, 3).double(), torch.randn(4, 4, 3).double()
    with autograd_hacks.add_hooks(model, batch_dim=(0, 1, None)):
        squares(model(x, {"y": y}, mask)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_loss_at_a_time(model, lambda: squares(model(x, {"y": y}, mask))))
    encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).double().eval()
    x = torch.randn(4, 4, 4).double()
    with autograd_hacks.add_hooks(encoder):  # a square matrix behind the first tensor is taken for a mask
        squares(encoder(x, mask)).mean().backward()
        autograd_hacks.compute_grad1(encoder)
        with autograd_hacks.pause_hooks():
            assert_rows(encoder, one_loss_at_a_time(encoder, lambda: squares(encoder(x, mask))))


class Mixing(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.first(x)))


@pytest.mark.parametrize(
    "how",
    [
        lambda h: h - h.mean(0),
        lambda h: h + 1e-2 * h.flip(0),
        lambda h: h / h.norm(),
        lambda h: F.batch_norm(h, None, None, training=True),
        lambda h: (h @ h.T).softmax(1) @ h,
    ],
)
def test_samples_that_mix(how: Callable[[Tensor], Tensor]) -> None:
    model = Mixing(how)
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(6, 3))).mean().backward()
        with pytest.raises(SamplesMixed, match=r"the output of layer 'last' \(Linear\) changed .* batch_dim"):
            autograd_hacks.compute_grad1(model)


def test_samples_that_mix_at_the_very_end() -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.tower(x)
            return z @ z.T

    model = Contrastive()
    with autograd_hacks.add_hooks(model):
        F.cross_entropy(model(torch.randn(6, 3)), torch.arange(6)).backward()
        with pytest.raises(SamplesMixed, match="output number 0 of the model"):
            autograd_hacks.compute_grad1(model)


def test_without_a_probe_axis_0_is_the_batch() -> None:
    model = SequenceFirst().double()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with autograd_hacks.add_hooks(model, probe=False):
        squares(model(torch.randint(9, (4, 4)))).mean().backward()
    assert len(calls) == 1


def count_forwards(model: nn.Module) -> list[int]:
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_one_forward_for_each_signature_and_none_for_a_length() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model):
        for shape in ((4, 3), (5, 3), (2, 3), (4, 7, 3), (5, 8, 3), (1, 3), (1, 3)):
            squares(model(torch.randn(*shape))).mean().backward()
        assert len(calls) == 7 + 3  # two ranks, and a batch of one
        model.eval()
        squares(model(torch.randn(4, 3))).mean().backward()
        squares(model(torch.randn(4, 3))).mean().backward()
        assert len(calls) == 10 + 3
        with torch.no_grad():
            model(torch.randn(4, 2, 2, 3))
        assert len(calls) == 14


def test_samples_that_are_all_alike_are_probed_when_they_no_longer_are() -> None:
    model = SequenceFirst().double()
    alike, x = torch.ones(4, 4, dtype=torch.long), torch.randint(9, (4, 4))
    check(model, x)
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model):
        for tokens, forwards in ((alike, 2), (alike, 1), (x, 2), (x, 1), (alike, 1)):
            calls.clear()
            squares(model(tokens)).mean().backward()
            assert len(calls) == forwards
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, x))


class Stateful(nn.Module):
    """Draws random numbers, counts, keeps a list, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("total", torch.zeros(3))
        self.seen, self.last = [0], None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.seen[-1] + 1)
        self.last = x.sum().item()
        self.total += self.layer(x).detach().sum(0)
        with torch.no_grad():
            self.norm(x)
        return F.dropout(self.layer(x)) + torch.rand(())


def test_it_leaves_no_trace() -> None:
    hooked, plain = Stateful(), Stateful()
    plain.load_state_dict(hooked.state_dict())
    with autograd_hacks.add_hooks(hooked):
        for step in range(3):
            x, outs = torch.randn(4, 3), []
            for model in (hooked, plain):
                torch.manual_seed(step)
                outs.append(model(x))
                outs.append(torch.rand(3))
            assert torch.equal(outs[0], outs[2])
            assert torch.equal(outs[1], outs[3])
            assert (hooked.seen, hooked.last) == (plain.seen, plain.last)
            for name, value in hooked.state_dict().items():
                assert torch.equal(value, plain.state_dict()[name])
            outs[0].sum().backward()
            outs[2].sum().backward()
            for p, q in zip(hooked.parameters(), plain.parameters()):
                assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_a_model_that_takes_gradients_inside() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(at.pow(3).sum(), at)
            h = self.layer(x)
            h.register_hook(lambda g: g)  # which needs a graph
            return h * slope

    check(Force().double(), torch.randn(4, 3).double())


def test_a_model_that_can_not_run_the_probe() -> None:
    class Fussy(nn.Module):
        def __init__(self, x: Tensor) -> None:
            super().__init__()
            self.layer, self.x = nn.Linear(3, 2), x

        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(x, self.x):
                raise KeyError("never seen")
            return self.layer(x)

    x = torch.randn(4, 3).double()
    model = Fussy(x).double()
    with autograd_hacks.add_hooks(model), pytest.raises(ProbeFailed, match=r"KeyError: 'never seen'.*probe=False"):
        model(x)
    with autograd_hacks.add_hooks(model, probe=False):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert model.layer.weight.grad1.shape == (4, 2, 3)


class Skipping(nn.Module):
    """Layers by turns, on T N F."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.chosen = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), [0]

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for number in self.chosen:
            x = torch.tanh(self.layers[number](x))
        return x.transpose(0, 1)


def test_layers_that_are_skipped_at_first() -> None:
    """Where one size of its output is N alone, that is the samples' axis; otherwise the step after is right."""
    model = Skipping().double()
    with autograd_hacks.add_hooks(model):
        for steps in (5, 4):
            x = torch.randn(4, steps, 3).double()
            for model.chosen in ([0], [1], [1], [2], [2], [2, 1, 0]):
                model.zero_grad()
                squares(model(x)).mean().backward()
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    assert_rows(model, one_backward_per_sample(model, squares, x))
    model, x = Skipping().double(), torch.randn(4, 4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        model.chosen = [1]
        squares(model(x)).mean().backward()
        with pytest.raises(UnseenGradient, match=r"called for the first time since .* repeat the step"):
            autograd_hacks.compute_grad1(model)
        model.zero_grad()
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, x))


def test_layers_that_are_skipped_at_random_are_probed_once_they_are_there() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.chosen = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), [0]

        def forward(self, x: Tensor) -> Tensor:
            for number in self.chosen:
                x = torch.tanh(self.layers[number](x))
            return x

    model, x = Drop(), torch.randn(4, 3)
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model):
        for model.chosen in ([0], [1], [1], [2], [2], [0, 1, 2], [2], [1]):
            squares(model(x)).mean().backward()
    assert len(calls) == 8 + 3
