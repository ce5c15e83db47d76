"""The gallery's recipes of attribution say what their papers do, by rows of torch.func and by training again."""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_demos import EXAMPLES, number, printed
from test_gallery_a import table
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import Metric

D, E, RATE = 90, 4, 0.3
Rows = dict[str, Tensor]


@pytest.fixture(scope="module")
def recipes() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import recipes

        yield recipes
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("recipes", None)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(D + E, 4, dtype=torch.float64), torch.randint(4, (D + E,))


@pytest.fixture
def model(data: tuple[Tensor, Tensor]) -> nn.Module:
    """Of 49 parameters, fewer than there are samples, trained by some steps of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    step(model, torch.optim.Adam(model.parameters(), lr=0.05), data, 4)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0][:D]), data[1][:D]).backward()
        optimizer.step()


def loss_of(output: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(output, label)


def odds_of(output: Tensor, label: Tensor) -> Tensor:
    p = output.softmax(0).gather(0, label[None])[0]
    return torch.log(p / (1 - p))


def rows_of(model: nn.Module, data: tuple[Tensor, Tensor], of: Callable[[Tensor, Tensor], Tensor] = loss_of) -> Rows:
    """{name: D + E, numbers of the parameter}, by torch.func."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def value(weights: Rows, x: Tensor, y: Tensor) -> Tensor:
        return of(functional_call(model, weights, x[None])[0], y)

    return {name: x.flatten(1) for name, x in vmap(grad(value), (None, 0, 0))(weights, *data).items()}


def joined(rows: Rows) -> Tensor:
    return torch.cat(list(rows.values()), 1)


def parts(data: tuple[Tensor, Tensor]) -> tuple[list[Any], list[Any]]:
    """Training samples in two batches, and the others."""
    x, y = data
    return [(x[:50], y[:50]), (x[50:D], y[50:D])], [(x[D:], y[D:])]


def map_of(model: nn.Module, x: Tensor, **how: Any) -> Any:
    """The map of ``grads.project(**how)``, (49, dim) or {name: numbers, K}, from what it makes of rows that span all."""
    torch.manual_seed(2)
    by = torch.randn(len(x), 4, dtype=x.dtype)

    def mixed(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * by).sum(1)

    rows = autograd_hacks.over(model, [x], mixed, lambda grads: {n: g.flatten(1) for n, g in grads.dense().items()})
    images = autograd_hacks.over(model, [x], mixed, lambda grads: grads.project(**how))
    if isinstance(images, Tensor):
        return linear_map(joined(rows), images)
    return {name: linear_map(rows[name], image.flatten(1)) for name, image in images.items()}


def linear_map(rows: Tensor, images: Tensor) -> Tensor:
    assert torch.linalg.matrix_rank(rows) == rows.shape[1]
    return torch.linalg.lstsq(rows, images).solution


@pytest.fixture
def hooked(model: nn.Module) -> nn.Module:
    autograd_hacks.add_hooks(model)
    return model


def test_dots_cosines_and_tracin(hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    rows = joined(rows_of(hooked, data))
    train, others = parts(data)
    assert_close(recipes.dots(hooked, train, others), rows[:D] @ rows[D:].mT)
    units = F.normalize(rows)
    assert_close(recipes.cosines(hooked, train, others), units[:D] @ units[D:].mT)
    before = copy.deepcopy(hooked.state_dict())
    step(hooked, torch.optim.SGD(hooked.parameters(), lr=0.5), data, 2)
    then = joined(rows_of(hooked, data))
    found = recipes.tracin(hooked, train, others, [(before, 0.1), (copy.deepcopy(hooked.state_dict()), 0.5)])
    assert_close(found, 0.1 * rows[:D] @ rows[D:].mT + 0.5 * then[:D] @ then[D:].mT)


def test_ekfac_is_the_inverse_of_its_factors(hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    train, others = parts(data)
    found, expected = recipes.ekfac(hooked, train, others), torch.zeros(D, E, dtype=torch.float64)
    for name, rows in rows_of(hooked, data).items():
        factors: Any = vars(hooked.get_parameter(name))["ekfac"]
        vectors = torch.kron(factors.b, factors.a)
        matrix = vectors @ torch.diag(factors.values.flatten()) @ vectors.mT
        damped = matrix + 0.1 * factors.values.mean() * torch.eye(len(matrix), dtype=torch.float64)
        expected += rows[:D] @ torch.linalg.solve(damped, rows[D:].mT)
    assert_close(found, expected)


@pytest.mark.parametrize("rank", [3, 8])  # 8: all of each side
def test_logra(rank: int, hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    train, others = parts(data)
    maps, expected = map_of(hooked, data[0], rank=rank, per_parameter=True), torch.zeros(D, E, dtype=torch.float64)
    for name, rows in rows_of(hooked, data).items():
        low = rows if rank == 8 else rows @ maps[name]
        hessian = torch.stack([torch.outer(g, g) for g in low[:D]]).mean(0)
        eigenvalues = torch.linalg.eigvalsh(hessian)
        damped = hessian + 0.1 * eigenvalues.mean() * torch.eye(len(hessian), dtype=torch.float64)
        expected += low[:D] @ torch.linalg.solve(damped, low[D:].mT)
    assert_close(recipes.logra(hooked, train, others, rank=rank, damping=0.1), expected)


def adams(optimizer: torch.optim.Optimizer, model: nn.Module, eps: float = 1e-8, beta: float = 0.999) -> Rows:
    """1 / (√v̂ + eps), of each number, from the moments in the optimizer's state."""
    found = {}
    for name, p in model.named_parameters():
        unbiased = optimizer.state[p]["exp_avg_sq"] / (1 - beta ** float(optimizer.state[p]["step"]))
        found[name] = 1 / (unbiased.sqrt() + eps).flatten()
    return found


def test_less_over_two_checkpoints(hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    train, others = parts(data)
    optimizer = torch.optim.Adam(hooked.parameters(), lr=0.05)
    visited, expected = [], torch.zeros(D, E, dtype=torch.float64)
    for rate in (0.05, 0.02):
        step(hooked, optimizer, data, 3)
        visited.append((copy.deepcopy(hooked.state_dict()), Metric.from_optimizer(optimizer), rate))
        rows, scale = rows_of(hooked, data), adams(optimizer, hooked)
        by = map_of(hooked, data[0], dim=7)
        adam = F.normalize(joined({name: x * scale[name] for name, x in rows.items()})[:D] @ by)
        expected += rate * adam @ F.normalize(joined(rows)[D:] @ by).mT
    assert_close(recipes.less(hooked, train, others, visited, dim=7), expected)


@pytest.mark.parametrize("rank", [2, 8])
def test_trackstar(rank: int, hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    train, others = parts(data)
    optimizer = torch.optim.Adam(hooked.parameters(), lr=0.05)
    step(hooked, optimizer, data, 3)
    metric, scale, features = Metric.from_optimizer(optimizer), adams(optimizer, hooked), []
    maps = map_of(hooked, data[0], rank=rank, per_parameter=True)
    for name, rows in rows_of(hooked, data).items():
        by = torch.eye(rows.shape[1], dtype=torch.float64) if rank == 8 else maps[name]
        low, eye = (rows * scale[name]) @ by, torch.eye(by.shape[1], dtype=torch.float64)
        moments = [part.mT @ part / len(part) for part in (low[:D], low[D:])]
        of_train, of_others = (m + 0.1 * torch.linalg.eigvalsh(m).mean() * eye for m in moments)
        mixed = 0.7 * of_train + 0.3 * of_others
        # M^-½ by Denman and Beavers' iteration.
        y, z = mixed, eye
        for _ in range(40):
            y, z = (y + torch.linalg.inv(z)) / 2, (z + torch.linalg.inv(y)) / 2
        features.append(low @ z)
    units = F.normalize(torch.cat(features, 1))
    found = recipes.trackstar(hooked, train, others, metric, rank=rank, mix=0.3, damping=0.1)
    assert_close(found, units[:D] @ units[D:].mT, rtol=1e-6, atol=1e-8)


def test_trak_of_two_models_is_its_formula(hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    train, others = parts(data)
    states = [copy.deepcopy(hooked.state_dict())]
    step(hooked, torch.optim.SGD(hooked.parameters(), lr=0.5), data, 3)
    states.append(copy.deepcopy(hooked.state_dict()))
    products, doubts = [], []
    for seed, state in enumerate(states):
        hooked.load_state_dict(state)
        by = map_of(hooked, data[0], dim=6, seed=seed)
        phi = joined(rows_of(hooked, data, odds_of)) @ by
        products.append(phi[:D] @ torch.linalg.inv(phi[:D].mT @ phi[:D]) @ phi[D:].mT)
        p = hooked(data[0][:D]).detach().softmax(1)[torch.arange(D), data[1][:D]]
        doubts.append(1 - p)
    expected = ((doubts[0] + doubts[1]) / 2)[:, None] * (products[0] + products[1]) / 2
    assert_close(recipes.trak(hooked, train, others, states, dim=6), expected, rtol=1e-6, atol=1e-8)


def test_trak_refuses_more_coordinates_than_samples(
    hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType
) -> None:
    with pytest.raises(ValueError, match="dim=91 for 90 samples"):
        recipes.trak(hooked, *parts(data), [copy.deepcopy(hooked.state_dict())], dim=91)


def test_trak_is_trakers(model: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType, tmp_path: Path) -> None:
    """Its pipeline, with our map in the place of its projector."""
    pytest.importorskip("trak")
    from trak import TRAKer
    from trak.projectors import NoOpProjector

    hooked = copy.deepcopy(model)
    autograd_hacks.add_hooks(hooked)
    by = map_of(hooked, data[0], dim=6).float()
    model, hooked, x = model.float(), hooked.float(), data[0].float()

    class Ours(NoOpProjector):
        def project(self, grads: Any, model_id: int) -> Tensor:
            return super().project(grads, model_id) @ by

    traker = TRAKer(
        model, "image_classification", D, str(tmp_path), device="cpu", use_half_precision=False,
        projector=Ours(len(by), 6, device="cpu"), logging_level=logging.CRITICAL,
    )  # fmt: skip
    traker.load_checkpoint(model.state_dict(), 0)
    traker.featurize([x[:D], data[1][:D]], num_samples=D)
    traker.finalize_features()
    traker.start_scoring_checkpoint("others", model.state_dict(), 0, E)
    traker.score([x[D:], data[1][D:]], num_samples=E)
    theirs = torch.tensor(traker.finalize_scores("others"))
    ours = recipes.trak(hooked, *parts((x, data[1])), [copy.deepcopy(model.state_dict())], dim=6)
    # Theirs are up to a factor for each model, of the inverse's mean.
    assert_close(ours / ours.norm(), theirs / theirs.norm(), rtol=1e-3, atol=1e-5)


def test_margins_stay_finite(recipes: ModuleType) -> None:
    """Where p rounds to 1."""
    logits = torch.tensor([[60.0, 0.0, 1.0], [0.0, 60.0, 1.0]])
    found = recipes.margins(lambda x: x, (logits, torch.tensor([0, 0])))
    assert_close(
        found, torch.tensor([60.0, 0.0]) - torch.stack([torch.tensor([0.0, 1.0]), torch.tensor([60.0, 1.0])]).logsumexp(1)
    )


def in_its_steps(model: nn.Module, x: Tensor, y: Tensor, steps: list[Any], others: slice) -> Tensor:
    """Σ η ⟨g, g′⟩ / B, over the steps that a sample was in."""
    scores = torch.zeros(others.start, others.stop - others.start, dtype=x.dtype)
    for state, batch in steps:
        model.load_state_dict(state)
        rows = joined(rows_of(model, (x, y)))
        scores[batch] += RATE / len(batch) * rows[batch] @ rows[others].mT
    return scores


def test_magic_is_the_slope_of_training_again(recipes: ModuleType) -> None:
    """Of every training sample's weight, by central differences of whole trainings."""
    torch.manual_seed(0)
    x, y = torch.randn(13, 4, dtype=torch.float64), torch.randint(3, (13,))
    count, others = 10, slice(10, 13)
    start = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    chosen = [batch for _ in range(4) for batch in torch.randperm(count).split(4)]

    def trained(w: Tensor) -> tuple[nn.Module, list[Any]]:
        model, steps = copy.deepcopy(start), []
        for batch in chosen:
            steps.append((copy.deepcopy(model.state_dict()), batch))
            loss = (w[batch] * F.cross_entropy(model(x[batch]), y[batch], reduction="none")).mean()
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, slope in zip(model.parameters(), slopes):
                    p -= RATE * slope
        return model, steps

    def losses(w: Tensor) -> Tensor:
        return F.cross_entropy(trained(w)[0](x[others]), y[others], reduction="none").detach()

    ones, change = torch.ones(count, dtype=torch.float64), 1e-5
    model, steps = trained(ones)
    autograd_hacks.add_hooks(model)
    first = recipes.in_run(model, (x[:count], y[:count]), [(x[others], y[others])], steps, RATE)
    assert_close(first, in_its_steps(copy.deepcopy(start), x, y, steps, others))
    found = recipes.magic(model, (x[:count], y[:count]), [(x[others], y[others])], steps, RATE)
    rows = change * torch.eye(count, dtype=torch.float64)
    expected = torch.stack([(losses(ones - row) - losses(ones + row)) / (2 * change) for row in rows])
    assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_recipes_leave_the_weights_as_they_were(hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    train, others = parts(data)
    before = copy.deepcopy(hooked.state_dict())
    other = {name: 2 * x for name, x in before.items()}
    recipes.trak(hooked, train, others, [other], dim=6)
    recipes.less(hooked, train, others, [(other, Metric({"*": None}), 0.1)], dim=6)
    recipes.in_run(hooked, data, others, [(other, torch.arange(5))], RATE)
    recipes.magic(hooked, data, others, [(other, torch.arange(5))], RATE)
    assert_close(hooked.state_dict(), before, rtol=0, atol=0)


def test_duplicates_are_pairs_of_equal_samples(hooked: nn.Module, data: tuple[Tensor, Tensor], recipes: ModuleType) -> None:
    x, y = (torch.cat([part, part[3:5]]) for part in data)
    y[-1] = (y[4] + 1) % 4  # the same, with another label
    pairs = recipes.duplicates(hooked, [(x, y)], above=1 - 1e-9)
    assert pairs.tolist() == [[3, D + E]]
    rows = F.normalize(joined(rows_of(hooked, (x, y))))
    ranked = recipes.duplicates(hooked, [(x, y)], above=0.9, dim=4096)
    exact = (rows @ rows.mT)[ranked[:, 0], ranked[:, 1]]
    assert exact.min() > 0.85
    assert ranked[0].tolist() == [3, D + E]  # the most alike
    assert len(ranked) > 1


def test_scores_say_what_networks_say_that_are_trained_on_subsets(tmp_path: Path) -> None:
    small = ("--images", "150", "--queries", "8", "--subsets", "24", "--epochs", "12", "--retrained", "2", "--models", "2")
    out = printed("attribution", tmp_path, *small)
    rows = table(
        out,
        "gradients' dot",
        "TracIn",
        "in-run Shapley",
        "LESS",
        "TrackStar",
        "TRAK, dim 32",
        "LoGra, rank 8",
        "EK-FAC",
        "MAGIC",
    )
    assert len(rows) == 9
    same = {name: row[2] for name, row in rows.items()}
    assert same.pop("MAGIC") > 0.97 > max(same.values())
    assert min(row[1] for row in rows.values()) > 0.3
    assert "TRAK, dim 256" not in out  # of 150 images
    assert number(r"near-duplicates: (\d+) of 25", out) >= 20
