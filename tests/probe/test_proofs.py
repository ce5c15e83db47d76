"""Two proofs, by values and by gradients: what mixes samples is refused at every step, what doesn't is read and right."""

import contextlib
import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import Between
from oracle import Rows, assert_rows, squares
from steps import check_losses
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError
from autograd_hacks.support.trees import outputs_of

SIZES = (3, 4, 8, 17, 32)
How = Callable[..., Tensor]


class AtEnd(Between):
    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.how(self.last(self.first(x).tanh()), *more)


class InFront(Between):
    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.last(self.first(self.how(x, *more)).tanh())


class AsLoss(Between):
    """Makes its loss itself, of what its last layer returns."""

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.how(self.last(self.first(x).tanh()), *more)


def losses_of(out: Any) -> Tensor:
    """N losses; of a scalar the one that the model has made."""
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.ndim]
    return squares(tuple(x.to(torch.promote_types(x.dtype, torch.float)) for x in outs)) if outs else out


def steps_of(
    model: nn.Module, batches: Sequence[tuple[Any, ...]], losses: Callable[[Any], Tensor] = losses_of, context: Any = None
) -> Iterator[None]:
    """A hooked model's steps, each up to its rows."""
    with autograd_hacks.add_hooks(model):
        for args in batches:
            model.zero_grad()
            with context or contextlib.nullcontext():
                out = model(*args)
            losses(out).mean().backward()
            yield


def check_refused(
    model: nn.Module, *batches: tuple[Any, ...], losses: Callable[[Any], Tensor] = losses_of, context: Any = None
) -> None:
    for n, _ in enumerate(steps_of(model, batches, losses, context)):
        try:
            autograd_hacks.compute_grad1(model)
        except PerSampleGradientError:
            continue
        pytest.fail(f"read in step {n}, which mixes samples")


def check_right(model: nn.Module, *batches: tuple[Any, ...], losses: Callable[[Any], Tensor] = losses_of) -> None:
    """Each step's rows are those of each sample alone: all tensors among the arguments have samples on axis 0."""
    for args, _ in zip(batches, steps_of(model, batches, losses)):
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, alone(model, args, losses))


def alone(model: nn.Module, args: tuple[Any, ...], losses: Callable[[Any], Tensor] = losses_of) -> Rows:
    """One plain backward pass for each sample by itself."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    reached: set[str] = set()
    for n in range(len(args[0])):
        own = [x[n : n + 1] if isinstance(x, Tensor) and x.ndim else x for x in args]
        grads = torch.autograd.grad(losses(model(*own)).sum(), list(parameters.values()), allow_unused=True)
        for (name, p), grad in zip(parameters.items(), grads):
            rows[name].append(torch.zeros_like(p) if grad is None else grad)
            reached |= {name} if grad is not None else set()
    return {name: torch.stack(own) if name in reached else None for name, own in rows.items()}


def mixes(model: nn.Module, x: Tensor) -> bool:
    """Whether the losses of the batch are others than those of its samples, or their gradients are."""
    losses = losses_of(model(x))
    own = torch.cat([losses_of(model(x[n : n + 1])) for n in range(len(x))])
    grads = [torch.autograd.grad(total.sum(), model.first.weight, retain_graph=True)[0] for total in (losses, own)]
    return not (torch.allclose(losses, own, 1e-12, 1e-12) and torch.allclose(*grads, 1e-12, 1e-12))


def data(samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *(shape or (3,)), dtype=torch.float64)


# Values: by index, by pairs, by order, detached


def nearest(h: Tensor, k: int = 1) -> Tensor:
    far = torch.cdist(h, h) + 1e9 * torch.eye(len(h), dtype=h.dtype)
    return h[far.topk(k, largest=False).indices].mean(1) if len(h) > k else h


def pairs(h: Tensor) -> Tensor:
    n = len(h) // 2
    return torch.cat([h[:n] + h[n : 2 * n], h[n : 2 * n] - h[:n], h[2 * n :]])


def swapped(h: Tensor) -> Tensor:
    n = len(h) // 2
    return torch.cat([h[n : 2 * n], h[:n], h[2 * n :]])


def by_groups(h: Tensor) -> Tensor:
    """The deviation over groups of samples, as StyleGAN's discriminator has it."""
    n = len(h) // 2
    if not n:
        return h
    spread = h[: 2 * n].view(2, n, -1).var(0, unbiased=False).mean(1)
    return h + torch.cat([spread, spread, spread.new_zeros(len(h) - 2 * n)])[:, None]


def one_edge(h: Tensor) -> Tensor:
    out = h.clone()
    out[-1] += h[1 % len(h)] if len(h) > 2 else h[0] * (len(h) > 1)
    return out


def centred(h: Tensor, y: Tensor) -> Tensor:
    return h - h.new_zeros(2, h.shape[1]).index_add(0, y, h)[y]


def ranked(h: Tensor) -> Tensor:
    """Ranks have no gradient at all."""
    return h * (1 + h.argsort(0).argsort(0).to(h.dtype))


MIXING: dict[str, How] = {
    "hard negatives": lambda h: h - nearest(h),
    "the nearest alone": nearest,
    "two neighbours": lambda h: h + nearest(h, 2),
    "centres taken back": lambda h: centred(h, (h[:, 0] > 0).long()),
    "pairs": pairs,
    "swapped halves": swapped,
    "deviation of groups": by_groups,
    "one edge": one_edge,
    "a fixed permutation": lambda h: 0.7 * h + 0.3 * h[torch.arange(len(h)).flip(0)],
    "detached": lambda h: h + h.roll(len(h) // 2, 0).detach(),
    "the largest, detached": lambda h: h / h.abs().max().detach(),
    "ranks": ranked,
    "sums so far": lambda h: h.cumsum(0),
    "sorted": lambda h: h.sort(0).values,
    "norm": lambda h: h / (1 + h.norm()),
    "attention": lambda h: (h @ h.T).softmax(1) @ h,
    "dense layers across": lambda h: (h.T @ torch.ones(len(h), len(h), dtype=h.dtype)).T / len(h) + h,
    "where it is finite": lambda h: torch.where(h.isfinite(), h - h.mean(0), h),
    "a thousandth": lambda h: torch.cat([h[:1], h[1:] + 1e-3 * h[:1]]),
    "a gate of 1e-2": lambda h: h + 1e-2 * h.mean(0),
    "a gate of 1e-4": lambda h: h + 1e-4 * h.mean(0),
    "a gate of 1e-6": lambda h: h + 1e-6 * h.mean(0),
}


@pytest.mark.parametrize("place", [Between, AtEnd, InFront])
@pytest.mark.parametrize("what", MIXING)
def test_samples_that_mix_are_refused_at_every_step(what: str, place: type[Between]) -> None:
    for samples in SIZES:
        model = place(MIXING[what]).double()
        assert mixes(model, data(samples)), samples
        check_refused(model, (data(samples),), (data(samples),))


@pytest.mark.parametrize("place", [Between, AtEnd])
@pytest.mark.parametrize("what", ["pairs", "swapped halves", "detached", "hard negatives"])
def test_other_sizes_are_proven_too(what: str, place: type[Between]) -> None:
    """One sample or two, which prove little, first; and more at each step."""
    model = place(lambda h: MIXING[what](h) if len(h) > 2 else h).double()
    check_refused(model, (data(8),), (data(4),), (data(17),))
    first, *rest = (1, 2, 4, 8, 17, 64)
    model = place(lambda h: MIXING[what](h) if len(h) > 2 else h).double()
    with autograd_hacks.add_hooks(model):
        for samples in (first, *rest):
            model.zero_grad()
            squares(model(data(samples))).mean().backward()
            if samples > 2:
                with pytest.raises(PerSampleGradientError):
                    autograd_hacks.compute_grad1(model)


def test_nine_edges_between_sixty_four_samples() -> None:
    edges = torch.tensor([(3, 17), (22, 5), (40, 41), (8, 60), (1, 2), (33, 12), (50, 51), (7, 55), (62, 0)]).T

    for place in (Between, AtEnd):
        model = place(lambda h: h.index_add(0, edges[0], h[edges[1]])).double()
        check_refused(model, *[(data(64),)] * 3)


@pytest.mark.parametrize("samples", SIZES)
def test_mixup_by_a_random_permutation(samples: int) -> None:
    def mixup(x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(samples).roll(1)]

    torch.manual_seed(1)
    check_refused(InFront(mixup).double(), *[(data(samples),)] * 3)
    torch.manual_seed(1)
    check_refused(Between(mixup).double(), *[(data(samples),)] * 3)


# Several arguments, several outputs


class Towers(nn.Module):
    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.first, self.items = nn.Linear(3, 4), items

    def forward(self, x: Tensor, items: Tensor) -> Tensor:
        return self.first(x) @ self.items(items).T


@pytest.mark.parametrize("samples", SIZES)
def test_two_towers(samples: int) -> None:
    """A second argument of integers, or a square matrix, has samples too."""
    ids, square = torch.randint(50, (samples,)), data(samples, samples)
    check_refused(Towers(nn.Embedding(50, 4)).double(), *[(data(samples), ids)] * 2)
    check_refused(Towers(nn.Linear(samples, 4)).double(), *[(data(samples), square)] * 2)


@pytest.mark.parametrize("samples", SIZES)
def test_labels_that_are_taken_back(samples: int) -> None:
    for place in (Between, AtEnd, InFront):
        check_refused(place(centred).double(), *[(data(samples), torch.arange(samples) % 2)] * 2)
        check_right(place(lambda h, y: h * (1 + y[:, None])).double(), *[(data(samples), torch.arange(samples) % 3)] * 2)


def test_an_unused_output_that_mixes_is_marked_alone() -> None:
    class Two(Between):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.last(self.first(x).tanh())
            return h, self.how(h)

    for how in (MIXING["detached"], MIXING["a gate of 1e-4"], pairs, lambda h: h - h.mean(0)):
        for samples in SIZES:
            check_right(Two(how).double(), *[(data(samples),)] * 2, losses=lambda out: squares(out[0]))
            check_refused(Two(how).double(), *[(data(samples),)] * 2, losses=lambda out: squares(out[1]))
            check_refused(Two(how).double(), *[(data(samples),)] * 2, losses=lambda out: squares(out))


class Held:
    """What a model may return its outputs in."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "an object": Held,
    "a dataclass": Frozen,
    "objects in objects": lambda x: Held([{"y": Frozen(x)}]),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0),
    "a dictionary of one's own": lambda x: UserDict(y=x),
    "a function": lambda x: lambda: x,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_output_in_an_object_is_looked_into(holder: str) -> None:
    class InObject(Between):
        def forward(self, x: Tensor) -> Any:
            self.out = [self.how(self.last(self.first(x).tanh()))]
            return HOLDERS[holder](self.out.pop())

    def losses(out: Any) -> Tensor:
        return squares(outputs_of(out)[0])

    for samples in SIZES:
        for how in (pairs, MIXING["detached"], lambda h: h - h.mean(0)):
            check_refused(InObject(how).double(), *[(data(samples),)] * 2, losses=losses)
        check_right(InObject(torch.sin).double(), *[(data(samples),)] * 2, losses=losses)


class Aux(Between):
    """Keeps what a loss is to read later."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.aux = self.how(h)
        return self.last(h)


@pytest.mark.parametrize("how", [pairs, MIXING["detached"], lambda h: h - h.mean(0), lambda h: h.mean(0).square().sum()])
def test_a_loss_that_reads_what_the_model_keeps(how: How) -> None:
    for samples in SIZES:
        model = Aux(how).double()
        reads = lambda out, model=model: squares(out) + (squares(model.aux) if model.aux.ndim else model.aux)  # noqa: E731
        check_refused(model, *[(data(samples),)] * 2, losses=reads)
        check_right(model, *[(data(samples),)] * 2)
        model = Aux(torch.sin).double()
        check_right(model, *[(data(samples),)] * 2, losses=lambda out, model=model: squares(out) + squares(model.aux))


# Losses made inside the model


def contrast(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T - 1e9 * torch.eye(len(z), dtype=z.dtype), torch.arange(len(z)).roll(1))


def balance(z: Tensor) -> Tensor:
    """Experts' load, as Switch has it."""
    p = z.softmax(1)
    return (F.one_hot(p.argmax(1), p.shape[1]).to(p).mean(0) * p.mean(0)).sum()


LOSSES: dict[str, How] = {
    "SimCLR": contrast,
    "CLIP": lambda z: F.cross_entropy(z @ z.sin().T, torch.arange(len(z))),
    "VICReg": lambda z: z.var(0).sqrt().mean() + z.square().mean(),
    "load balancing": balance,
    "the mean's square": lambda z: z.mean(0).square().sum(),
    "a set's distance": lambda z: torch.cdist(z, z).square().mean(),
    "the largest alone": lambda z: z.square().sum(1).max(),
    "normed": lambda z: (z / z.norm()).sum(),
    "centred": lambda z: (z - z.mean(0).detach()).square().sum(),
}


@pytest.mark.parametrize("what", LOSSES)
def test_losses_made_inside_that_mix(what: str) -> None:
    for samples in SIZES:
        model = AsLoss(LOSSES[what]).double()
        nn.init.zeros_(model.first.bias)  # or all samples may choose one expert
        nn.init.zeros_(model.last.bias)
        check_refused(model, *[(data(samples),)] * 2)


def test_a_loss_made_inside_as_a_mean() -> None:
    """Over the samples, or over valid tokens, whose number belongs to the whole batch."""
    for samples in SIZES:
        check_right(AsLoss(lambda z: z.square().sum(1).mean()).double(), *[(data(samples),)] * 2)

    def over_valid(z: Tensor, mask: Tensor) -> Tensor:
        return (z.square().sum(-1) * mask).sum() / mask.sum()

    for samples in SIZES:
        model, x = AsLoss(over_valid).double(), data(samples, 5, 3)
        for _ in range(2):
            mask = (torch.rand(samples, 5) < 0.7).double()
            mask[:, 0] = 1
            with autograd_hacks.add_hooks(model):
                model.zero_grad()
                model(x, mask).backward()
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    share = samples / mask.sum()
                    own = [(squares_of(model, x[n : n + 1]) * mask[n]).sum() * share for n in range(samples)]
                    rows = [torch.autograd.grad(loss, model.first.weight)[0] for loss in own]
                torch.testing.assert_close(model.first.weight.grad1, torch.stack(rows))


def squares_of(model: Between, x: Tensor) -> Tensor:
    return model.last(model.first(x).tanh()).square().sum(-1)[0]


# Gates that are zero at first


class Gated(Between):
    def __init__(self, how: How, gate: nn.Parameter | nn.Module) -> None:
        super().__init__(how)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        inner = self.how(h)
        return self.last(h + (self.gate(inner) if isinstance(self.gate, nn.Module) else self.gate * inner))


class Modulated(Between):
    """adaLN-zero: gate, scale and shift come from the input, by a layer that is zero."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.ada = zeroed(nn.Linear(3, 9))

    def forward(self, x: Tensor) -> Tensor:
        h, (shift, slope, gate) = self.first(x).tanh(), self.ada(x).chunk(3, 1)
        return self.last(h + gate * (self.how(h) * (1 + slope) + shift))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2, bias=False), zeroed(nn.Linear(2, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def zeroed(layer: nn.Module) -> nn.Module:
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


GATES: dict[str, Callable[[How], nn.Module]] = {
    "one number": lambda how: Gated(how, nn.Parameter(torch.zeros(()))),
    "by channel": lambda how: Gated(how, nn.Parameter(torch.zeros(3))),
    "a layer": lambda how: Gated(how, zeroed(nn.Linear(3, 3))),
    "LoRA": lambda how: Gated(how, LoRA()),
    "a norm": lambda how: Gated(how, zeroed(nn.LayerNorm(3))),
    "adaLN": Modulated,
}


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_zero_hide_no_mixing(gate: str) -> None:
    for samples in SIZES:
        for what in ("swapped halves", "attention", "detached"):
            check_refused(GATES[gate](MIXING[what]).double(), *[(data(samples),)] * 2)
        check_right(GATES[gate](torch.sin).double(), *[(data(samples),)] * 2)


# Clean programs, in every dtype


DTYPES = (torch.double, torch.float, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("what", ["pairs", "attention", "detached", "a gate of 1e-2", "norm"])
def test_samples_that_mix_in_lower_precision(what: str, dtype: torch.dtype) -> None:
    for place in (Between, AtEnd):
        for samples in SIZES:
            model, x = place(MIXING[what]), data(samples)
            check_refused(model.to(dtype), *[(x.to(dtype),)] * 2)
            if dtype != torch.float:
                auto = torch.autocast("cpu", dtype)
                check_refused(place(MIXING[what]), *[(x.float(),)] * 2, context=auto)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clean_models_in_every_precision(dtype: torch.dtype) -> None:
    """Their rows are those in double precision, but for what the precision rounds."""
    models = [
        nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)),
        nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 8, 1), nn.GroupNorm(1, 8), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)),
        nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(3, 3), nn.Tanh())]),
    ]
    for model in models:
        exact = copy.deepcopy(model).double()
        for under_autocast in (False, True) if dtype in DTYPES[2:] else (False,):
            model = model.to(torch.float if under_autocast else dtype)
            exact.load_state_dict(model.state_dict())
            with autograd_hacks.add_hooks(model):
                for samples in SIZES:
                    x = data(samples).to(dtype)
                    model.zero_grad()
                    with torch.autocast("cpu", dtype, enabled=under_autocast):
                        out = model(x.float() if under_autocast else x)
                    losses_of(out).mean().backward()
                    autograd_hacks.compute_grad1(model)
                    for (name, p), rows in zip(model.named_parameters(), alone(exact, (x.double(),)).values()):
                        apart = (p.grad1.double() - rows).norm() / (1e-2 + rows.norm())
                        assert apart < min(1e3 * torch.finfo(dtype).eps, 0.3), (name, samples, float(apart))


class Clean(nn.Module):
    """A forward of a few layers, given from outside."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.how, self.a, self.b = forward, nn.Linear(3, 4), nn.Linear(4, 2)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.how(self, *args)


def by_codes(model: Clean, x: Tensor) -> Tensor:
    return model.b(model.emb(x[:, 0].long()) * x[:, 1:2])


def packed(model: Clean, x: Tensor, lengths: Tensor) -> Tensor:
    inside = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
    return model.b(model.rnn(inside)[1][-1])


def experts(model: Clean, x: Tensor) -> Tensor:
    h = model.a(x).tanh()
    chosen, out = (h[:, 0] > 0).long(), h.new_zeros(len(x), 2)
    for n, expert in enumerate((model.b, model.c)):
        rows = (chosen == n).nonzero()[:, 0]
        out = out.index_add(0, rows, expert(h[rows]))
    return out


def routed_losses(model: Clean, x: Tensor) -> Tensor:
    return experts(model, x.flatten(0, 1)).square().sum(1).unflatten(0, x.shape[:2]).mean(1)


def probabilities(model: Clean, x: Tensor, p: Tensor) -> Tensor:
    wanted = torch.distributions.Categorical(p, validate_args=True)
    return torch.distributions.kl_divergence(wanted, torch.distributions.Categorical(logits=model.b(model.a(x))))


def likelihood(model: Clean, x: Tensor, y: Tensor) -> Tensor:
    shape = model.b(model.a(x)).exp()
    return -torch.distributions.Beta(shape[:, 0], shape[:, 1], validate_args=True).log_prob(y)


def clamped(model: Clean, x: Tensor) -> Tensor:
    h = model.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: -2 * g)
    return model.b(h.tanh())


def keeps(model: Clean, x: Tensor) -> Tensor:
    """Attributes that are used inside, in places that no layout tells."""
    model.features = model.a(x).tanh().permute(1, 2, 0).reshape(-1, 2 * len(x))
    model.logged = model.features.mean()
    return model.b(model.features.reshape(x.shape[1], 4, len(x)).permute(2, 0, 1))


CLEAN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "codes as floats": (
        lambda: Clean(by_codes, emb=nn.Embedding(5, 4)),
        lambda n: (torch.cat([torch.randint(5, (n, 1)).double(), data(n, 2)], 1),),
    ),
    "targets of BCE": (
        lambda: Clean(lambda m, x, y: F.binary_cross_entropy(m.b(m.a(x)).sigmoid(), y, reduction="none").sum(1)),
        lambda n: (data(n), torch.rand(n, 2).double()),
    ),
    "probabilities": (lambda: Clean(probabilities), lambda n: (data(n), data(n, 2).softmax(1))),
    "a validated distribution": (lambda: Clean(likelihood), lambda n: (data(n), 0.1 + 0.8 * torch.rand(n).double())),
    "sorted lengths": (
        lambda: Clean(packed, rnn=nn.GRU(3, 4, batch_first=True)),
        lambda n: (data(n, 6, 3), torch.randint(1, 7, (n,)).sort(descending=True).values),
    ),
    "key padding": (
        lambda: Clean(
            lambda m, x, k: m.b(m.att(m.a(x), m.a(x), m.a(x), key_padding_mask=k)[0]),
            att=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        lambda n: (data(n, n, 3), torch.arange(n)[None] > torch.randint(1, n + 1, (n, 1))),
    ),
    "hooks on gradients": (lambda: Clean(clamped), lambda n: (data(n),)),
    "experts": (lambda: Clean(experts, c=nn.Linear(4, 2)), lambda n: (data(n),)),
    "losses of routed tokens": (lambda: Clean(routed_losses, c=nn.Linear(4, 2)), lambda n: (data(n, 5, 3),)),
    "norms": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)), lambda n: (data(n),)),
    "attributes": (lambda: Clean(keeps), lambda n: (data(n, 6, 3),)),
    "labels that count up": (
        lambda: Clean(lambda m, x, y: m.b(m.a(x) + m.emb(y)), emb=nn.Embedding(64, 4)),
        lambda n: (data(n), torch.arange(n)),
    ),
    "square rows": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2)), lambda n: (data(n, 17),)),
    "a zero head": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), zeroed(nn.Linear(4, 2))), lambda n: (data(n),)),
    "dead units": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Threshold(99.0, 0.0), nn.Linear(4, 2)), lambda n: (data(n),)),
}


@pytest.mark.parametrize("what", CLEAN)
def test_clean_programs_are_read(what: str) -> None:
    build, arguments = CLEAN[what]
    model = build().double()
    model(*arguments(3))
    losses = lambda out: out if out.ndim == 1 else squares(out)  # noqa: E731
    check_right(model, *[arguments(samples) for samples in (*SIZES, 2, 1, 5)], losses=losses)


@pytest.mark.parametrize("kind", [torch.bool, torch.double])
def test_attention_masks(kind: torch.dtype) -> None:
    """As many positions as samples, too."""
    for samples, positions in ((4, 4), (4, 5), (3, 3), (8, 8)):
        mask = torch.ones(positions, positions).triu(1).bool()
        mask = mask if kind == torch.bool else torch.zeros(positions, positions).double().masked_fill(mask, -torch.inf)
        model = Clean(
            lambda m, x, mask=mask: m.b(m.att(m.a(x), m.a(x), m.a(x), attn_mask=mask, need_weights=False)[0]),
            att=nn.MultiheadAttention(4, 2, batch_first=True),
        ).double()
        x = data(samples, positions, 3)
        for args in ((x,), (x, mask)):
            with autograd_hacks.add_hooks(model):
                for _ in range(2):
                    model.zero_grad()
                    squares(model(*args)).mean().backward()
                    autograd_hacks.compute_grad1(model)
                    with autograd_hacks.pause_hooks():
                        assert_rows(model, alone(model, (x,)))


def test_dropout_is_no_mixing() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)).double()
    with autograd_hacks.add_hooks(model):
        for samples in SIZES:
            x = data(samples)
            check_losses(model, lambda x=x: squares(model(x)))


class ActNorm(nn.Module):
    """Takes its shift and scale from its first batch, which mixes the samples of that."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
                self.is_set.fill_(True)
        return (x + self.shift) * self.scale


def test_what_mixes_in_its_first_step_alone() -> None:
    for samples in SIZES:
        model = nn.Sequential(nn.Linear(3, 4), ActNorm(), nn.Linear(4, 2)).double()
        with autograd_hacks.add_hooks(model):
            for n in range(5):
                x = data(samples)
                model.zero_grad()
                squares(model(x)).mean().backward()
                if n:
                    autograd_hacks.compute_grad1(model)
                    with autograd_hacks.pause_hooks():
                        assert_rows(model, alone(model, (x,)))
                else:
                    with pytest.raises(PerSampleGradientError):
                        autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("has_axis", [True, False])
def test_learnt_positions_several_at_first_and_one_later(has_axis: bool) -> None:
    def positions(model: Clean, x: Tensor) -> Tensor:
        x = x[:, : model.length]
        at = torch.arange(x.shape[1])
        return model.b(model.a(x) + model.emb(at[None] if has_axis else at))

    for samples in SIZES:
        for lengths in ((5, 1, 3), (1, 5, 1), (samples, 1, samples)):
            model = Clean(positions, emb=nn.Embedding(64, 4)).double()
            with autograd_hacks.add_hooks(model):
                for model.length in lengths:
                    x = data(samples, 33, 3)
                    model.zero_grad()
                    out = model(x)
                    assert out.shape == (samples, model.length, 2)
                    squares(out).mean().backward()
                    autograd_hacks.compute_grad1(model)
                    with autograd_hacks.pause_hooks():
                        assert_rows(model, alone(model, (x,)))


def test_mixing_that_begins_later_is_refused_at_the_next_proof() -> None:
    for begins in (1, 2, 5):
        model = Between(lambda h: h)
        model = model.double()
        with autograd_hacks.add_hooks(model):
            refused = []
            for n in range(17):
                model.how = MIXING["detached"] if n >= begins else torch.sin
                model.zero_grad()
                squares(model(data(8))).mean().backward()
                try:
                    autograd_hacks.compute_grad1(model)
                except PerSampleGradientError:
                    refused.append(n)
        assert refused[-2:] == [15, 16]
        assert refused[0] >= begins


def test_each_signature_is_proven_by_itself() -> None:
    """Training or not, with and without a mask."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with autograd_hacks.add_hooks(model):
        for training in (False, True, False, True):
            model.train(training)
            x = data(8)
            model.zero_grad()
            squares(model(x)).mean().backward()
            if training:
                with pytest.raises(PerSampleGradientError):
                    autograd_hacks.compute_grad1(model)
            else:
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    assert_rows(model, alone(model, (x,)))
