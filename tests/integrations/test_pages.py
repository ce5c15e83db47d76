"""The pages of integrations run as they are written, each behind the lines that the first has."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trained import needed

import autograd_hacks

FOLDER = Path(__file__).parents[2] / "docs" / "integrations"
TOOLS = {
    "opacus": ["opacus"],
    "transformers": ["transformers.trainer", "accelerate"],
    "lightning": ["lightning.pytorch"],
    "accelerate": ["accelerate"],
    "torchjd": ["torchjd.aggregation", "quadprog", "qpsolvers"],
    "laplace": ["laplace"],
    "index": [],
}
"""The pages, and what each needs."""
DOCTESTED = {"recipes"}

pytestmark = pytest.mark.filterwarnings("ignore")


def code_of(page: str, folder: Path = FOLDER) -> list[str]:
    text = (folder / f"{page}.rst").read_text()
    blocks = re.findall(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", text, re.M)
    return [re.sub(r"^   ", "", block, flags=re.M) for block in blocks]


def test_every_page_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.rst")} == TOOLS.keys() | DOCTESTED


@pytest.mark.parametrize("page", TOOLS)
def test_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if TOOLS[page]:
        needed(*TOOLS[page])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    setting, *rest = code_of("index")
    blocks = rest if page == "index" else code_of(page)
    assert blocks
    found: dict[str, object] = {}
    for block in [setting, *blocks]:
        exec(compile(block, f"{page}.rst", "exec"), found)


def test_a_private_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What "I want to ..." has of it needs transformers, which its doctests don't."""
    needed(*TOOLS["transformers"], "opacus")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (block,) = code_of("want", FOLDER.parent)
    found: dict[str, Any] = {}
    exec(compile(block, "want.rst", "exec"), found)
    assert found["private"].steps == 4


def test_balanced_classes() -> None:
    """What it says of TorchJD."""
    needed(*TOOLS["torchjd"])
    from torchjd.aggregation import UPGrad

    from autograd_hacks.integrations.torchjd import jacobian_descent

    model, x, y = nn.Linear(4, 3), torch.randn(32, 4), torch.arange(32) % 3
    autograd_hacks.add_hooks(model)
    autograd_hacks.backward(F.cross_entropy(model(x), y, reduction="none"))
    assert jacobian_descent(model, UPGrad(), autograd_hacks.per_sample_grads(model).group(y)).shape == (3,)
    step = torch.cat([p.grad.flatten() for p in model.parameters()])
    for own in range(3):  # a step down hurts no class
        of_class = torch.autograd.grad(F.cross_entropy(model(x[y == own]), y[y == own]), [*model.parameters()])
        assert step @ torch.cat([g.flatten() for g in of_class]) > -1e-6
