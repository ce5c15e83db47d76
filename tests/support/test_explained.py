"""What ``python -m autograd_hacks explain`` prints, in a clone and from a wheel."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autograd_hacks import errors
from autograd_hacks.__main__ import main
from autograd_hacks.errors import EXPLAINED, see
from autograd_hacks.support import pages

ROOT = Path(__file__).parent.parent.parent
CONSTANTS = {name: text for name, text in vars(errors).items() if name.startswith("ON_")}


@pytest.fixture
def in_a_wheel(tmp_path: Path) -> Path:
    """What setup.py makes the package of."""
    made = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, env={"PATH": "", "PYTHONWARNINGS": "ignore"})
    return tmp_path / "autograd_hacks"


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_message_leads_to_a_section(constant: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = CONSTANTS[constant].split()[-1]
    assert main(["explain", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == EXPLAINED[name][0]
    assert set(lines[1]) <= set("=-~^")
    assert len("".join(lines[2:-1])) > 100
    assert lines[-1] == f"(docs/{EXPLAINED[name][1]} of the sources)"


def test_a_wheel_has_every_section(in_a_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {name: pages.explained(name) for name in EXPLAINED}
    monkeypatch.setattr(pages, "PACKAGE", in_a_wheel)
    assert pages.folder() == in_a_wheel / "pages"
    assert {name: pages.explained(name) for name in EXPLAINED} == here
    assert (in_a_wheel / "pages" / "errors.rst").read_bytes() == (ROOT / "docs" / "errors.rst").read_bytes()


def test_without_pages_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PACKAGE", tmp_path / "autograd_hacks")
    with pytest.raises(FileNotFoundError, match="the pages are missing"):
        pages.explained("samples-that-mix")


def test_a_class_is_a_name_too() -> None:
    assert pages.explained("SamplesMixed") == pages.explained("samples-that-mix")
    assert EXPLAINED["PerSampleGradientError"] == EXPLAINED["nothing-was-recorded"]


def test_alone_it_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert all(
        re.search(rf"^{name} .*{re.escape(title)}", out, re.M) for name, (title, _) in EXPLAINED.items() if name.islower()
    )
    assert re.search(r"^samples-that-mix +Samples that mix +SamplesMixed", out, re.M)


def test_close_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "samples-mix"])
    assert stopped.value.code == 2
    assert "there is no section 'samples-mix'; close names are samples-that-mix" in capsys.readouterr().err


def test_two_sections_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'clipping' already means"):
        see("Clipping", "usage.rst")


def test_marks_are_taken_out() -> None:
    text = """See :doc:`usage`, :doc:`the list <limits>`, `autograd_hacks.over`, ``x @ y``, `torch <https://pytorch.org>`_::

.. testsetup::

   x = 1

.. doctest::
   :options: +SKIP

   >>> f"`{x}`"
"""
    shown = "See docs/usage.rst, the list (docs/limits.rst), autograd_hacks.over, x @ y, torch (https://pytorch.org):"
    assert pages.plain(text) == shown + '\n\n   >>> f"`{x}`"'
    assert pages.plain("``ab``  c\n=====  =") == "ab      c\n=====  ="
