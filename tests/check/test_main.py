"""``python -m autograd_hacks`` says what there is, and tells a model whose rows are right from one whose samples mix."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autograd_hacks
from autograd_hacks.__main__ import main

MODELS = """
import torch
from torch import nn

def good():
    return nn.Linear(3, 2), torch.randn(5, 3)

def two():
    return nn.Bilinear(3, 4, 2), (torch.randn(5, 3), torch.randn(5, 4))

def mixing():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(5, 3)

class Centred(nn.Module):
    def forward(self, h):
        return h - h.mean(0).detach()

def centred():
    return nn.Sequential(nn.Linear(3, 2), Centred(), nn.Linear(2, 2)), torch.randn(5, 3)

def keywords():
    return nn.Bilinear(3, 4, 2), {"input1": torch.randn(5, 3), "input2": torch.randn(5, 4)}

class OfDictionary(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"])

def dictionary():
    return OfDictionary(3, 2), ({"x": torch.randn(5, 3)},)

def missing():
    return OfDictionary(3, 2), ({"y": torch.randn(5, 3)},)

def empty():
    return nn.Linear(3, 2), torch.randn(0, 3)

def fails():
    raise LookupError("boom")

def leaves():
    raise SystemExit(3)

def asks(size):
    return nn.Linear(size, 2), torch.randn(5, size)

def alone():
    return nn.Linear(3, 2)

number = 3

def with_loss():
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)), torch.randn(5, 3), torch.arange(5) % 2
    return model, (x, y), lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="none")

"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_up_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "made_up_models", raising=False)
    return "made_up_models"


def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in (autograd_hacks.__version__, "doctor", "docs", "explain"))


def test_docs_are_built_once_and_opened(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, site = list[str](), tmp_path / "_build" / "html" / "index.html"
    monkeypatch.setattr("autograd_hacks.__main__.folder", lambda: tmp_path)
    monkeypatch.setattr("webbrowser.open", opened.append)
    with pytest.raises(SystemExit):
        main(["docs"])
    (tmp_path / "build.py").write_text(f"import os\nos.makedirs({str(site.parent)!r})\nopen({str(site)!r}, 'w')")
    assert [main(["docs"]) for _ in range(2)] == [0, 0]
    said = capfd.readouterr()
    assert "In a clone, pip install '.[docs]'" in said.err
    assert said.out.split() == [str(site)] * 2
    assert opened == [site.as_uri()] * 2


def test_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "autograd_hacks", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"autograd_hacks {autograd_hacks.__version__}\n"


def test_the_doctor_has_a_model_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert not err
    for word in ("torch ", "Python ", "devices ", "CPU", "opacus", "of 6 parameters equal autograd's"):
        assert word in out
    assert f"{torch.get_num_threads()} threads"[: None if torch.get_num_threads() > 1 else -1] + "\n" in out


@pytest.mark.parametrize(
    ("name", "says"),
    [("empty", ["nothing was checked"]), ("missing", ["KeyError: 'x'"]), ("mixing", ["SamplesMixed", "BatchNorm1d"])],
)
def test_the_doctor_says_what_it_could_not_check_and_where_samples_mix(
    models: str, name: str, says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", f"{models}:{name}"]) == 1
    out = capsys.readouterr().out
    assert all(words in out for words in says)
    assert "autograd's" not in out


def test_the_doctor_finds_samples_that_know_of_each_other(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{models}:centred"]) == 1
    said = capsys.readouterr().out
    assert "of 4 parameters equal autograd's" in said
    assert "samples are not independent. Private training needs" in said
    for name in ("good", "two", "keywords", "dictionary"):
        assert main(["doctor", f"{models}:{name}"]) == 0
        said = capsys.readouterr().out
        assert f"of 2 parameters equal autograd's\n{models}:{name}: samples are independent" in said
        assert ("by analysis" in said) == (name == "dictionary")  # others are one layer, whose rule knows


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (["made_up_models"], "is not the name of a function"),
        ([":good"], "importing ':good' raised ValueError"),
        (["made_up_models:other"], "has no attribute 'other'"),
        (["made_up_models:number"], "'made_up_models:number' is not the name of a function"),
        (["made_up_models:alone"], "returned Linear"),
        (["made_up_models:fails"], "made_up_models:fails() raised LookupError: boom"),
        (["made_up_models:leaves"], "raised SystemExit: 3"),
        (["made_up_models:asks"], "required positional argument: 'size'"),
        (["made_up_models.py:good"], "here made_up_models:good"),
        (["made_up_models.inner:good"], "importing 'made_up_models.inner:good' raised ModuleNotFoundError"),
        (["made_up_models:with_loss"], "returned Sequential, tuple, function"),
    ],
)
def test_the_doctor_names_what_it_was_not_given(
    models: str, told: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *told])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert "expected module:function" in error
