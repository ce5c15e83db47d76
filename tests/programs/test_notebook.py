"""The notebook runs, and is kept without what it printed."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for path in (ROOT / "docs").rglob("*.ipynb") if not {"gallery", "_build"} & {*path.parts})


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["first_steps.ipynb"]


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


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found: dict[str, Any] = {}
    with matplotlib.rc_context():
        shown = [run(cell["source"], found) for cell in cells_of(NOTEBOOKS[0]) if cell["cell_type"] == "code"]
    plt.close("all")
    assert sum("<table" in html for html in shown) == 4
    assert "removed" in shown[-1]
    printed = capsys.readouterr().out
    assert found["found"] >= 15
    assert f"{found['found']} of the 20" in printed
    assert "normalises with statistics of the batch" in printed
    assert "python -m autograd_hacks explain samples-that-mix" in printed
    assert "torch.Size([64])" in printed


def test_every_way_leads_there() -> None:
    docs = ROOT / "docs"
    assert "first_steps" in (docs / "index.rst").read_text()
    assert ":doc:`first_steps`" in (docs / "want.rst").read_text()
    assert "first_steps.ipynb" in (ROOT / "README.rst").read_text()
