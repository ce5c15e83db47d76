"""The notebooks run, and are kept without what they printed."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for path in (ROOT / "docs").rglob("*.ipynb") if not {"gallery", "_build"} & {*path.parts})


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def test_there_are_two() -> None:
    assert [path.name for path in NOTEBOOKS] == ["first_steps.ipynb", "tutorial.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path: Path) -> None:
    for cell in cells_of(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], cell["source"]
            assert cell["execution_count"] is None, cell["source"]
        assert not cell["metadata"], cell["source"]


def run(source: str, found: dict[str, Any]) -> str:
    """What a notebook shows of a cell's last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), found)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), found)  # type: ignore[attr-defined]
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


def results_of(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The names that a notebook leaves, and what its code cells show."""
    pytest.importorskip("sklearn")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found: dict[str, Any] = {}
    with matplotlib.rc_context():
        shown = [run(cell["source"], found) for cell in cells_of(path) if cell["cell_type"] == "code"]
    plt.close("all")
    return found, shown


def test_the_first_ten_minutes_run(capsys: pytest.CaptureFixture[str]) -> None:
    found, shown = results_of(NOTEBOOKS[0])
    assert sum("<table" in html for html in shown) == 4
    assert "removed" in shown[-1]
    printed = capsys.readouterr().out
    assert found["found"] >= 15
    assert f"{found['found']} of the 20" in printed
    assert "normalises with statistics of the batch" in printed
    assert "python -m autograd_hacks explain samples-that-mix" in printed
    assert "torch.Size([64])" in printed


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What its words say of the cells' results is true."""
    found, shown = results_of(NOTEBOOKS[1])
    printed = capsys.readouterr().out
    assert found["by_hand"].keys() == found["slow"].keys()
    for name, rows in found["slow"].items():
        torch.testing.assert_close(found["by_hand"][name], rows, rtol=1e-4, atol=1e-6)
    assert not any("False" in html for html in shown if html.startswith("{"))
    assert "ConvolutionBackward0" in "".join(shown)
    assert (bool(found["apart"].all()), bool(found["mixed"].any())) == (True, False)
    assert "samples mix: " in printed
    assert "python -m autograd_hacks explain " in printed
    assert "True True" in printed
    assert found["found"] >= 60
    torch.testing.assert_close(found["by_rows"], found["true"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["small"][2].bias.hess, found["true"], rtol=1e-4, atol=1e-6)
    assert max(found["change"]) <= found["C"] * 1.001
    assert found["place"] > len(found["order"]) - 20


def test_every_way_leads_there() -> None:
    docs = ROOT / "docs"
    assert "first_steps" in (docs / "index.rst").read_text()
    assert ":doc:`first_steps`" in (docs / "want.rst").read_text()
    assert "first_steps.ipynb" in (ROOT / "README.rst").read_text()
    assert "   tutorial\n" in (docs / "index.rst").read_text()
    assert "tutorial.ipynb" in (ROOT / "README.rst").read_text()
