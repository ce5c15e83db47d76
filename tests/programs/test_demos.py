"""The demos do what they say."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import Both

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples"


def printed(name: str, folder: Path, *options: str, without: str = "") -> str:
    """What the example prints.  It has drawn its picture.  without: packages that are not there"""
    script = EXAMPLES / f"{name}.py"
    picture = folder / f"{name}.png"
    has_output = "plt.show()" not in script.read_text("utf-8")
    arguments = [script.name, *(["--output", str(folder)] if has_output else []), *options]
    shown = "" if has_output else f"import matplotlib.pyplot as p; p.show = lambda: p.savefig({str(picture)!r})\n"
    code = (
        f"{shown}import runpy, sys; sys.argv = {arguments!r}; sys.path[:0] = {[str(ROOT), str(EXAMPLES)]!r}\n"
        f"sys.modules.update(dict.fromkeys({without.split()!r}))\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    settings = {**os.environ, "MPLBACKEND": "agg"}
    settings.pop("DEMO_IN_GALLERY", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return done.stdout


def number(pattern: str, out: str) -> float:
    found = re.search(pattern, out)
    assert found, out
    return float(found[1])


def test_the_demo_finds_wrong_labels_and_draws_them(tmp_path: Path) -> None:
    out = printed("wrong_labels", tmp_path, "--epochs", "3", "--batch-size", "100", "--seed", "3")
    found = [int(n) for n in re.findall(r"(\d+) wrong labels", out)]
    assert len(found) == 2
    assert 45 < found[0] <= found[1] <= 90  # by chance 4.5 and 9
    for way in ("one backward per image", "torch.func.vmap(grad)", "autograd_hacks"):
        assert re.search(rf"{re.escape(way)} +\d+\.\d", out)


def test_natural_gradient_gets_further_than_sgd_in_as_many_steps(tmp_path: Path) -> None:
    out = printed("natural_gradient", tmp_path, "--epochs", "2")
    assert number(r"(?m)^natural gradient +(\S+)", out) < number(r"(?m)^SGD with momentum +(\S+)", out) / 2


def test_the_energy_natural_gradient_solves_poissons_equation_as_by_torch_func(tmp_path: Path) -> None:
    out = printed("pinn", tmp_path, "--points", "100", "--steps", "20")
    ours, theirs, adam = (
        number(rf"(?m)^{name} +(\S+)", out) for name in ("energy natural gradient", "the same by torch.func", "Adam")
    )
    assert max(ours, theirs) < min(1e-3, adam / 10)
    assert number(r"furthest from torch.func's (\S+) of", out) < 1e-10


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.stem)
def test_a_picture_is_made_and_finished_in_one_block_which_the_gallery_keeps(script: Path) -> None:
    if script.stem in ("common", "theirs", "private_processes"):  # no pages
        return
    text = script.read_text("utf-8")
    end = "\nsave(figure" if "import save" in text or ", save" in text else "\nplt.show()"
    (block,) = (block for block in text.split("# %%") if end in block)
    assert re.search(r"^figure\b.* = ", block, re.M)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The examples' folder on the path, as where one of them runs."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    yield monkeypatch
    sys.modules.pop("common", None)
    torch.set_num_threads(threads)


def refused(script: str, examples: pytest.MonkeyPatch, *options: str, without: str = "") -> None:
    """That the example ends at once.  without: a package that is not there"""
    for name in [without, *(name for name in sys.modules if name.startswith(f"{without}."))] if without else []:
        examples.setitem(sys.modules, name, None)
    examples.setattr(sys, "argv", [f"{script}.py", *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("name", "package", "extras"),
    [
        *((name, package, "demo") for name in ("wrong_labels", "pinn") for package in ("sklearn", "tqdm", "matplotlib")),
        ("private_digits", "opacus", "demo,opacus"),
        ("who_taught", "transformers", "demo,transformers"),
        ("jacobian_descent", "torchjd", "demo,torchjd"),
        ("uncertainty", "laplace", "demo,laplace"),
    ],
)
def test_an_example_without_its_packages_names_the_extra(
    name: str, package: str, extras: str, examples: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(name, examples, without=package)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"pip install 'autograd-hacks[{extras}]'" in said


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--batch-size", "-1"], ["--seed", "x"], ["--speed"]])
def test_the_demo_refuses_options_that_make_no_sense(
    options: list[str], examples: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused("wrong_labels", examples, *options)
    assert "usage:" in capsys.readouterr().err


def test_the_demo_explains_itself(examples: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    examples.setattr(sys, "argv", ["wrong_labels.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "wrong_labels.py"), run_name="__main__")
    said = capsys.readouterr().out
    for words in ("--output DIR", "--batch-size", "--epochs", "--seed", "own gradient is long"):
        assert words in said


def trained_privately(said: Path) -> None:
    """In each process: those of torchrun abort at times as Python ends, which is torch's doing (pytorch#190489)."""
    train = runpy.run_path(str(EXAMPLES / "private_processes.py"))["train"]
    with said.with_suffix(f".{dist.get_rank()}").open("w") as file, redirect_stdout(file):
        train(10)


def test_private_training_gives_the_same_numbers_however_many_processes(tmp_path: Path, both: Both) -> None:
    command = [sys.executable, str(EXAMPLES / "private_processes.py"), "--steps", "10"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    alone = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=settings, check=False)
    assert alone.returncode == 0, alone.stderr
    assert re.search(r"step  10: \d+ samples, loss \d\.\d+, clipped \d\.\d+, accuracy 0\.\d+", alone.stdout)
    both(trained_privately, tmp_path / "said")  # and 4, by tox -e processes
    assert (tmp_path / "said.0").read_text() == alone.stdout
    assert (tmp_path / "said.1").read_text() == ""
