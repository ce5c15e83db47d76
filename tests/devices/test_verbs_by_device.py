"""Every public name that takes tensors, on each device and on the pretend accelerator, beside what it says on the CPU."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from by_device import losses, rows_of
from packed import Packed
from packed import batch as packed_batch
from packed import losses as losses_of_documents
from pretend import Far, near, placed, pretending
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import PerSampleGrads

PLACES = ["cpu", "pretend", *(["cuda"] if torch.cuda.is_available() else [])]
SAMPLES = 6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def back(model: nn.Module, x: Tensor) -> PerSampleGrads:
    losses(model(x)).mean().backward()
    return autograd_hacks.per_sample_grads(model)


def along(model: nn.Module, like: Tensor) -> dict[str, Tensor]:
    """A direction with numbers of all sizes."""
    return {
        name: torch.linspace(-1, 1, p.numel(), dtype=p.dtype, device=like.device).view(p.shape)
        for name, p in model.named_parameters()
    }


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def read(verb: Callable[[PerSampleGrads], Any]) -> Callable[..., Any]:
    return lambda model, x, path: verb(back(model, x))


def directed(verb: Callable[[PerSampleGrads, dict[str, Tensor]], Any]) -> Callable[..., Any]:
    return lambda model, x, path: verb(back(model, x), along(model, x))


def by_adam(model: nn.Module, x: Tensor, path: Path) -> Any:
    adam = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        adam.zero_grad()
        grads = back(model, x)
        adam.step()
    metric = autograd_hacks.Metric.from_optimizer(adam)
    adam.zero_grad()
    grads = back(model, x).preconditioned(metric)
    return grads.norms(), grads.gram()


def by_curvature(kind: str, model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backprop_hess(model(x), "CrossEntropy")
    autograd_hacks.compute_hess(model, kind=kind)
    make = autograd_hacks.Metric.from_kfac if kind == "kfac" else autograd_hacks.Metric.from_ekfac
    metric = make(model, 0.1)
    autograd_hacks.clear_backprops(model)
    return back(model, x).preconditioned(metric).norms()


def low_rank(model: nn.Module, x: Tensor, path: Path) -> Any:
    return back(model, x).preconditioned(autograd_hacks.Metric.low_rank(model, 2)).norms()


def hess_over(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.compute_hess_over(model, [(x[:4],), (x[4:],)], "diag", "CrossEntropy")
    return {name: p.hess_diag for name, p in model.named_parameters()}


def ekfac(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backprop_hess(model(x), "CrossEntropy")
    autograd_hacks.compute_hess(model, kind="ekfac")
    autograd_hacks.clear_backprops(model)
    return autograd_hacks.ekfac_solve(model, along(model, x), 0.1)


def stored(model: nn.Module, x: Tensor, path: Path) -> Any:
    def verb(grads: PerSampleGrads) -> Tensor:
        return grads.project(8)

    autograd_hacks.over(model, [x[:4], x[4:]], lambda net, own: losses(net(own)), verb, out=path / "rows.npy")
    scores, _ = autograd_hacks.Store(path / "rows.npy").search(back(model, x).project(8)[:2], 3)
    return scores


def checked(model: nn.Module, x: Tensor, path: Path) -> Any:
    back(model, x)
    autograd_hacks.compute_grad1(model)
    rows = {name: p.grad1 for name, p in model.named_parameters()}
    report = autograd_hacks.check_rows(model, (x,), lambda net, own: losses(net(own)), rows, coverage=1.0)
    return torch.tensor(report.share)


def private(noise: Any, clip: Any, model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backward(losses(model(x)))
    done = autograd_hacks.clip_and_noise_(model, 0.5, 1.0, SAMPLES, noise=noise(), clip=clip())
    assert isinstance(done, autograd_hacks.PrivateStep)
    return grads_of(model)


def secure(model: nn.Module, x: Tensor, path: Path) -> Any:
    """Whose numbers are others each time: sizes alone."""
    found = private(autograd_hacks.SecureNoise, lambda: "flat", model, x, path)
    return {name: torch.zeros(g.shape) * near(g).cpu().isfinite() for name, g in found.items()}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def arrived(model: nn.Module, x: Tensor, path: Path) -> Any:
    weights = torch.linspace(0, 1, SAMPLES, dtype=x.dtype, device=x.device)
    with autograd_hacks.during_backward(model, dot=along(model, x), weights=weights) as found:
        losses(model(x)).mean().backward()
    return found.dot, grads_of(model)


def streamed(model: nn.Module, x: Tensor, path: Path) -> Any:
    with autograd_hacks.during_backward(model, "norms", "gram") as found:
        losses(model(x)).mean().backward()
    return found.norms, found.gram


def differentiated(model: nn.Module, x: Tensor, path: Path) -> Any:
    """A gradient penalty: a loss with a derivative in it."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(losses(model(x)).sum(), x, create_graph=True)
    slope.square().sum(1).mean().backward()
    return autograd_hacks.per_sample_grads(model).norms()


def through_rows(model: nn.Module, x: Tensor, path: Path) -> Any:
    """Rows that are differentiated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that .grad and the graph hold each other
        losses(model(x)).mean().backward(create_graph=True)
    total = autograd_hacks.per_sample_grads(model).norms().sum()
    found = torch.autograd.grad(total, list(model.parameters()))
    model.zero_grad()
    return found


def privately_trained(model: nn.Module, x: Tensor, path: Path) -> Any:
    private = autograd_hacks.PrivateTraining(max_norm=0.5, noise_multiplier=1.1, expected_batch_size=6, delta=1e-3, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, foreach=False)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=seeded(), dtype=torch.float64))
    with private.attach(model, optimizer):
        for (own,) in private.loader(data):
            private.backward(losses(model(own.to(x.device))))
            if private.step() is not None:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def scales(model: nn.Module, x: Tensor, path: Path) -> Any:
    kept = autograd_hacks.NoiseScales(0.9)
    for _ in range(2):
        model.zero_grad()
        kept.update(back(model, x))
    return torch.stack(kept.noise_scale())  # the ratio may be infinite, which compares nothing


def accumulated(model: nn.Module, x: Tensor, path: Path) -> Any:
    with autograd_hacks.accumulate(model):
        for part in x.split(4):
            losses(model(part)).mean().backward()
    return autograd_hacks.per_sample_grads(model).gram()


def rows(model: nn.Module, x: Tensor, path: Path) -> Any:
    back(model, x)
    autograd_hacks.compute_grad1(model)
    return {name: p.grad1 for name, p in model.named_parameters()}


def clipped(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backward(losses(model(x)))
    return autograd_hacks.clip_grad1_norm_(model, 0.1), grads_of(model)


def jacobian(model: nn.Module, x: Tensor, path: Path) -> Any:
    return autograd_hacks.per_sample_jacobian(model, model(x)).norms()


def hess(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backprop_hess(model(x), "CrossEntropy")
    autograd_hacks.compute_hess(model)
    return {name: p.hess for name, p in model.named_parameters()}


def over(model: nn.Module, x: Tensor, path: Path) -> Any:
    return autograd_hacks.over(model, [x[:4], x[4:]], lambda net, own: losses(net(own)), lambda grads: grads.norms())


def verified(model: nn.Module, x: Tensor, path: Path) -> Any:
    back(model, x)
    autograd_hacks.verify(model, samples=2)
    return torch.zeros(())


def described(model: nn.Module, x: Tensor, path: Path) -> Any:
    back(model, x)
    return torch.tensor(len(str(autograd_hacks.describe(model)).splitlines()))


VERBS: dict[str, Callable[[nn.Module, Tensor, Path], Any]] = {
    "compute_grad1": rows,
    "norms": read(lambda g: (g.norms(), g.norms(per_parameter=True))),
    "dot": directed(lambda g, v: g.dot(v)),
    "gram": read(lambda g: (g.gram(), g.gram(per_parameter=True))),
    "weighted_sum": read(lambda g: g.weighted_sum(g.norms())),
    "cosine": directed(lambda g, v: g.cosine(v)),
    "second_moment": read(lambda g: (g.second_moment(), g.variance(), g.snr())),
    "noise_scale": read(lambda g: torch.stack(g.noise_scale())),
    "project": read(lambda g: (g.project(5), g.project(5, per_parameter=True))),
    "sjlt": read(lambda g: g.project(16, kind="sjlt", entries=2)),
    "reduce": read(lambda g: g.reduce(torch.tanh)),
    "select and group": read(lambda g: (g.select(slice(2)).norms(), g.scaled(g.norms()).norms())),
    "low_rank": read(lambda g: torch.cat([x.flatten() for x in near_leaves(g.low_rank(5))]).isfinite()),
    "fisher": directed(lambda g, v: (g.fisher_matvec(v), g.natural_gradient(v, damping=0.1))),
    "Metric.from_optimizer": by_adam,
    "Metric.from_kfac": partial(by_curvature, "kfac"),
    "Metric.from_ekfac": partial(by_curvature, "ekfac"),
    "Metric.low_rank": low_rank,
    "NoiseScales": scales,
    "Store": stored,
    "check_rows": checked,
    "clip_grad1_norm_": clipped,
    "clip_and_noise_": partial(private, seeded, lambda: "flat"),
    "QuantileClip": partial(private, seeded, lambda: autograd_hacks.QuantileClip(0.5, 0.3, deviation=2.0)),
    "BandedNoise": partial(private, lambda: autograd_hacks.BandedNoise(4, 2, generator=seeded()), lambda: "flat"),
    "SecureNoise": secure,
    "PrivateTraining": privately_trained,
    "during_backward": arrived,
    "streaming": streamed,
    "accumulate": accumulated,
    "create_graph": differentiated,
    "differentiated rows": through_rows,
    "per_sample_jacobian": jacobian,
    "compute_hess": hess,
    "compute_hess_over": hess_over,
    "ekfac_solve": ekfac,
    "over": over,
    "verify": verified,
    "describe": described,
}


def near_leaves(x: Any) -> Iterator[Tensor]:
    """The tensors in anything, as tensors of the CPU."""
    if isinstance(x, Tensor):
        yield near(x.detach()).cpu()
    elif isinstance(x, Mapping):
        for part in x.values():
            yield from near_leaves(part)
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from near_leaves(part)


@contextmanager
def at(place: str, model: nn.Module, *batch: Tensor) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """The model and a batch on a device."""
    if place != "pretend":
        yield model.to(place), [x.to(place) for x in batch]
        return
    with pretending():
        yield placed(model), [Far(x) for x in batch]


def said(verb: Callable[..., Any], place: str, path: Path) -> list[Tensor]:
    path.mkdir()
    with at(place, net(), batch()) as (model, (x,)):
        if verb is privately_trained:  # which hooks the model itself
            return list(near_leaves(verb(model, x, path)))
        with autograd_hacks.add_hooks(model):
            found = verb(model, x, path)
    return list(near_leaves(found))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_says_the_same(name: str, place: str, tmp_path: Path) -> None:
    expected, found = (said(VERBS[name], where, tmp_path / str(n)) for n, where in enumerate(["cpu", place]))
    assert expected
    assert_close(found, expected, check_dtype=False)


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_the_table_are_those_of_plain_passes(place: str, tmp_path: Path) -> None:
    right = list(near_leaves(rows_of(net(), batch())))
    assert_close(said(rows, place, tmp_path / "own"), right)


@pytest.mark.parametrize("place", PLACES)
def test_documents_packed_into_samples(place: str) -> None:
    torch.manual_seed(0)
    given = packed_batch(2, [3, 2, 4])
    found = []
    for where in ("cpu", place):
        torch.manual_seed(1)
        with at(where, Packed(), *given) as (model, own), autograd_hacks.add_hooks(model, segments="position_ids"):
            losses_of_documents(model, *own).sum().backward()
            found.append(list(near_leaves(autograd_hacks.per_sample_grads(model, "sum").norms())))
    assert_close(*found)


def test_every_public_name_is_in_some_test_by_device() -> None:
    """A name that comes has to be taken up here."""
    files = [*Path(__file__).parent.glob("*.py")]
    used = "\n".join(file.read_text() for file in files)
    missing = {name for name in autograd_hacks.__all__ if f"autograd_hacks.{name}" not in used}
    assert missing == NOT_BY_DEVICE


NOT_BY_DEVICE = {
    "PerSampleGrads", "disable_hooks", "enable_hooks", "is_supported", "register_operation", "register_rule", "remove_hooks",
}  # fmt: skip
"""Names that take no tensors; `PerSampleGrads` is what per_sample_grads returns."""
