"""What attacks on compiled steps have found: wrong numbers, samples that know of each other, and steps that failed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from rarely import crossed, rarely
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.compiled import backend as backends
from autograd_hacks.errors import SamplesMixed, UnseenGradient, UnsupportedOperation

pytestmark = pytest.mark.filterwarnings("ignore")

PRIVATE: dict[str, Any] = {
    "max_norm": 1.0,
    "noise_multiplier": 2.0,
    "expected_batch_size": 8,
    "backend": None,
    "loss_type": "sum",
}


def inner(then: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A layer and something after it, or beside it."""
    model = Bare(lambda m, x: then(m, m.layer(x)), layer=nn.Linear(4, 4))
    model.register_buffer("kept", torch.zeros(16))
    model.other = torch.zeros(16)
    return model


@pytest.mark.parametrize("turned", [False, True])
def test_two_parameters_of_one_gradient_have_noise_of_their_own(turned: bool) -> None:
    model = Bare(lambda m, x: x @ (m.a + (m.b.t() if turned else m.b)), a=torch.randn(60, 60), b=torch.randn(60, 60))
    generator = torch.Generator().manual_seed(0)
    autograd_hacks.compile(model, "clip_and_noise", **PRIVATE, noise=generator)(torch.zeros(4, 60)).sum().backward()
    for p in (model.a, model.b):
        assert p.grad.std().item() == pytest.approx(2.0 / 8, rel=0.1)
    assert torch.stack([model.a.grad.flatten(), model.b.grad.flatten()]).corrcoef()[0, 1].abs() < 0.1


def test_gradients_that_are_expanded_have_noise() -> None:
    model = Bare(lambda m, x: m.layer(x) * (1 + m.bias.sum()), layer=nn.Linear(3, 2), bias=torch.zeros(2000))
    autograd_hacks.compile(model, "clip_and_noise", **PRIVATE)(torch.zeros(4, 3)).sum().backward()
    assert model.bias.grad.std().item() == pytest.approx(2.0 / 8, rel=0.1)


def test_a_private_step_adds_to_no_gradient() -> None:
    step = autograd_hacks.compile(model := nn.Linear(3, 2), "clip_and_noise", **PRIVATE)
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"found gradient in \.grad of 'weight', 'bias'"):
        step(torch.zeros(4, 3)).sum().backward()
    model.zero_grad(set_to_none=False)
    step(torch.zeros(4, 3)).sum().backward()


@crossed(kind=["linear", "positions", "embedding", "mlp"], where=["loss", "input"])
def test_a_sample_that_is_not_finite_adds_nothing(kind: str, where: str) -> None:
    models: dict[str, nn.Module] = {
        "linear": nn.Linear(4, 3), "positions": nn.Linear(4, 3), "embedding": nn.Embedding(5, 3),
        "mlp": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)),
    }  # fmt: skip
    x = torch.randint(5, (4, 2)) if kind == "embedding" else torch.randn(*([4, 2] if kind == "positions" else [4]), 4)
    factor = torch.ones(4)
    if where == "input" and kind != "embedding":
        x[1] = torch.inf
    else:
        factor[1] = torch.inf
    model, others = models[kind], torch.tensor([0, 2, 3])
    options = {**PRIVATE, "noise_multiplier": 0.0}

    def stepped(x: Tensor, factor: Tensor) -> list[Tensor | None]:
        step = autograd_hacks.compile(model, "clip_and_noise", **options)
        (step(x).square().flatten(1).sum(1) * factor).sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    assert_close(stepped(x, factor), stepped(x[others], factor[others]))


@crossed(verb=["rows", "norms", "clip"], param_grad=[True, False])
def test_two_calls_for_one_loss_are_refused(verb: str, param_grad: bool) -> None:
    options = {"max_norm": 1.0} if verb == "clip" else {"param_grad": param_grad}
    step = autograd_hacks.compile(nn.Linear(4, 3), verb, backend=None, **options, loss_type="sum")  # type: ignore[arg-type]  # of several kinds
    a, b = torch.randn(2, 4, 4)
    loss = (step(a) - 2 * step(b)).sum()
    with pytest.raises(UnseenGradient, match="called several times for one loss"):
        loss.backward()
    step(a).sum().backward()  # and goes on


def attend(model: Any, h: Tensor) -> Tensor:
    """Over the batch."""
    whole = h[None, None].repeat(1, 1, 1, 4)
    return h + flex_attention(whole, whole, whole)[0, 0, :, :4]


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attention": attend,
    "a loop": lambda m, h: torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + y.mean(0)), (torch.tensor(0), h))[
        1
    ],
    "strides that turn": lambda m, h: h + h.as_strided((4, 4), (1, 4)),
    "strides that repeat": lambda m, h: h + h.as_strided(h.shape, (0, 1)),
    "the second smallest": lambda m, h: h + h.t().kthvalue(2).values[:, None],
    "bags that begin anywhere": lambda m, h: (
        h * F.embedding_bag(torch.arange(4), m.layer.weight, torch.tensor([0, 1, 1, 3]))
    ),
    "pairs by index": lambda m, h: h[torch.arange(4).view(2, 2)].mean(1).repeat(2, 1),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_refused(name: str) -> None:
    step = autograd_hacks.compile(inner(MIXING[name]), "norms", backend=None, loss_type="sum")
    with pytest.raises((SamplesMixed, UnsupportedOperation)):
        step(torch.randn(4, 4)).sum().backward()


ELSEWHERE = [torch.zeros(16)]


KEEPS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "a buffer is assigned": (lambda m, h: setattr(m, "kept", h.flatten() * 1), lambda m: m.kept),
    "an attribute is assigned": (lambda m, h: setattr(m, "other", h.flatten() * 1), lambda m: m.other),
    "an attribute is written": (lambda m, h: m.other.copy_(h.flatten().repeat(16)[:16]), lambda m: m.other),
    "a buffer in place": (lambda m, h: m.kept.mul_(0.9).add_(h.mean()), lambda m: m.kept),
    "in a list": (lambda m, h: ELSEWHERE.__setitem__(0, h.flatten() * 1), lambda m: ELSEWHERE[0]),
}
"""What a forward keeps, and what it takes from the one before."""


@crossed(samples=[4, 1], kind=KEEPS)
def test_what_a_private_step_would_hand_on_to_the_next_is_refused(kind: str, samples: int) -> None:
    keep, kept = KEEPS[kind]

    def then(model: Any, h: Tensor) -> Tensor:
        out = h + kept(model)[:4]
        keep(model, h.detach())
        return out

    ELSEWHERE[0] = torch.zeros(16)
    step = autograd_hacks.compile(inner(then), "clip_and_noise", **PRIVATE)
    with pytest.raises((SamplesMixed, UnsupportedOperation)):  # noqa: PT012  # either step may tell
        for _ in range(2):
            step(torch.randn(samples, 4)).sum().backward()


def test_what_is_free_of_samples_may_be_kept() -> None:
    def counts(model: Any, h: Tensor) -> Tensor:
        model.kept.add_(1)
        model.other = model.other + 1
        return F.dropout(h)

    model = inner(counts)
    step = autograd_hacks.compile(model, "clip_and_noise", **PRIVATE)
    for samples in (4, 3, 1):
        model.zero_grad()
        step(torch.randn(samples, 4)).sum().backward()
    assert model.kept[0] == 3


@pytest.mark.slow  # a language model is compiled, to see that it runs
def test_a_cache_that_is_returned_is_none_that_is_kept() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )
    step = autograd_hacks.compile(model, "clip_and_noise", **PRIVATE)
    out = step(input_ids=torch.randint(11, (3, 5)), use_cache=True)
    out.logits.square().sum().backward()


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.RReLU()])
def test_random_numbers_in_compiled_code(module: nn.Module) -> None:
    """The step's own mask is in rows and in gradients: their sums agree, which the proof asks, and rows are masked."""
    model = nn.Sequential(nn.Linear(4, 32), module)
    step = autograd_hacks.compile(model, "rows", loss_type="sum")
    out = step(torch.ones(5, 4))
    out.sum().backward()
    if isinstance(module, nn.Dropout):
        assert_close(model[0].bias.grad1, (out != 0).float() * 2)
    assert_close(model[0].bias.grad1.sum(0), model[0].bias.grad)


def norms_are_right(step: Any, x: Tensor, *more: Any) -> None:
    step(x, *more).square().sum().backward()
    losses = [step.model(row[None], *more).square().sum() for row in x]
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]) for loss in losses]
    assert_close(step.norms, torch.stack(rows).norm(dim=1))


def test_a_second_model_is_compiled_as_if_it_were_the_first() -> None:
    conv = nn.Conv2d(1, 4, 3)
    table = Bare(lambda m, x: (m.layer(x) + m.table[: x.shape[1]]).tanh(), layer=nn.Linear(4, 4), table=torch.randn(12, 4))
    for model, shapes in (
        (nn.Sequential(nn.Linear(4, 3)), [(5, 4), (3, 4)]),
        (nn.Sequential(conv, nn.Flatten(), nn.Linear(16, 3)), [(n, 1, 4, 4) for n in (5, 4, 6)]),
        (nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), [(n, 1, 4, 4) for n in (5, 4, 6)]),
        (table, [(6, 3, 4), (6, 6, 4), (5, 6, 4), (4, 4, 4), (6, 3, 4)]),
    ):
        step = autograd_hacks.compile(model, "norms", backend=None, loss_type="sum")
        for shape in shapes:
            norms_are_right(step, torch.randn(shape))


def test_numbers_among_the_arguments_are_numbers() -> None:
    model = Bare(lambda m, x, scale, power: (m.layer(x) / scale) ** power, layer=nn.Linear(4, 3))
    step = autograd_hacks.compile(model, "norms", backend=None, loss_type="sum")
    for n, scale, power in ((5, 1.0, 2), (5, 2.0, 2), (4, 3.5, 2), (5, True, 2), (5, 1.0, 3)):
        norms_are_right(step, torch.randn(n, 4), scale, power)
    with pytest.raises(UnsupportedOperation, match="Give it as a tensor"):  # an array might have samples
        step(torch.randn(5, 4), torch.ones(5, 1).numpy(), 2)


def test_several_forwards_before_their_passes() -> None:
    step = autograd_hacks.compile(nn.Linear(4, 3), "norms", backend=None, loss_type="sum", dynamic=True)
    for x, out in [(x, step(x)) for x in (torch.randn(5, 4), torch.randn(3, 4))]:
        out.sum().backward()
        assert_close(step.norms, (3 * (x.square().sum(1) + 1)).sqrt())


def test_sizes_are_symbols_or_compiled_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for dynamic, compilations in ((None, 2), (True, 1), (False, 4)):
        step = autograd_hacks.compile(model, "norms", backend=None, loss_type="sum", dynamic=dynamic)
        for n in (5, 4, 6, 7, 5):
            norms_are_right(step, torch.randn(n, 4))
        assert step._compilations == compilations

    def fails(self: Any, graph: Any, inputs: Any, is_backward: bool) -> Any:
        if self.step._is_symbolic and is_backward:
            raise TypeError("cannot determine truth value of Relational")
        return compiled(self, graph, inputs, is_backward)

    compiled = backends.Compilation._compiled
    monkeypatch.setattr(backends.Compilation, "_compiled", fails)
    monkeypatch.setattr("autograd_hacks.compiled.step.MOST_FIXED", 2)
    counting = Bare(lambda m, x: (m.count.add_(1), m.layer(x))[1], layer=model)
    counting.register_buffer("count", torch.zeros(()))
    step = autograd_hacks.compile(counting, "norms", backend=None, loss_type="sum")
    for k, n in enumerate((5, 4, 6, 4)):
        step(torch.randn(n, 4)).sum().backward()
        assert counting.count == k + 1  # the forward ran once
    assert capsys.readouterr().err.count("is compiled for each size of its arguments") == 1
    with pytest.raises(UnsupportedOperation, match="compiled 2 times, for other sizes each"):
        step(torch.randn(7, 4))


def test_ties_and_what_is_frozen_after_compiling() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    step, x = autograd_hacks.compile(model, "norms", backend=None, loss_type="sum"), torch.randn(5, 4)
    with torch.no_grad():
        assert_close(step(x), model(x))
    for change in (
        lambda: None,
        lambda: setattr(model[2], "weight", model[0].weight),
        lambda: model[2].bias.requires_grad_(False),
        lambda: setattr(model[2], "weight", nn.Parameter(torch.randn(4, 4))),
        lambda: model[0].requires_grad_(False),
        lambda: model.append(nn.Linear(4, 3)),
    ):
        change()
        norms_are_right(step, x)


def test_a_step_whose_model_has_hooks() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    step = autograd_hacks.compile(model, "norms", backend=None, loss_type="sum")
    for hooked in (model, step):
        autograd_hacks.add_hooks(hooked)
        with pytest.raises(UnsupportedOperation, match="remove_hooks first"):
            step(x)
        autograd_hacks.remove_hooks(hooked)
    norms_are_right(step, x)


@pytest.mark.parametrize("verb", ["rows", "clip", *rarely("norms")])
def test_batches_of_nobody(verb: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    options = {"max_norm": 1.0} if verb == "clip" else {}
    step = autograd_hacks.compile(model, verb, backend=None, **options, loss_type="sum")  # type: ignore[arg-type]  # of several kinds
    for n in (4, 0, 3):
        step(torch.randn(n, 4)).sum().backward()
        if verb == "rows":
            assert model[0].weight.grad1.shape == (n, 3, 4)
        else:
            assert step.norms.shape == (n,)
