"""The demos do what they say."""

import ast
import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Both, run_script

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PAGES = [script for script in sorted(EXAMPLES.glob("*.py")) if script.stem != "private_processes"]
SIZE = (600, 440)
"""Of each picture, in pixels, as of thumbnails in docs/conf.py."""
PACKAGES = {"sklearn": "scikit-learn", "laplace": "laplace-torch", "torchjd": "'torchjd[quadprog_projector]'"}
"""Modules that are not named like their package."""
BROUGHT = {"torch", "autograd_hacks", "scipy"}
"""What the library needs, or scikit-learn."""


def printed(name: str, folder: Path, *options: str, without: str = "") -> str:
    """What the example prints.  It has drawn its picture.  without: packages that are not there"""
    out, err = run_script(EXAMPLES / f"{name}.py", folder, options, without)
    assert "100%" in err
    assert size_of(folder / f"{name}.png") == SIZE
    return out


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:], "big")


def number(pattern: str, out: str) -> float:
    found = re.search(pattern, out)
    assert found, out
    return float(found[1])


@pytest.mark.slow
def test_the_demo_finds_wrong_labels_and_draws_them(tmp_path: Path) -> None:
    out = printed("wrong_labels", tmp_path, "--epochs", "3", "--batch-size", "100", "--seed", "3")
    found = [int(n) for n in re.findall(r"(\d+) wrong labels", out)]
    assert len(found) == 2
    assert 45 < found[0] <= found[1] <= 90  # by chance 4.5 and 9
    assert f"no display: the picture is in {tmp_path / 'wrong_labels.png'}" in out
    assert number(r"off from autograd's by at most (\S+) of", out) < 1e-5


@pytest.mark.slow
def test_natural_gradient_gets_further_than_sgd_in_as_many_steps(tmp_path: Path) -> None:
    out = printed("natural_gradient", tmp_path, "--epochs", "2")
    assert number(r"off from the matrix's by at most (\S+) of", out) < 1e-4
    assert number(r"(?m)^natural gradient +(\S+)", out) < number(r"(?m)^SGD with momentum +(\S+)", out) / 2


@pytest.mark.slow
def test_the_energy_natural_gradient_solves_poissons_equation_as_by_torch_func(tmp_path: Path) -> None:
    out = printed("pinn", tmp_path, "--points", "100", "--steps", "20")
    ours, theirs, adam = (
        number(rf"(?m)^{name} +(\S+)", out) for name in ("energy natural gradient", "the same by torch.func", "Adam")
    )
    assert max(ours, theirs) < min(1e-3, adam / 10)
    assert number(r"furthest from torch.func's (\S+) of", out) < 1e-10


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_a_script_stands_alone(script: Path) -> None:
    """It can be copied and run: it imports no neighbour, has no marks for linters, and says what to install."""
    text = script.read_text("utf-8")
    assert not re.search(r"# (fmt|isort|noqa|type|ruff|mypy):", text)
    needed = {
        module.split(".")[0]
        for node in ast.parse(text).body
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else names_in(node))
        if module
    }
    assert not needed & {path.stem for path in EXAMPLES.glob("*.py")}
    others = {PACKAGES.get(name, name) for name in needed - BROUGHT - sys.stdlib_module_names}
    said = re.search(rf"^    pip install (.*)\n    python {script.name}$", text, re.M)
    if script in PAGES:
        assert said
        assert others <= {*said[1].split()}


def names_in(node: ast.stmt) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def trained_privately(said: Path) -> None:
    """In each process: those of torchrun abort at times as Python ends, which is torch's doing (pytorch#190489)."""
    train = runpy.run_path(str(EXAMPLES / "private_processes.py"))["train"]
    with said.with_suffix(f".{dist.get_rank()}").open("w") as file, redirect_stdout(file):
        train(10)


@pytest.mark.slow
def test_private_training_gives_the_same_numbers_however_many_processes(tmp_path: Path, both: Both) -> None:
    alone, _ = run_script(EXAMPLES / "private_processes.py", tmp_path, ["--steps", "10"])
    assert re.search(r"step  10: \d+ samples, loss \d\.\d+, clipped \d\.\d+, accuracy 0\.\d+", alone)
    both(trained_privately, tmp_path / "said")  # and 4, by tox -e processes
    assert (tmp_path / "said.0").read_text() == alone
    assert (tmp_path / "said.1").read_text() == ""


# The notebooks run, and are kept without what they printed


NOTEBOOKS = sorted(path for path in (ROOT / "docs").rglob("*.ipynb") if not {"gallery", "_build"} & {*path.parts})


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


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
    assert sum("<pre" in html for html in shown) == 5
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
