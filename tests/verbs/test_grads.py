"""Every verb of `PerSampleGrads` and `clip_grad1_norm_` against algebra on the rows."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import bare_matrix, language, perceptron, with_spare
from oracle import one_backward_per_sample, squares
from quantities import assert_quantities
from steps import stepped
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks


@pytest.mark.parametrize("samples", [0, 1, 2, 5])
def test_a_tied_embedding_a_replay_and_few_samples(samples: int) -> None:
    for model, x in [
        (language(7, 3).double(), torch.randint(7, (samples, 4))),
        (bare_matrix(4).double(), torch.randn(samples, 3, 4).double()),
        (nn.Sequential(bare_matrix(4), nn.Linear(4, 2)).double(), torch.randn(samples, 4).double()),
    ]:
        with autograd_hacks.add_hooks(model):
            if not samples:
                model(x.new_ones(3, *x.shape[1:]))  # a signature that the probe has seen
            squares(model(x)).sum().backward()
            with autograd_hacks.pause_hooks():
                rows = one_backward_per_sample(model, squares, x)
            for max_bytes in (2**26, 1000):
                assert_quantities(model, rows, "sum", max_bytes)


def test_micro_batches_and_frozen_and_unreached_parameters() -> None:
    model, x = with_spare(perceptron(), nn.Linear(3, 3)).double(), torch.randn(5, 4).double()
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            for part in (x[:2], x[2:]):
                squares(model(part)).mean().backward()
        with autograd_hacks.pause_hooks():
            rows = one_backward_per_sample(model, squares, x)
        assert rows["spare.weight"] is None
        assert_quantities(model, rows)


def test_several_quantities_of_one_backward_and_later_steps_leave_them() -> None:
    model, x = perceptron().double(), torch.randn(6, 4).double()
    grads = stepped(model, x)
    norms, sums = grads.norms(), grads.weighted_sum(torch.ones(6).double() / 6)
    assert_close(sums, {name: p.grad for name, p in model.named_parameters()})
    squares(model(x * 2)).mean().backward()
    assert_close(grads.norms(), norms)
    autograd_hacks.clear_backprops(model)
    assert_close(grads.norms(), norms)
    assert "6 samples" in repr(grads)


def test_sums_can_be_differentiated() -> None:
    for model, x in [
        (perceptron().double(), torch.randn(6, 4).double()),
        (language(7, 3).double(), torch.randint(7, (6, 2))),
        (bare_matrix(4).double(), torch.randn(6, 4).double()),
    ]:
        grads = stepped(model, x)
        v = {name: torch.randn(form.shape).double() for name, form in grads.items()}
        for sums in (1, 3):
            w = torch.rand(sums, 6).double().requires_grad_()
            found = grads.weighted_sum(w[0] if sums == 1 else w)
            sum(((own if sums == 1 else own[1]) * v[name]).sum() for name, own in found.items()).backward()
            assert_close(w.grad, torch.zeros(sums, 6).double().index_add(0, torch.tensor([sums // 2]), grads.dot(v)[None]))


def test_dot_of_complex_numbers_is_the_change_of_the_loss() -> None:
    model = Bare(  # complex layers, after a real one
        lambda m, x: m.first(m.before(x).to(torch.complex128)).abs(),
        before=nn.Linear(4, 4, dtype=torch.float64), first=nn.Linear(4, 3, dtype=torch.complex128),
    )  # fmt: skip
    x = torch.randn(5, 4).double()
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    losses = []
    for sign in (1e-5, -1e-5):
        moved = {name: p.detach() + sign * v[name] for name, p in model.named_parameters()}
        losses.append(squares(torch.func.functional_call(model, moved, (x,))))
    change = (losses[0] - losses[1]) / 2e-5
    autograd_hacks.add_hooks(model)
    autograd_hacks.backward(squares(model(x)), "sum")
    grads = autograd_hacks.per_sample_grads(model)
    assert_close(grads.dot(v).real, change, rtol=1e-6, atol=1e-6)
    for m in range(5):
        row = {name: own[m] for name, own in grads.dense().items()}
        assert_close(grads.dot(row), grads.gram()[:, m])
        assert_close(grads.dot(row), grads.gram_of_all()[:, m])
    with autograd_hacks.during_backward(model, "norms", dot=v) as streamed:
        autograd_hacks.backward(squares(model(x)), "sum")
    assert_close(streamed.dot.real, change, rtol=1e-6, atol=1e-6)


def in_one_buffer(model: nn.Module) -> Tensor:
    """Has all gradients lie in one vector."""
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)
    return buffer


@pytest.mark.parametrize("build", [perceptron, lambda: nn.Linear(4, 3, bias=False)])
def test_a_flat_buffer_of_gradients_is_written_in_place(build: Callable[[], nn.Module]) -> None:
    x, verbs = torch.randn(6, 4), autograd_hacks
    for param_grad in (True, False):
        model = build()
        buffer = in_one_buffer(model)
        verbs.add_hooks(model, param_grad=param_grad)

        def backward(part: Tensor, model: nn.Module = model) -> None:
            autograd_hacks.backward(squares(model(part)), "sum")

        backward(x)
        rows = torch.cat([own.flatten(1) for own in verbs.per_sample_grads(model).dense().values()], 1)
        clipped = (1 / rows.norm(dim=1)).clamp(max=1)
        verbs.clip_grad1_norm_(model, 1.0)
        assert_close(buffer, clipped @ rows)
        backward(x)
        verbs.compute_grad1(model, set_grad=True)
        assert_close(buffer, rows.sum(0))
        backward(x)
        verbs.private.clip_and_noise_(model, 1.0, 0.0, 3.0)
        assert_close(buffer, clipped @ rows / 3)
        if not param_grad:
            buffer.zero_()
            for part in x.split(2):
                backward(part)
                verbs.clip_grad1_norm_(model, 1.0, add=True)
            assert_close(buffer, clipped @ rows)
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_a_flat_buffer_has_zeros_where_no_loss_reached() -> None:
    model = with_spare(nn.Linear(4, 3))
    buffer = in_one_buffer(model)
    buffer += 1
    autograd_hacks.add_hooks(model, param_grad=False)
    squares(model(torch.randn(5, 4))).sum().backward()
    autograd_hacks.clip_grad1_norm_(model, 1.0, "sum")
    assert buffer[:15].all()
    assert not (buffer[:15] == 1).any()
    assert not buffer[15:].any()


def written(m: nn.Module, x: Tensor) -> Tensor:
    """The scale is written into another tensor."""
    h = torch.zeros_like(x)
    h[:, :2] = m.scale
    return m.layer(x) * h


def normalised(m: nn.Module, x: Tensor) -> Tensor:
    """The scale meets the batch by way of another value."""
    return m.layer(x)[:, :2] * (m.scale / m.scale.norm())


@pytest.mark.parametrize("how", [written, normalised])
def test_rows_that_need_their_parameter_no_more_are_read_after_it_has_changed(how: Callable[..., Tensor]) -> None:
    model = Bare(how, layer=nn.Linear(4, 4), scale=torch.ones(2))
    norms = stepped(model, torch.randn(6, 4)).norms()
    model.scale.data = torch.tensor([3.0, -1.0])
    assert_close(autograd_hacks.per_sample_grads(model).norms(), norms)


def test_forms_by_name_and_by_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    grads = stepped(model, torch.randn(6, 4))
    for name, p in model.named_parameters():
        assert (p in grads) == (name in grads) == p.requires_grad
        if p.requires_grad:
            assert grads[p] is grads[name]
            assert grads.get(p) is grads[name]
    assert grads["1.weight"] is grads["0.weight"] is grads[model[1].weight]


# How numbers behave in `PerSampleGrads` and `clip_grad1_norm_`: zeros, overflow, half precision, autocast


def test_no_gradient_at_all_is_not_clipped() -> None:
    model, x = perceptron().double(), torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        (model(x) * torch.tensor([[0.0], [1.0], [100.0]])).sum().backward()
        norms = autograd_hacks.clip_grad1_norm_(model, 1.0, "sum")
    assert norms[0] == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_what_is_no_number_stays_with_its_sample() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)), torch.randn(5, 2, 4, 4)
    x[3, 0, 0, 0] = torch.nan
    grads = stepped(model, x)
    assert grads.norms().isnan().tolist() == [False, False, False, True, False]
    assert grads.gram().isnan().any(1).tolist() == [True] * 5
    assert not grads.select(torch.tensor([0, 1, 2, 4])).gram().isnan().any()
    with pytest.raises(RuntimeError, match=r"samples \[3\]"):
        autograd_hacks.clip_grad1_norm_(model, 1.0, error_if_nonfinite=True)


def test_norms_leave_the_range_of_numbers_only_where_they_must() -> None:
    for factor in (1e-30, 1e30):
        model, x = perceptron(), torch.randn(4, 4)
        with autograd_hacks.add_hooks(model):
            (model(x) * factor).sum().backward()
            norms = autograd_hacks.per_sample_grads(model, "sum").norms()
        assert ((norms / factor > 0.1) & (norms / factor < 100)).all()


def test_autocast_around_reading_changes_nothing() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    norms = grads.norms()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(grads.norms(), norms)
        assert grads.gram().dtype == torch.float32


@pytest.mark.parametrize(
    "build", [lambda: nn.Sequential(bare_matrix(4), nn.Linear(4, 2)), lambda: nn.LSTM(4, 3, batch_first=True)]
)
def test_inference_mode_around_reading_changes_nothing(build: Callable[[], nn.Module]) -> None:
    model, x = build().double(), torch.randn(6, 5, 4).double()
    autograd_hacks.add_hooks(model)

    def step() -> None:
        out = model(x)
        squares(out[0] if isinstance(out, tuple) else out).mean().backward()

    step()
    model.zero_grad()
    step()
    expected, noise = [p.grad for p in model.parameters()], autograd_hacks.per_sample_grads(model).noise_scale()
    with torch.inference_mode():
        grads = autograd_hacks.per_sample_grads(model)
        sums = grads.weighted_sum(torch.full((6,), 1 / 6))
        assert_close(grads.noise_scale(), noise)
        autograd_hacks.clip_grad1_norm_(model, 1e9)
    assert_close(list(sums.values()), expected)
    assert_close([p.grad for p in model.parameters()], expected)


def test_weights_of_another_precision() -> None:
    grads = stepped(nn.Linear(4, 3), torch.randn(100, 4))
    w = torch.rand(100) * 700
    for dtype, digits in ((torch.float16, 1e-3), (torch.bfloat16, 1e-2), (torch.float64, 1e-5)):
        expected = grads.weighted_sum(w.to(dtype).float())["weight"]
        assert_close(grads.weighted_sum(w.to(dtype))["weight"], expected, rtol=1e-5, atol=digits)
    with pytest.raises(TypeError, match="floating-point"):
        grads.weighted_sum(torch.ones(100, dtype=torch.complex64))


# Laws 1 and 3 for whole models: rows and quantities are those of each sample alone, and of double precision


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A model of several layers, in double precision, and a batch."""
    torch.manual_seed(draw(st.integers(0, 999)))
    samples, steps, width = draw(st.integers(1, 6)), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 3))
    bias = draw(st.booleans())
    kind = draw(st.sampled_from(["mlp", "cnn", "tied", "token", "lstm", "attention"]))
    if kind == "tied":
        return language(7, width).double(), torch.randint(7, (samples, steps))
    if kind == "cnn":
        groups = draw(st.sampled_from([1, 2]))
        layers = [nn.Conv2d(2, width, 2, groups=groups, bias=bias), nn.GroupNorm(1, width), nn.Tanh(), nn.Flatten(2)]
        return nn.Sequential(*layers, nn.Linear(4, 3)).double(), torch.randn(samples, 2, 3, 3).double()
    model = {
        "mlp": lambda: nn.Sequential(nn.Linear(width, 5, bias=bias), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
        "token": lambda: nn.Sequential(bare_matrix(width), nn.Linear(width, 3)),
        "lstm": lambda: pooled(nn.LSTM(width, 3, draw(st.integers(1, 2)), bias=bias, batch_first=True)),
        "attention": lambda: nn.TransformerEncoderLayer(width, 2, 6, dropout=0.0, batch_first=True),
    }[kind]()
    return model.double(), torch.randn(samples, steps, width).double()


def pooled(layer: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.layer(x)[0].sum(1), layer=layer)


def taken(model: nn.Module, x: Tensor, param_grad: bool = True) -> autograd_hacks.PerSampleGrads:
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    squares(model(x)).sum().backward()
    return autograd_hacks.per_sample_grads(model, "sum")


@settings(max_examples=settings().max_examples // 2)
@given(models(), st.booleans())
def test_quantities_are_those_of_each_sample_alone(case: tuple[nn.Module, Tensor], param_grad: bool) -> None:
    model, x = case
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for batch in (x, x.flip(0)):
            with autograd_hacks.pause_hooks():
                rows = one_backward_per_sample(model, squares, batch)
            model.zero_grad()
            squares(model(batch)).sum().backward()
            assert_quantities(model, rows, "sum")


@settings(max_examples=settings().max_examples // 3)
@given(models())
def test_single_precision_is_that_of_double(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    single = copy.deepcopy(model).float()
    exact, grads = taken(model, x), taken(single, x.float() if x.is_floating_point() else x)
    assert_close(grads.norms(), exact.norms().float(), rtol=1e-3, atol=1e-4)
    scale = float(exact.norms().max()) ** 2
    assert_close(grads.gram(), exact.gram().float(), rtol=1e-3, atol=1e-4 * max(1.0, scale))
