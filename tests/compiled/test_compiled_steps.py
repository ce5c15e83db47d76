"""Compiled steps against one backward pass for each sample: every verb, trainings, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.compiled import backend as backends
from autograd_hacks.errors import NothingRecorded, SamplesMixed, UnseenGradient, UnsupportedOperation, VerificationFailed
from autograd_hacks.forms import Dense
from autograd_hacks.forms.projection import RandomMap

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch._dynamo.reset()


class Pictures(nn.Module):
    """Convolutions, one of them grouped, a norm, a class token, a tied table, and two biases with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, groups=2)
        self.norm, self.token = nn.LayerNorm(8), nn.Parameter(torch.randn(1, 1, 8))
        self.attention, self.table = nn.MultiheadAttention(8, 2, batch_first=True), nn.Embedding(5, 8)
        self.one, self.other = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.conv(x).tanh()).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.attention(self.norm(x), x, x)[0] + self.one + self.other
        return F.linear(x[:, 0] + self.table((x[:, 1, 0] * 3).long().abs() % 5), self.table.weight)


def pictures(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 6, 6).double(), torch.randint(5, (samples,))


def each_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    found = [
        torch.autograd.grad(each_loss(model, x[n : n + 1], y[n : n + 1]).sum(), list(model.parameters()), allow_unused=True)
        for n in range(len(x))
    ]
    named = zip(model.named_parameters(), zip(*found))
    return {name: torch.stack(rows) for (name, _), rows in named if rows[0] is not None}


def lengths(rows: dict[str, Tensor]) -> Tensor:
    return torch.stack([x.flatten(1).norm(dim=1) for x in rows.values()]).norm(dim=0)


def check_gradients(model: nn.Module, rows: dict[str, Tensor], w: Tensor) -> None:
    for name, p in model.named_parameters():
        if name in rows:
            assert_close(p.grad, torch.tensordot(w, rows[name], 1))


NUMBERS: dict[str, dict[str, Any]] = {
    "clip": {"max_norm": 1.0},
    "project": {"dim": 4, "seed": 3},
    "clip_and_noise": {"max_norm": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 7},
}


@pytest.mark.parametrize(
    ("verb", "loss_type"),
    [
        *(("rows", "sum"), ("clip_and_noise", "mean")),
        *rarely(
            ("norms", "sum"), ("sum", "sum"), ("dot", "sum"), ("clip", "sum"), ("rows", "mean"), ("clip_and_noise", "sum")
        ),
    ],
)
def test_every_verb(verb: str, loss_type: str) -> None:
    model = Pictures().double()
    step = autograd_hacks.compile(model, verb, loss_type=loss_type, backend=None, **NUMBERS.get(verb, {}))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for samples in (6, 4):
        x, y = pictures(samples)
        rows, weights = rows_of(model, x, y), torch.rand(samples).double()
        share = 1 / samples if loss_type == "mean" else 1.0
        model.zero_grad()
        if verb == "sum":
            step.weights = weights
        if verb == "dot":
            step.direction = direction
        getattr(each_loss(step, x, y), loss_type)().backward()
        clipped = (1 / lengths(rows)).clamp(max=1)
        if verb == "rows":
            for name, p in model.named_parameters():
                assert_close(p.grad1, rows.get(name))
        if verb in ("norms", "clip", "clip_and_noise"):
            assert_close(step.norms, lengths(rows))
        if verb == "dot":
            assert_close(step.dot, sum((x * direction[name]).flatten(1).sum(1) for name, x in rows.items()))
        if verb == "project":
            projected = (Dense(x).project(RandomMap(name, x.shape[1:], 4, 3)) for name, x in rows.items())
            assert_close(step.projection, sum(projected))
        w = {"clip": clipped * share, "clip_and_noise": clipped / 7, "sum": weights * share}
        check_gradients(model, rows, w.get(verb, torch.full((samples,), share).double()))


@pytest.mark.parametrize("verb", ["rows", *rarely("clip")])
def test_what_inductor_compiles(verb: str) -> None:
    model = Pictures()
    step = autograd_hacks.compile(model, verb, **NUMBERS.get(verb, {}))
    for samples in (6, 6, 9):
        x, y = pictures(samples)
        x, rows = x.float(), rows_of(copy.deepcopy(model).double(), x, y)
        model.zero_grad()
        each_loss(step, x, y).sum().backward()
        if verb == "rows":
            for name, found in rows.items():
                assert_close(model.get_parameter(name).grad1, found.float(), rtol=1e-3, atol=1e-4)
        else:
            assert_close(step.norms, lengths(rows).float(), rtol=1e-4, atol=1e-5)


OTHERS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam]


def channels_last(m: Any, x: Tensor) -> Tensor:
    """As ConvNeXt has it: depthwise convolutions between norms over channels."""
    x = m.norm(m.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    y = m.linear(m.norm(m.second(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return (x + y).mean((2, 3))


def test_convolutions_of_pictures_whose_channels_come_last() -> None:
    """Compiled code expected convolutions to lay their outputs out as they do without mkldnn."""
    model, (x, y) = (
        Bare(
            channels_last,
            first=nn.Conv2d(3, 8, 4, stride=4),
            norm=nn.LayerNorm(8),
            second=nn.Conv2d(8, 8, 3, padding=1, groups=8),
            linear=nn.Linear(8, 8),
        ),
        (torch.randn(16, 3, 64, 64), torch.randint(8, (16,))),
    )
    rows, step = rows_of(copy.deepcopy(model).double(), x.double(), y), autograd_hacks.compile(model, "rows")
    each_loss(step, x, y).sum().backward()
    for name, found in rows.items():
        assert_close(model.get_parameter(name).grad1, found.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, *rarely(*OTHERS)])
def test_a_training_with_a_smaller_last_batch(optimizer: type[torch.optim.Optimizer]) -> None:
    model = Pictures().double()
    twin = copy.deepcopy(model)
    step = autograd_hacks.compile(model, "clip", max_norm=0.5, loss_type="mean", backend=None)
    autograd_hacks.add_hooks(twin)
    mine, theirs = optimizer(model.parameters(), lr=0.01), optimizer(twin.parameters(), lr=0.01)
    for samples in (6, 6, 4, 6, 1, 6):
        x, y = pictures(samples)
        mine.zero_grad()
        each_loss(step, x, y).mean().backward()
        mine.step()
        theirs.zero_grad()
        each_loss(twin, x, y).mean().backward()
        norms = autograd_hacks.clip_grad1_norm_(twin, 0.5)
        theirs.step()
        assert_close(step.norms, norms)
        for p, q in zip(model.parameters(), twin.parameters()):
            assert_close(p, q)


@pytest.mark.parametrize("verb", ["norms", *rarely("rows")])
def test_no_ordinary_gradients(verb: str) -> None:
    model, (x, y) = Pictures().double(), pictures(6)
    step = autograd_hacks.compile(model, verb, param_grad=False, backend=None)
    for _ in range(2):
        each_loss(step, x, y).sum().backward()
        assert all(p.grad is None for p in model.parameters())
    rows = rows_of(model, x, y)
    if verb == "norms":
        assert_close(step.norms, lengths(rows))
    else:
        assert_close(model.one.grad1, rows["one"])


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_under_autocast(backend: str | None) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    step, x = autograd_hacks.compile(model, "rows", backend=backend), torch.randn(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        losses = step(x).float().square().sum(1)
    losses.sum().backward()
    for n in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x[n : n + 1]).float().square().sum()
        for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
            assert p.grad1.dtype == torch.float32
            assert (p.grad1[n] - grad).norm() <= 0.03 * grad.norm()


@pytest.mark.parametrize("verb", ["rows", *rarely("clip")])
def test_sequences_of_other_lengths(verb: str) -> None:
    model = Bare(
        lambda m, x: m.last((m.first(x) + m.table[: x.shape[1]]).tanh()).mean(1),
        first=nn.Linear(4, 4),
        table=torch.randn(12, 4),
        last=nn.Linear(4, 2),
    ).double()
    step = autograd_hacks.compile(model, verb, backend=None, **({"max_norm": 0.7} if verb == "clip" else {}))
    for samples, length in ((6, 3), (6, 6), (5, 6), (4, 4), (6, 3)):
        x, y = torch.randn(samples, length, 4).double(), torch.randint(2, (samples,))
        rows = rows_of(model, x, y)
        model.zero_grad()
        each_loss(step, x, y).sum().backward()
        if verb == "clip":
            check_gradients(model, rows, (0.7 / lengths(rows)).clamp(max=1))
        else:
            assert_close(model.table.grad1, rows["table"])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: F.dropout(self.first(x).tanh(), 0.5), x, use_reentrant=False)
        self.seen.mul_(0.9).add_(h.detach().mean(0))
        return self.last(h)


def test_the_steps_own_masks_and_buffers() -> None:
    model = Dropping()
    step = autograd_hacks.compile(model, "rows", backend=None)
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


def test_noise_has_its_deviation() -> None:
    model = nn.Linear(300, 200, bias=False)
    settings: dict[str, Any] = {"max_norm": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 4}
    generator = torch.Generator().manual_seed(0)
    step = autograd_hacks.compile(model, "clip_and_noise", noise=generator, backend=None, **settings)
    (0 * step(torch.randn(4, 300))).sum().backward()
    assert model.weight.grad is not None
    assert abs(float(model.weight.grad.std()) / (1.5 * 2 / 4) - 1) < 0.02


def test_arguments_with_and_without_samples() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor, *, scale: Tensor) -> Tensor:
            return (self.layer(x) @ table.T * scale[:, None]).tanh()

    model, x, table, scale = Two().double(), torch.randn(5, 4).double(), torch.randn(5, 4).double(), torch.rand(5).double()
    step = autograd_hacks.compile(model, "rows", batch=(0, None), backend=None)
    step(x, table, scale=2 * torch.ones(4).double()[:1]).sum().backward()
    for n in range(5):
        alone = torch.autograd.grad(model(x[n : n + 1], table, scale=2 * torch.ones(1).double()).sum(), model.layer.weight)[
            0
        ]
        assert_close(model.layer.weight.grad1[n], alone)
    with pytest.raises(SamplesMixed):  # each sample would meet the others' rows of the table
        autograd_hacks.compile(model, "rows", batch=0, backend=None)(x, table, scale=scale)
    time_first = nn.Linear(4, 2).double()
    step = autograd_hacks.compile(time_first, "rows", batch=1, backend=None)
    sequence = torch.randn(3, 5, 4).double()
    step(sequence).square().sum().backward()
    for n in range(5):
        alone = torch.autograd.grad(time_first(sequence[:, n]).square().sum(), time_first.weight)[0]
        assert_close(time_first.weight.grad1[n], alone)


def test_arguments_of_other_sizes_are_named() -> None:
    model = nn.Bilinear(3, 3, 2)
    step = autograd_hacks.compile(model, "rows", backend=None)
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(5, 3\)"):
        step(torch.randn(4, 3), torch.randn(5, 3))


class Reading(nn.Module):
    """Reads a tensor that is neither argument nor state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 3), [torch.randn(5, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.kept[0]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Distances(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.pdist(super().forward(x))


def test_what_can_not_be_told_is_refused() -> None:
    x = torch.randn(5, 3)
    with pytest.raises(UnsupportedOperation, match=r"kept.*not an argument"):
        autograd_hacks.compile(Reading(), "rows", backend=None)(x)
    with pytest.raises(UnsupportedOperation, match=r"can't be captured as one graph.*add_hooks"):
        autograd_hacks.compile(Branching(), "rows", backend=None)(x)
    with pytest.raises(UnsupportedOperation, match=r"'_pdist_forward'.*register_operation"):
        autograd_hacks.compile(Distances(), "rows", backend=None)(x)
    with pytest.raises(SamplesMixed, match="BatchNorm"):
        autograd_hacks.compile(nn.BatchNorm1d(3), "rows", backend=None)(x)
    with pytest.raises(SamplesMixed, match=r"a sum over samples in the forward pass.*test_compiled_steps\.py"):
        # Returns a loss of the whole batch.
        autograd_hacks.compile(Bare(lambda m, x: m.layer(x).sum(), layer=nn.Linear(3, 3)), "rows", backend=None)(x)


def test_gradient_past_the_graph_is_noticed() -> None:
    model = nn.Linear(3, 3)
    step = autograd_hacks.compile(model, "clip", max_norm=1.0, backend=None)
    x = torch.randn(5, 3)
    with pytest.raises(UnseenGradient, match="weight"):
        (step(x).square().sum() + model.weight.square().sum()).backward()
    with pytest.raises(UnseenGradient, match="weight"):
        (step(x) @ model.weight).square().sum().backward()
    model.zero_grad()
    step(x).square().sum().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    (0.5 * model.weight.square().sum()).backward()  # a penalty's own pass
    assert_close(model.weight.grad, before + model.weight)


def test_compiled_code_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = backends._Compilation._compiled

    def wrong(self: Any, graph: Any, inputs: Any, is_backward: bool) -> Any:
        run = own(self, graph, inputs, is_backward)

        def doubled(args: list[Any]) -> Any:
            found = list(run(args))
            return [2 * x if is_backward and isinstance(x, Tensor) else x for x in found]

        return doubled

    monkeypatch.setattr(backends._Compilation, "_compiled", wrong)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = autograd_hacks.compile(model, "clip", max_norm=1.0)
    with pytest.raises(VerificationFailed, match="compiled code is wrong"):
        step(torch.randn(5, 3)).square().sum().backward()


def test_what_it_is_told() -> None:
    model = nn.Linear(3, 2)
    refused: list[tuple[tuple[str, dict[str, Any]], str]] = [
        (("row", {}), "'rows', 'norms'"),
        (("rows", {"backend": "aot_eager"}), "'inductor' or None"),
        (("rows", {"loss_type": "median"}), "mean"),
        (("clip", {"max_norm": 0.0}), r"max_norm=0.0; expected a number in \(0, inf\]"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            autograd_hacks.compile(model, arguments[0], **arguments[1])
    missing: list[tuple[str, dict[str, Any]]] = [
        ("clip", {}),
        ("rows", {"max_norm": 1.0}),
        ("clip_and_noise", {"max_norm": 1.0}),
    ]
    for verb, options in missing:
        with pytest.raises(TypeError, match=r"max_norm|noise_multiplier"):
            autograd_hacks.compile(model, verb, **options)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        autograd_hacks.compile(model.forward, "rows")  # type: ignore[arg-type]
    step = autograd_hacks.compile(model, "norms", backend=None)
    with pytest.raises(NothingRecorded, match="there is no 'norms'"):
        _ = step.norms
    with pytest.raises(TypeError, match="can't be copied"):
        copy.deepcopy(step)
    with pytest.raises(ValueError, match=r"no entry, or one of another shape, for \['bias'\]"):
        step.direction = {"weight": torch.randn(2, 3)}


def test_no_gradients_no_compiled_backward() -> None:
    model = nn.Linear(3, 2)
    step = autograd_hacks.compile(model, "norms", backend=None)
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert_close(step(x), model(x))
    model.weight.requires_grad_(False)
    step(x).square().sum().backward()
    rows = torch.stack([2 * row for row in model(x)]).detach()
    assert_close(step.norms, rows.norm(dim=1))
