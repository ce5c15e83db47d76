"""Compiled steps against one backward pass for each sample: every verb, trainings, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, cross_entropies, joined, of_classes, one_backward_per_sample
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.compiled import backend as backends
from autograd_hacks.errors import NothingRecorded, SamplesMixed, UnseenGradient, UnsupportedOperation, VerificationFailed

pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore")]  # of torch's compiler


def seen(m: Any, x: Tensor) -> Tensor:
    """Convolutions, one of them grouped, a norm, a class token, a tied table, a number, and two biases with one gradient."""
    x = m.grouped(m.conv(x).tanh()).flatten(2).mT
    x = torch.cat([m.token.expand(len(x), -1, -1), x], 1)
    x = x + m.attention(m.norm(x), x, x)[0] + m.weights + m.other
    return F.linear(m.gain * x[:, 0] + m.table((x[:, 1, 0] * 3).long().abs() % 5), m.table.weight)


def pictures_net() -> nn.Module:
    bare = {"token": torch.randn(1, 1, 8), "weights": torch.randn(8), "other": torch.randn(8), "unused": torch.randn(2)}
    bare["gain"] = torch.tensor(0.7)
    convs = {"conv": nn.Conv2d(3, 4, 3, padding=1), "grouped": nn.Conv2d(4, 8, 3, stride=2, groups=2)}
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Bare(seen, **convs, norm=nn.LayerNorm(8), attention=attention, table=nn.Embedding(5, 8), **bare)


def pictures(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 6, 6).double(), torch.randint(5, (samples,))


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    found = one_backward_per_sample(model, cross_entropies, x, y).items()
    return {name: rows for name, rows in found if rows is not None}


def check_gradients(model: nn.Module, rows: dict[str, Tensor], w: Tensor) -> None:
    for name, p in model.named_parameters():
        if name in rows:
            assert_close(p.grad, torch.tensordot(w, rows[name], 1))


NUMBERS: dict[str, dict[str, Any]] = {
    "clip": {"max_norm": 1.0},
    "clip_and_noise": {"max_norm": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 7},
}


@pytest.mark.parametrize(
    ("verb", "loss_type"),
    [
        *(("rows", "sum"), ("clip_and_noise", "mean")),
        *rarely(("norms", "sum"), ("clip", "sum"), ("rows", "mean"), ("clip_and_noise", "sum")),
    ],
)
def test_every_verb(verb: str, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autograd_hacks.compiled.step.LARGE", 0)  # gradients are then sums of rows
    model = pictures_net().double()
    step = autograd_hacks.compile(model, verb, loss_type=loss_type, backend=None, **NUMBERS.get(verb, {}))
    for samples in (6, 4):
        x, y = pictures(samples)
        rows = rows_of(model, x, y)
        share = 1 / samples if loss_type == "mean" else 1.0
        model.zero_grad()
        getattr(of_classes(step, x, y), loss_type)().backward()
        clipped = (1 / joined(rows).norm(dim=1)).clamp(max=1)
        if verb == "rows":
            for name, p in model.named_parameters():
                assert_close(p.grad1, rows.get(name))
        else:
            assert_close(step.norms, joined(rows).norm(dim=1))
        ordinary = torch.full((samples,), share).double()
        check_gradients(model, rows, {"clip": clipped * share, "clip_and_noise": clipped / 7}.get(verb, ordinary))


def check_inductor(model: nn.Module, step: Any, x: Tensor, y: Tensor, verb: str = "rows") -> None:
    """In single precision."""
    rows = rows_of(copy.deepcopy(model).double(), x.double(), y)
    model.zero_grad()
    of_classes(step, x, y).sum().backward()
    if verb != "rows":
        assert_close(step.norms, joined(rows).norm(dim=1).float(), rtol=1e-4, atol=1e-5)
    for name, found in rows.items() if verb == "rows" else ():
        assert_close(model.get_parameter(name).grad1, found.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("verb", ["rows", *rarely("clip")])
def test_what_inductor_compiles(verb: str) -> None:
    model = pictures_net()
    step = autograd_hacks.compile(model, verb, **NUMBERS.get(verb, {}), loss_type="sum")
    for samples in (6, 6, 9):
        x, y = pictures(samples)
        check_inductor(model, step, x.float(), y, verb)


def channels_last(m: Any, x: Tensor) -> Tensor:
    """As ConvNeXt has it: depthwise convolutions between norms over channels."""
    x = m.norm(m.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    y = m.linear(m.norm(m.second(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return (x + y).mean((2, 3))


def test_convolutions_of_pictures_whose_channels_come_last() -> None:
    """Compiled code expected convolutions to lay their outputs out as they do without mkldnn."""
    model, x, y = (
        Bare(
            channels_last,
            first=nn.Conv2d(3, 8, 4, stride=4),
            norm=nn.LayerNorm(8),
            second=nn.Conv2d(8, 8, 3, padding=1, groups=8),
            linear=nn.Linear(8, 8),
        ),
        torch.randn(16, 3, 64, 64),
        torch.randint(8, (16,)),
    )
    check_inductor(model, autograd_hacks.compile(model, "rows", loss_type="sum"), x, y)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, *rarely(torch.optim.SGD)])
def test_a_training_with_a_smaller_last_batch(optimizer: type[torch.optim.Optimizer]) -> None:
    model = pictures_net().double()
    twin = copy.deepcopy(model)
    step = autograd_hacks.compile(model, "clip", max_norm=0.5, loss_type="mean", backend=None)
    autograd_hacks.add_hooks(twin)
    mine, theirs = optimizer(model.parameters(), lr=0.01), optimizer(twin.parameters(), lr=0.01)
    for samples in (6, 6, 4, 6, 1, 6):
        x, y = pictures(samples)
        mine.zero_grad()
        of_classes(step, x, y).mean().backward()
        mine.step()
        theirs.zero_grad()
        of_classes(twin, x, y).mean().backward()
        norms = autograd_hacks.clip_grad1_norm_(twin, 0.5)
        theirs.step()
        assert_close(step.norms, norms)
        for p, q in zip(model.parameters(), twin.parameters()):
            assert_close(p, q)


@pytest.mark.parametrize("verb", ["norms", *rarely("rows")])
def test_no_ordinary_gradients(verb: str) -> None:
    model, (x, y) = pictures_net().double(), pictures(6)
    step = autograd_hacks.compile(model, verb, param_grad=False, backend=None, loss_type="sum")
    for _ in range(2):
        of_classes(step, x, y).sum().backward()
        assert all(p.grad is None for p in model.parameters())
    rows = rows_of(model, x, y)
    assert_close(*((step.norms, joined(rows).norm(dim=1)) if verb == "norms" else (model.weights.grad1, rows["weights"])))


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_under_autocast(backend: str | None) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    step, x = autograd_hacks.compile(model, "rows", backend=backend, loss_type="sum"), torch.randn(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        losses = step(x).float().square().sum(1)
    losses.sum().backward()
    for n in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x[n : n + 1]).float().square().sum()
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            assert p.grad1.dtype == torch.float32
            assert (p.grad1[n] - grad).norm() <= 0.03 * grad.norm()


def dropping(m: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda x: F.dropout(m.first(x).tanh(), 0.5), x, use_reentrant=False)
    m.seen.mul_(0.9).add_(h.detach().mean(0))
    return m.last(h)


def test_the_steps_own_masks_and_buffers() -> None:
    model = Bare(dropping, first=nn.Linear(4, 8), last=nn.Linear(8, 3))
    model.register_buffer("seen", torch.zeros(8))
    step = autograd_hacks.compile(model, "rows", backend=None, loss_type="sum")
    for _ in range(3):
        before = model.seen.clone()
        model.zero_grad()
        state = torch.get_rng_state()
        step(torch.randn(6, 4)).square().sum().backward()
        assert not torch.equal(state, torch.get_rng_state())
        assert not torch.equal(model.seen, before)
        for p in model.parameters():
            assert_close(p.grad1.sum(0), p.grad)
    assert step.model is model
    assert next(name for name, _ in step.named_parameters()) == "model.first.weight"


def test_arguments_with_and_without_samples() -> None:
    model = Bare(lambda m, x, table, *, scale: (m.layer(x) @ table.T * scale[:, None]).tanh(), layer=nn.Linear(4, 4))
    model, x, table = model.double(), torch.randn(5, 4).double(), torch.randn(5, 4).double()
    one, scale = 2 * torch.ones(1).double(), torch.rand(5).double()
    step = autograd_hacks.compile(model, "rows", batch=(0, None), backend=None, loss_type="sum")
    step(x, table, scale=one).sum().backward()
    assert_rows(model, one_backward_per_sample(model, torch.sum, x, run=lambda x: model(x, table, scale=one)))
    with pytest.raises(SamplesMixed):  # each sample would meet the others' rows of the table
        autograd_hacks.compile(model, "rows", batch=0, backend=None, loss_type="sum")(x, table, scale=scale)
    time_first = nn.Linear(4, 2).double()
    step = autograd_hacks.compile(time_first, "rows", batch=1, backend=None, loss_type="sum")
    sequence = torch.randn(3, 5, 4).double()
    step(sequence).square().sum().backward()
    assert_rows(time_first, one_backward_per_sample(time_first, torch.square, sequence.transpose(0, 1)))


UNTOLD: dict[str, tuple[Callable[[Any, Tensor], Tensor], type[Exception], str]] = {
    "neither argument nor state": (lambda m, x: m.layer(x) * m.kept[0], UnsupportedOperation, r"kept.*not an argument"),
    "a branch": (
        lambda m, x: m.layer(x) if x.sum() > 0 else -m.layer(x),
        UnsupportedOperation,
        r"can't be captured as one graph.*add_hooks",
    ),
    "values that are checked": (lambda m, x: x @ torch.linalg.inv(m.layer.weight), UnsupportedOperation, "inv_ex"),
    "distances": (lambda m, x: F.pdist(m.layer(x)), UnsupportedOperation, r"'_pdist_forward'.*register_operation"),
    "lost": (lambda m, x: m.layer(x) / m.kept[1].add_(1), UnsupportedOperation, "one number in float64"),
    "batch norm": (lambda m, x: m.norm(x), SamplesMixed, "BatchNorm"),
    "frequency": (lambda m, x: m.table((x > 0).long()), SamplesMixed, "scale_grad_by_freq"),
    # Returns a loss of the whole batch.
    "all": (lambda m, x: m.layer(x).sum(), SamplesMixed, r"a sum over samples in the forward pass.*test_compiled_steps\.py"),
}


@pytest.mark.parametrize("what", UNTOLD)
def test_what_can_not_be_told_is_refused(what: str) -> None:
    run, error, words = UNTOLD[what]
    table, kept = nn.Embedding(2, 3, scale_grad_by_freq=True), [torch.randn(5, 3), torch.zeros((), dtype=torch.float64)]
    model = Bare(run, layer=nn.Linear(3, 3), norm=nn.BatchNorm1d(3), table=table, kept=kept)
    with pytest.raises(error, match=words):
        autograd_hacks.compile(model, "rows", backend=None, loss_type="sum")(torch.randn(5, 3))


UNFILLED: dict[str, Any] = {"param_grad": False, "backend": None, "loss_type": "sum"}


def test_gradient_past_the_graph_is_noticed() -> None:
    model = Bare(lambda m, x: F.linear(x, m.weight), weight=torch.randn(3, 3), other=torch.randn(3, 3))
    step = autograd_hacks.compile(model, "clip", max_norm=1.0, backend=None, loss_type="sum")
    silent = autograd_hacks.compile(model, "norms", **UNFILLED)
    x = torch.randn(5, 3, requires_grad=True)
    for loss in (
        lambda: step(x).square().sum() + model.weight.square().sum(),
        lambda: model.weight.square().sum() + step(x).square().sum(),  # its gradient is added in place to the graph's
        lambda: (step(x) @ model.weight).square().sum(),
        lambda: (step(x) @ model.other).square().sum(),  # its gradient arrives before the graph runs
        lambda: checkpoint(step, x, use_reentrant=True).square().sum() + model.weight.square().sum(),
        lambda: step(x).square().sum() + silent(x).sum(),
        lambda: silent(x).square().sum() + 2 * autograd_hacks.compile(model, "norms", **UNFILLED)(x).square().sum(),
    ):
        with pytest.raises(UnseenGradient, match=r"weight|other|reentrant|several times"):
            loss().backward()
    model.zero_grad()
    step(x).square().sum().backward()
    before = model.weight.grad.clone()
    (0.5 * model.weight.square().sum()).backward()  # a penalty's own pass
    assert_close(model.weight.grad, before + model.weight)


def test_compiled_code_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = backends.Compilation._compiled

    def wrong(self: Any, graph: Any, inputs: Any, is_backward: bool) -> Any:
        run = own(self, graph, inputs, is_backward)

        def doubled(args: list[Any]) -> Any:
            found = list(run(args))
            return [2 * x if is_backward and isinstance(x, Tensor) else x for x in found]

        return doubled

    monkeypatch.setattr(backends.Compilation, "_compiled", wrong)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = autograd_hacks.compile(model, "clip", max_norm=1.0, loss_type="sum")
    with pytest.raises(VerificationFailed, match="compiled code is wrong"):
        step(torch.randn(5, 3)).square().sum().backward()


def test_what_it_is_told() -> None:
    model = nn.Linear(3, 2)
    refused: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
        (model, "row", {}, ValueError, "'rows', 'norms'"),
        (model, "rows", {"backend": "aot_eager"}, ValueError, "'inductor' or None"),
        (model, "rows", {"loss_type": "median"}, ValueError, "mean"),
        (model, "clip", {}, TypeError, "max_norm|noise_multiplier"),
        (model, "rows", {"max_norm": 1.0}, TypeError, "max_norm|noise_multiplier"),
        (model, "clip_and_noise", {"max_norm": 1.0}, TypeError, "max_norm|noise_multiplier"),
        (model.forward, "rows", {}, TypeError, r"torch\.nn\.Module"),
    ]
    for what, verb, options, error, words in refused:
        with pytest.raises(error, match=words):
            autograd_hacks.compile(what, verb, **options)
    step = autograd_hacks.compile(model, "norms", backend=None, loss_type="sum")
    with pytest.raises(NothingRecorded, match="there is no 'norms'"):
        _ = step.norms
    with pytest.raises(ValueError, match="used 'mean', but the step was compiled for 'sum'"):
        autograd_hacks.backward(step(torch.randn(4, 3)).sum(1))
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(5, 3\)"):  # arguments of other sizes
        step(torch.randn(4, 3), torch.randn(5, 3))
    with pytest.raises(TypeError, match="can't be copied"):
        copy.deepcopy(step)
