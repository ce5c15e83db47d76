"""Every public name that takes tensors, on each device, on the pretend accelerator, and on the CPU while another device is
the default, beside what it says on the CPU."""

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from by_device import FAMILIES, losses, rows_of
from packed import Packed
from packed import batch as packed_batch
from packed import losses as losses_of_documents
from pretend import Far, near, placed, pretending
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from torch.utils._device import _device_constructors

import autograd_hacks
from autograd_hacks import PerSampleGrads, curvature
from autograd_hacks.attribution import Metric
from autograd_hacks.reading import independence

DEFAULT = "meta by default"
PLACES = ["pretend", DEFAULT, *(["cuda"] if torch.cuda.is_available() else [])]
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


def each(model: nn.Module, x: Tensor) -> Tensor:
    return losses(model(x))


def curved(model: nn.Module, x: Tensor, kind: str = "full") -> None:
    autograd_hacks.backprop_hess(model(x), "CrossEntropy")
    autograd_hacks.compute_hess(model, kind=kind)


def by_adam(model: nn.Module, x: Tensor, path: Path) -> Any:
    adam = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        adam.zero_grad()
        back(model, x)
        adam.step()
    metric = Metric.from_optimizer(adam)
    adam.zero_grad()
    grads = back(model, x).preconditioned(metric)
    return grads.norms(), grads.gram()


def by_curvature(model: nn.Module, x: Tensor, path: Path) -> Any:
    curved(model, x, "ekfac")
    metric = Metric.from_ekfac(model, 0.1)
    autograd_hacks.clear_backprops(model)
    return metric(along(model, x)), back(model, x).preconditioned(metric).norms()


def hess(model: nn.Module, x: Tensor, path: Path) -> Any:
    curved(model, x)
    return {name: p.hess for name, p in model.named_parameters()}


def drawn(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backprop_hess(model(x), "CrossEntropy", 3, seeded())
    autograd_hacks.compute_hess(model)
    return {name: p.hess for name, p in model.named_parameters()}


def stored(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.over(model, [x[:4], x[4:]], each, lambda grads: grads.project(8), out=path / "rows.npy")
    scores, _ = autograd_hacks.attribution.Store(path / "rows.npy").search(back(model, x).project(8)[:2], 3)
    return scores


def rows(model: nn.Module, x: Tensor, path: Path) -> Any:
    back(model, x)
    autograd_hacks.compute_grad1(model)
    return {name: p.grad1 for name, p in model.named_parameters()}


def checked(model: nn.Module, x: Tensor, path: Path) -> Any:
    report = autograd_hacks.check.check_rows(model, (x,), each, rows(model, x, path), coverage=1.0)
    return torch.tensor(report.share, device="cpu")


def private(noise: Any, clip: Any, model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backward(each(model, x))
    done = autograd_hacks.private.clip_and_noise_(model, 0.5, 1.0, SAMPLES, noise=noise(), clip=clip())
    assert isinstance(done, autograd_hacks.private.PrivateStep)
    return grads_of(model)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def arrived(model: nn.Module, x: Tensor, path: Path) -> Any:
    weights = torch.linspace(0, 1, SAMPLES, dtype=torch.float64, device=x.device)
    with autograd_hacks.during_backward(model, dot=along(model, x), weights=weights) as found:
        each(model, x).mean().backward()
    return found.dot, grads_of(model)


def streamed(model: nn.Module, x: Tensor, path: Path) -> Any:
    with autograd_hacks.during_backward(model, "norms", "gram") as found:
        each(model, x).mean().backward()
    return found.norms, found.gram


def differentiated(model: nn.Module, x: Tensor, path: Path) -> Any:
    """A gradient penalty: a loss with a derivative in it."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(each(model, x).sum(), x, create_graph=True)
    slope.square().sum(1).mean().backward()
    return autograd_hacks.per_sample_grads(model).norms()


def privately_trained(model: nn.Module, x: Tensor, path: Path) -> Any:
    """Without noise, of which devices draw other numbers."""
    seed = 2**100 + 3
    private = autograd_hacks.private.PrivateTraining(
        max_norm=0.5, noise_multiplier=0.0, expected_batch_size=6, delta=1e-3, seed=seed
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.3, foreach=False)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=seeded(), dtype=torch.float64, device="cpu"))
    with private.attach(model, optimizer):
        for (own,) in private.loader(data):
            private.backward(each(model, own.to(x.device)))
            if private.step() is not None:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def accumulated(model: nn.Module, x: Tensor, path: Path) -> Any:
    with autograd_hacks.accumulate(model):
        for part in x.split(4):
            each(model, part).mean().backward()
    return autograd_hacks.per_sample_grads(model).gram()


def clipped(model: nn.Module, x: Tensor, path: Path) -> Any:
    autograd_hacks.backward(each(model, x))
    return autograd_hacks.clip_grad1_norm_(model, 0.1), grads_of(model)


VERBS: dict[str, Callable[[nn.Module, Tensor, Path], Any]] = {
    "compute_grad1": rows,
    "norms": read(lambda g: (g.norms(), g.norms(per_parameter=True))),
    "dot": directed(lambda g, v: g.dot(v)),
    "gram": read(lambda g: g.gram()),
    "weighted_sum": read(lambda g: g.weighted_sum(g.norms())),
    "second_moment": directed(lambda g, v: (g.second_moment(), g.second_moment(about=v))),
    "noise_scale": read(lambda g: torch.stack(g.noise_scale())),
    "project": read(lambda g: g.project(5)),
    "sjlt": read(lambda g: g.project(16, kind="sjlt")),
    "reduce": read(lambda g: g.reduce(torch.tanh)),
    "select and group": read(lambda g: (g.select(slice(2)).norms(), g.scaled(g.norms()).norms())),
    "fisher": directed(lambda g, v: (curvature.matvec(g, v), curvature.natural_gradient(g, v, damping=0.1))),
    "scipy": read(lambda g: torch.from_numpy((by := curvature.linear_operator(g)) @ np.ones(by.shape[0])).float()),
    "Metric.from_optimizer": by_adam,
    "Metric.from_ekfac": by_curvature,
    "Metric.low_rank": lambda m, x, path: back(m, x).preconditioned(Metric.low_rank(m, 2)).norms(),
    "Store": stored,
    "check_rows": checked,
    "clip_grad1_norm_": clipped,
    "clip_and_noise_": partial(private, seeded, lambda: "flat"),
    "QuantileClip": partial(private, seeded, lambda: autograd_hacks.private.QuantileClip(0.5, 0.3, deviation=2.0)),
    "PrivateTraining": privately_trained,
    "during_backward": arrived,
    "streaming": streamed,
    "accumulate": accumulated,
    "create_graph": differentiated,
    "per_sample_jacobian": lambda m, x, path: autograd_hacks.per_sample_jacobian(m, m(x)).norms(),
    "compute_hess": hess,
    "over": lambda m, x, path: autograd_hacks.over(m, [x[:4], x[4:]], each, PerSampleGrads.norms),
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
    if place == DEFAULT:
        with torch.device("meta"):
            yield model, list(batch)
        return
    if place != "pretend":
        yield model.to(place), [x.to(place) for x in batch]
        return
    with pretending():
        yield placed(model), [Far(x) for x in batch]


def said(verb: Callable[..., Any], place: str, path: Path, family: str = "") -> list[Tensor]:
    path.mkdir()
    with at(place, *(FAMILIES[family].on("cpu") if family else (net(), batch()))) as (model, (x,)):
        if verb is privately_trained:  # which hooks the model itself
            return list(near_leaves(verb(model, x, path)))
        with autograd_hacks.add_hooks(model):
            found = verb(model, x, path)
    return list(near_leaves(found))


OF_TEXT = (
    "during_backward", "streaming", "accumulate", "fisher", "clip_and_noise_", "per_sample_jacobian", "over",
)  # fmt: skip
"""The verbs with passes of their own, also of a language model: `test_families_by_device` has the others of all families."""


@pytest.mark.parametrize("place", [*(place for place in PLACES if place != DEFAULT), *rarely(DEFAULT)])
@pytest.mark.parametrize(
    ("name", "family"), [*((name, "") for name in VERBS), *((name, "causal language model") for name in OF_TEXT)]
)
def test_a_verb_says_the_same(name: str, family: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independence, "_count", lambda *_: None)  # copies can't run on the pretend accelerator
    if name == "PrivateTraining" and place == DEFAULT:
        pytest.skip("torch's own DataLoader draws its seed on the default device")
    expected, found = (said(VERBS[name], where, tmp_path / where, family) for where in ("cpu", place))
    assert expected
    assert_close(found, expected, check_dtype=False)


@pytest.mark.parametrize("place", ["cpu", *PLACES])
def test_rows_of_the_table_are_those_of_plain_passes(place: str, tmp_path: Path) -> None:
    right = list(near_leaves(rows_of(net(), batch())))
    assert_close(said(rows, place, tmp_path / "own"), right)


def test_curvature_of_drawn_labels_with_another_device_as_the_default(tmp_path: Path) -> None:
    assert_close(*(said(drawn, place, tmp_path / place) for place in ("cpu", DEFAULT)))


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


def made_without_device(text: str) -> list[str]:
    """The calls of torch's that make a tensor where the default device is."""
    names = {function.__name__ for function in _device_constructors()} | {"normal"}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    makers = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in names}]
    return [ast.unparse(call) for call in makers if not any(word.arg == "device" for word in call.keywords)]


def test_every_tensor_says_where_it_is() -> None:
    package = Path(autograd_hacks.__file__).parent
    found = {path.name: calls for path in package.rglob("*.py") if (calls := made_without_device(path.read_text()))}
    assert not found
    assert made_without_device("x = torch.arange(3) + torch.ones(3, device=y.device)") == ["torch.arange(3)"]
