"""The search for house words finds them in pages, docstrings and messages, and nowhere else."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "docs" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_have_none(prose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().out


def test_it_finds_one_over_a_line_break(prose: Any) -> None:
    (found,) = prose.findings_in("It is taken\n  for the mean.")
    assert found.startswith('"taken for the": write "assumed to be"')


@pytest.mark.parametrize("text", ["one sample hardly counts", "Nothing is worked out anew."])
def test_words_are_whole_and_all_are_found(prose: Any, text: str) -> None:
    assert len(prose.findings_in(text)) == {"one": 1, "Not": 2}[text[:3]]


def test_code_is_no_prose(prose: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.rst"
    page.write_text("Text ``anew``.\n\n.. code-block:: python\n\n   anew\n\nThen::\n\n    anew\n\nText.\n")
    assert prose.findings_in(prose.prose_of(page)) == []
    page.write_text("Text.\n\n.. note::\n\n   Written anew.\n")
    assert len(prose.findings_in(prose.prose_of(page))) == 1
    page.write_text("Text.\n\n.. doctest::\n\n   >>> anew = 1\n\nWritten anew.\n\n- anew\n")
    assert len(prose.findings_in(prose.prose_of(page))) == 2


def test_a_module_has_prose_in_docstrings_and_messages(prose: Any, tmp_path: Path) -> None:
    module, lines = (
        tmp_path / "module.py",
        ['"""Made anew."""', "anew = 1  # anew", 'raise ValueError(f"{x} is worked out")'],
    )
    module.write_text("\n".join(lines))
    found = sorted(line[:8] for line in prose.findings_in(prose.prose_of(module)))
    assert found == ['"anew": ', '"worked ']
    lines = ['"""``anew``::', "", "    anew = 1", "", "Text, taken for", '"""', 'NAMES = ["the name"]']
    module.write_text("\n".join(lines))
    assert prose.findings_in(prose.prose_of(module)) == []


def test_the_modules_are_searched(prose: Any) -> None:
    assert {"autograd_hacks/verbs/over.py", "docs/examples/wrong_labels.py"} <= prose.pages().keys()
    assert "autograd_hacks/verbs/over.py" not in prose.NOT_YET


def test_a_script_of_the_gallery_has_prose_in_comments_too(
    prose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text('"""Title."""\n# %%\n# It is taken\n# for the mean of ``anew``.\nanew = 1  # anew\n')
    assert prose.findings_in(prose.prose_of(script)) == []
    monkeypatch.setattr(prose, "EXAMPLES", tmp_path)
    found = sorted(line.partition(":")[0] for line in prose.findings_in(prose.prose_of(script)))
    assert found == ['"anew"', '"taken for the"']


def test_a_notebook_has_prose_between_its_code(prose: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.ipynb"
    cells = [{"cell_type": kind, "source": ["anew"]} for kind in ("markdown", "code")]
    page.write_text(json.dumps({"cells": cells}))
    assert len(prose.findings_in(prose.prose_of(page))) == 1


def test_the_list_of_other_pages_only_gets_shorter(
    prose: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "NOT_YET", {*prose.NOT_YET, "docs/want.rst", "docs/gone.rst"})
    assert prose.main() == 1
    said = capsys.readouterr().out
    assert "docs/want.rst: has no house words any more" in said
    assert "docs/gone.rst: is in NOT_YET and is no page" in said


def test_a_page_that_is_not_on_the_list_fails(
    prose: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "WORDS", {**prose.WORDS, "notebook": "page"})
    assert prose.main() == 1
    said = capsys.readouterr().out
    assert 'docs/want.rst: "notebook": write "page"' in said
    assert 'README.rst: "notebook": write "page"' in said


def test_the_changelog_is_a_page(prose: Any) -> None:
    assert "CHANGELOG.rst" in prose.pages()
