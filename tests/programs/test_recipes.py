"""The gallery's recipes of attribution say what their papers do, by training again."""

import ast
import copy
import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import joined, one_backward_per_sample
from test_demos import EXAMPLES, printed
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.attribution import Metric

RATE = 0.3
Rows = dict[str, Tensor]
SIX = partial(PerSampleGrads.project, dim=6)


PAGES = {
    "trak_scores": ["margins", "trak"],
    "logra": ["damped", "logra"],
    "less": ["less"],
    "trackstar": ["whitening", "trackstar"],
    "magic_replay": ["magic"],
}
"""What the comparison takes from the pages."""


def functions_of(page: str) -> dict[str, str]:
    """The source of a script's functions."""
    text = (EXAMPLES / f"{page}.py").read_text("utf-8")
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in nodes}


@pytest.fixture(scope="module")
def recipes() -> SimpleNamespace:
    """The functions of the pages, without what the scripts do with them; those that the comparison alone has, too."""
    found: dict[str, Any] = {}
    for page, names in {**PAGES, "attribution": ["losses", "in_run", "ekfac"]}.items():
        text = (EXAMPLES / f"{page}.py").read_text("utf-8")
        imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        own = functions_of(page)
        exec("\n".join([*map(ast.unparse, imports), *(own[name] for name in names)]), found)
    return SimpleNamespace(**found)


@pytest.mark.parametrize("page", PAGES)
def test_the_comparison_has_the_functions_of_the_pages(page: str) -> None:
    """Each script can be copied alone, so that some functions stand in two: in the same words."""
    own, compared = functions_of(page), functions_of("attribution")
    for name in PAGES[page]:
        assert compared[name] == own[name]


def in_its_steps(model: nn.Module, x: Tensor, y: Tensor, steps: list[Any], others: slice) -> Tensor:
    """Σ η ⟨g, g′⟩ / B, over the steps that a sample was in."""
    scores = torch.zeros(others.start, others.stop - others.start, dtype=x.dtype)
    for state, batch in steps:
        model.load_state_dict(state)
        rows = joined(one_backward_per_sample(model, partial(F.cross_entropy, reduction="none"), x, y))
        scores[batch] += RATE / len(batch) * rows[batch] @ rows[others].mT
    return scores


def test_magic_is_the_slope_of_training_again(recipes: SimpleNamespace) -> None:
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
    queries, known = [(x[others], y[others])], [(state, (x[own], y[own]), own) for state, own in steps]
    first = recipes.in_run(model, queries, known, recipes.losses, RATE)
    assert_close(first, in_its_steps(copy.deepcopy(start), x, y, steps, others))
    found = recipes.magic(model, queries, known, recipes.losses, RATE)
    rows = change * torch.eye(count, dtype=torch.float64)
    expected = torch.stack([(losses(ones - row) - losses(ones + row)) / (2 * change) for row in rows])
    assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_a_language_model_has_losses_of_its_own(recipes: SimpleNamespace) -> None:
    """Of texts: LoGra of whole gradients is its formula, by a backward pass for each text; and the others run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    texts, asked = torch.randint(7, (60, 5)), torch.randint(7, (3, 5))

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none").mean(1)

    def gradients(batch: Tensor) -> list[Rows]:
        rows = [torch.autograd.grad(losses(model, text[None])[0], list(model.parameters())) for text in batch]
        return [dict(zip(dict(model.named_parameters()), row)) for row in rows]

    both, expected = gradients(torch.cat([texts, asked])), torch.zeros(60, 3, dtype=torch.float64)
    for name in both[0]:
        rows = torch.stack([row[name].flatten() for row in both])
        expected += rows[:60] @ torch.linalg.solve(recipes.damped(rows[:60], 0.1), rows[60:].mT)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    losses(model, texts).mean().backward()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    metric, after = Metric.from_optimizer(optimizer), copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    with autograd_hacks.add_hooks(model):
        assert_close(recipes.logra(model, [texts], [asked], losses, rank=7), expected)
        for scores in (
            recipes.less(model, [texts], [asked], [(after, metric, 0.1)], losses, dim=16),
            recipes.trackstar(model, [texts], [asked], metric, losses),
            recipes.trak(model, [texts], [asked], [after], lambda model, batch: -losses(model, batch), SIX),
            recipes.magic(model, [asked], [(before, texts, torch.arange(60))], losses, 0.1),
        ):
            assert scores.shape == (60, 3)
            assert scores.isfinite().all()


TABLE = EXAMPLES.parent / "integrations" / "attribution.csv"


def test_the_page_has_the_table_that_the_comparison_wrote() -> None:
    page = (TABLE.parent / "recipes.rst").read_text("utf-8")
    assert ".. csv-table::\n   :file: attribution.csv\n" in page
    with TABLE.open() as file:
        assert [row[0] for row in csv.reader(file)][-1] == "MAGIC"


@pytest.mark.slow
def test_the_table_is_what_the_comparison_writes(tmp_path: Path) -> None:
    printed("attribution", tmp_path, "--table", str(tmp_path / "table.csv"))
    with TABLE.open() as kept, (tmp_path / "table.csv").open() as made:
        for old, new in zip(csv.reader(kept), csv.reader(made), strict=True):
            assert old[0] == new[0]
            if old[0] != "Scores":
                assert [float(value) for value in new[1:]] == pytest.approx([float(value) for value in old[1:]], abs=0.03)
