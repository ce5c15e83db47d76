"""Every error that a newcomer meets ends with the command that explains it, and the command prints a section."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autograd_hacks import errors
from autograd_hacks.__main__ import main
from autograd_hacks.errors import EXPLAINED, PerSampleGradientError, see
from autograd_hacks.support import pages

ROOT = Path(__file__).parent.parent
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PerSampleGradientError)]
POINTER = re.compile(r"\nMore: python -m autograd_hacks explain ([\w-]+)$")


def titles() -> set[tuple[str, str]]:
    """Every page with every title in it."""
    title = re.compile(r"^(\S.*)\n([=\-~])\2+$", re.M)
    docs = ROOT / "docs"
    texts = {path.relative_to(docs).as_posix(): path.read_text() for path in docs.rglob("*.rst")}
    return {(page, found[1]) for page, text in texts.items() for found in title.finditer(text) if len(found[1]) > 1}


def calls_of_see() -> list[tuple[str, str]]:
    """The pages that messages name, as the sources have them."""
    found = []
    for path in (ROOT / "autograd_hacks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "see":
                told = [own.value for own in node.args if isinstance(own, ast.Constant)]
                found += [(told[1] if told[1:] else "errors.rst", told[0])] if told else []
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_page_of_each_error_is_there(kind: type[PerSampleGradientError]) -> None:
    found = POINTER.findall(str(kind("something is wrong")))
    assert len(found) == 1
    assert errors.EXPLAINED[found[0]] == errors.EXPLAINED[kind.__name__] == kind.explained
    assert kind.explained[::-1] in titles()


def test_pages_that_messages_name_are_there() -> None:
    named = calls_of_see()
    assert len(named) >= 8
    assert not set(named) - titles()


def test_a_pointer_stands_once_and_last() -> None:
    inner, more = errors.SamplesMixed("a mixes b"), "\nMore: python -m autograd_hacks explain "
    assert str(inner) == f"a mixes b{more}samples-that-mix"
    outer = errors.SamplesMixed(f"{inner} And more.")
    assert str(outer) == f"a mixes b And more.{more}samples-that-mix"
    several = errors.ProcessesDisagree(f"process 0: {inner}; process 1: {errors.StaleRecord('old')}")
    assert str(several) == f"process 0: a mixes b; process 1: old{more}samples-that-mix"
    own = errors.NothingRecorded("no hooks" + see("The model has no hooks"))
    assert str(own) == f"no hooks{more}the-model-has-no-hooks"
    assert str(pickle.loads(pickle.dumps(own))) == str(own)
    assert str(errors.NothingRecorded()) == f"{more}nothing-was-recorded"


def test_every_error_has_a_section_with_its_name() -> None:
    page = (ROOT / "docs" / "errors.rst").read_text()
    for kind in CLASSES[1:]:
        assert f"`autograd_hacks.errors.{kind.__name__}`" in page


TOOLS = ["laplace", "lightning", "opacus", "torchjd", "transformers"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_is_not_installed(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == tool:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, tool, None)
    monkeypatch.delitem(sys.modules, f"autograd_hacks.integrations.{tool}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "\.\[{tool}\]"') as raised:
        importlib.import_module(f"autograd_hacks.integrations.{tool}")
    assert (raised.value.name or "").split(".")[0] == tool
    assert POINTER.findall(str(raised.value)) == ["a-tool-is-not-installed"]


def test_every_integration_says_what_it_needs() -> None:
    folder = ROOT / "autograd_hacks" / "integrations"
    assert sorted(path.stem for path in folder.glob("*.py") if "with needed(" in path.read_text()) == TOOLS


WITHOUT = {("verbs/grads.py", "__reduce_ex__"): "met by a copy, says all there is"}
"""Built-in errors that name no page, and why not."""


def unexplained(text: str) -> list[tuple[int, str]]:
    """Where a built-in error is raised whose message names no page at its end: the line, and the function."""
    found = []
    for function in ast.walk(ast.parse(text)):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            kinds = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError")
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            last = node.exc.args[0].right if isinstance(node.exc.args[0], ast.BinOp) else node.exc.args[0]
            page = last.func if isinstance(last, ast.Call) else last
            # A check that several verbs share is given its page.
            is_named = isinstance(page, ast.Name) and (page.id in ("see", "page") or page.id.startswith("ON_"))
            if getattr(node.exc.func, "id", "") in kinds and not is_named:
                found.append((node.lineno, function.name))
    return found


def test_built_in_errors_name_their_page() -> None:
    """All that verbs, curvature and integrations raise."""
    package, excused = ROOT / "autograd_hacks", set(WITHOUT)
    floors = [package / floor for floor in ("verbs", "curvature", "integrations")]
    for path in [path for floor in floors for path in floor.glob("*.py")]:
        place = path.relative_to(package).as_posix()
        wrong = [(line, name) for line, name in unexplained(path.read_text()) if (place, name) not in WITHOUT]
        excused -= {(place, name) for _, name in unexplained(path.read_text())}
        assert not wrong, f"{place}: {wrong}; end the message with ON_..., of errors.py"
    assert not excused, "they name a page, or are gone"


def test_messages_end_with_an_address_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(errors.SamplesMixed("x")).endswith("explain samples-that-mix") or errors.BASE
    monkeypatch.setattr(errors, "BASE", "https://x.org")
    said = str(errors.SamplesMixed("x"))
    assert said.endswith("explain samples-that-mix, or https://x.org/errors.html#samples-that-mix")
    inner = str(errors.ProcessesDisagree(f"process 0: {said}; process 1: fine"))
    assert inner.startswith("process 0: x; process 1: fine\nMore: ")
    assert inner.endswith("#samples-that-mix")
    assert errors.see("Check anyone's rows", "knock_outs.rst").endswith("knock_outs.html#check-anyone-s-rows")


# What ``python -m autograd_hacks explain`` prints, in a clone and from a wheel


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
