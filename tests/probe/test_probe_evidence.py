"""What the probe must not be misled by, and what it must find out for models of odd make."""

import copy
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, one_loss_at_a_time, squares
from test_probe import check
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, ProbeFailed, SamplesMixed


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.last(self.how(self.first(x).tanh(), *more))


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize(
    "how",
    [
        lambda h: h.cumsum(0),
        lambda h: h.flip(0).cumsum(0).flip(0),
        lambda h: h - torch.cat([h[:1], h[:-1]]),
        lambda h: h.flip(0),
        lambda h: h.roll(1, 0),
        lambda h: h / h.abs().max(),
        lambda h: h / h.abs().amax(0),
        lambda h: h.sort(0)[0],
        lambda h: h - 1e-3 * h.mean(0),
    ],
    ids=["cumsum", "reverse cumsum", "difference", "flip", "roll", "max", "max by column", "sort", "a little of the mean"],
)
def test_no_order_along_the_batch_stays_in_the_dark(how: Callable[[Tensor], Tensor], samples: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = Between(how).double()
        with autograd_hacks.add_hooks(model):
            for _ in range(3):  # and it stays refused
                squares(model(torch.randn(samples, 3).double())).mean().backward()
                with pytest.raises(SamplesMixed):
                    autograd_hacks.compute_grad1(model)


def test_mixing_behind_sizes_that_are_read_off_the_data() -> None:
    def how(h: Tensor, lengths: Tensor) -> Tensor:
        h = h[:, : int(lengths.max())].sum(1)
        return h - h.mean(0)

    model, x = Between(how), torch.randn(4, 5, 3)
    with autograd_hacks.add_hooks(model):
        for lengths in ([1, 2, 3, 2], [2, 5, 1, 1], [1, 1, 1, 2]):
            squares(model(x, torch.tensor(lengths))).mean().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model)


def test_a_number_among_the_arguments_is_part_of_the_signature() -> None:
    model, x = Between(lambda h, share: h + share * h.mean(0) if share else h).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(x, 0.0)).mean().backward()
        autograd_hacks.compute_grad1(model)
        squares(model(x, 0.3)).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("steps", [2, 4, 5])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_with_time_first(kind: type[nn.RNNBase], steps: int) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = kind(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(x)[0])

    for samples in (2, 4, 5):
        model, x = Sequence().double(), torch.randn(steps, samples, 3).double()
        with autograd_hacks.add_hooks(model):
            squares(model(x).transpose(0, 1)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda m=model, x=x: squares(m(x).transpose(0, 1)))
            assert_rows(model, expected)


class Adapter(nn.Module):
    """W x + B A x, with B zero at first, on T N F or on rows T·N."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(3, 3), nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)
        self.folded = folded

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(0, 1) if self.folded else x.transpose(0, 1)
        rows = self.layer(rows) + self.up(self.down(rows))
        return (rows.unflatten(0, (x.shape[1], x.shape[0])) if self.folded else rows).transpose(0, 1)


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("steps", [4, 6])
def test_weights_of_zero_hide_no_axis(folded: bool, steps: int) -> None:
    model, x = Adapter(folded).double(), torch.randn(4, steps, 3).double()
    check(model, x)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        nn.init.normal_(model.up.weight)
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, x))


def test_a_dead_layer_hides_no_axis() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            nn.init.constant_(self.first.bias, -100.0)

        def forward(self, x: Tensor) -> Tensor:
            h = x.transpose(0, 1)
            return (self.last(self.first(h).relu()) + h).transpose(0, 1)

    check(Dead().double(), torch.randn(4, 4, 3).double())


def test_a_large_feature_hides_no_change() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x.transpose(0, 1))
            h = torch.cat([h[..., :2], torch.full_like(h[..., 2:], -1e6)], -1)
            return self.last(h * torch.tensor([1.0, 1.0, 1e-6])).transpose(0, 1)

    model, x = Large(), torch.randn(3, 3, 3)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, x))


def test_positions_of_which_only_the_first_counts() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.positions = nn.Linear(3, 3), nn.Embedding(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.positions(torch.arange(3)))[:, 0]

    check(First().double(), torch.randn(3, 3, 3).double())


def test_a_square_mask_of_samples_by_positions() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[mask] = self.layer(x[mask])
            return out

    model, x = Masked().double(), torch.randn(4, 4, 3).double()
    with autograd_hacks.add_hooks(model):
        for mask in (torch.eye(4).bool().flip(1), torch.ones(4, 4).bool(), torch.rand(4, 4) < 0.5):
            model.zero_grad()
            squares(model(x, mask)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, lambda m=mask: squares(model(x, m))))


@pytest.mark.parametrize("fold", ["N·T", "T·N", "H·N·T"])
def test_a_length_of_one_at_first(fold: str) -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = {"N·T": (0, 1, 2, 3), "T·N": (1, 0, 2, 3), "H·N·T": (2, 0, 1, 3)}[fold]
            shape = [x.shape[axis] for axis in order]
            back = [order.index(axis) for axis in range(4)]
            return self.layer(x.permute(order).reshape(-1, 3)).view(shape).permute(back)

    check(Folded().double(), *(torch.randn(n, t, 2, 3).double() for n, t in ((4, 1), (2, 3), (4, 1), (4, 4), (3, 2))))


def test_tables_that_are_read_by_the_batch() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.weights = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3, 3))
            self.layer = nn.Linear(3, 3)
            self.register_buffer("noise", torch.rand(5))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            x = self.noise[ids, None] * x + self.table[ids]
            return self.layer(torch.einsum("nij,nj->ni", self.weights[ids], x).tanh() + self.table.index_select(0, ids))

    model, x = Tables().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for ids in (torch.tensor([0, 3, 3, 1]), torch.tensor([4, 4, 2, 1])):
            model.zero_grad()
            squares(model(x, ids)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, lambda i=ids: squares(model(x, i))))


def test_packing_inside_a_model() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.GRU(3, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.out(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])

    model, x = Packed().double(), torch.randn(4, 5, 3).double()
    with autograd_hacks.add_hooks(model):
        for lengths in ([2, 5, 3, 1], [5, 1, 5, 2]):
            model.zero_grad()
            squares(model(x, torch.tensor(lengths))).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda at=lengths: squares(model(x, torch.tensor(at))))
            assert_rows(model, expected)


def test_bags_with_offsets_as_arguments() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.out = nn.EmbeddingBag(9, 3), nn.Linear(3, 2)

        def forward(self, entries: Tensor, offsets: Tensor) -> Tensor:
            return self.out(self.bags(entries, offsets))

    model, entries, offsets = Bags().double(), torch.randint(9, (10,)), torch.tensor([0, 3, 4, 8])
    with autograd_hacks.add_hooks(model):
        squares(model(entries, offsets)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_loss_at_a_time(model, lambda: squares(model(entries, offsets))))


def test_a_setting_before_the_batch() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, temperature: Tensor, x: Tensor) -> Tensor:
            return self.layer(x) / temperature

    model, x = Tempered().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(torch.ones(1).double(), x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert model.layer.weight.grad1.shape == (4, 3, 3)


def test_a_layer_that_is_called_more_often_than_before() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), 5)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return h

    check(Unrolled().double(), *(torch.randn(4, steps, 3).double() for steps in (2, 5, 3, 7)))


def test_parameters_and_containers_that_the_forward_changes() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
            self.mean, self.seen, self.deep = torch.zeros(3), {"n": []}, [torch.zeros(3)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters()):
                    q.mul_(0.9).add_(p, alpha=0.1)
                self.target.bias.data = self.target.bias.data + 1
                self.mean.mul_(0.5).add_(x.mean(0))
            self.seen["n"].append(len(x))
            self.deep[0] += 1
            return self.online(x) * self.target(x) + random.random() + float(numpy.random.rand())

    torch.manual_seed(0)
    hooked = Momentum()
    plain = copy.deepcopy(hooked)
    with autograd_hacks.add_hooks(hooked):
        for step in range(2):
            x, outs = torch.randn(4, 3), []
            for model in (hooked, plain):
                random.seed(step)
                numpy.random.seed(step)
                outs.append(model(x))
            assert torch.equal(outs[0], outs[1])
            assert all(torch.equal(p, q) for p, q in zip(hooked.parameters(), plain.parameters()))
            assert torch.equal(hooked.mean, plain.mean)
            assert hooked.seen == plain.seen
            assert torch.equal(hooked.deep[0], plain.deep[0])


def test_a_parameter_that_was_put_in_later() -> None:
    model, x = Between(lambda h: h), torch.randn(4, 3)
    model.scale = nn.Parameter(torch.ones(3))
    model.how = lambda h: h * model.scale
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        model.scale = nn.Parameter(2 * torch.ones(3))
        squares(model(x)).mean().backward()
        with pytest.raises(NothingRecorded, match=r"parameter 'scale'.*add_hooks\(model\) again"):
            autograd_hacks.compute_grad1(model)
        autograd_hacks.add_hooks(model)
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert model.scale.grad1.shape == (4, 3)


def test_arguments_that_hide_their_tensors_are_refused() -> None:
    model, x = Between(lambda h: h), torch.randn(4, 3)
    model.forward = lambda batch: model.last(model.first(batch["x"]))
    with autograd_hacks.add_hooks(model), pytest.raises(ProbeFailed, match=r"UserDict.*probe=False"):
        model(UserDict({"x": x}))
    with autograd_hacks.add_hooks(model, probe=False):
        squares(model(UserDict({"x": x}))).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert model.last.weight.grad1.shape == (4, 3, 3)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_gate_of_zero_hides_no_axis(steps: int) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.gate = nn.MultiheadAttention(4, 2), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.attend(x, x, x)[0]

    model, x = Gated().double(), torch.randn(steps, 4, 4).double()
    with autograd_hacks.add_hooks(model):
        for gate in (0.0, 0.5):
            nn.init.constant_(model.gate, gate)
            model.zero_grad()
            squares(model(x).transpose(0, 1)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, lambda: squares(model(x).transpose(0, 1))))


def test_a_gate_of_zero_hides_no_mixing() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = nn.Linear(3, 3), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.inner(x - x.mean(0))

    model, x = Gated().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        nn.init.constant_(model.gate, 0.5)
        squares(model(x)).mean().backward()
        with pytest.raises(SamplesMixed, match=r"run by themselves the samples come out different"):
            autograd_hacks.compute_grad1(model)


def test_samples_in_the_middle_of_a_fold() -> None:
    """H·N·T rows are no layout that the probe knows; the module around is run again, each sample by itself."""

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            samples, steps, heads, _ = x.shape
            rows = self.layer(x.permute(2, 0, 1, 3).reshape(-1, 3))
            return rows.view(heads, samples, steps, 3).permute(1, 2, 0, 3)

    check(Middle().double(), torch.randn(4, 3, 2, 3).double(), torch.randn(3, 4, 5, 3).double())
