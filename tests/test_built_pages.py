"""How the pages are built: what conf.py sets, and what a page must have."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autograd_hacks

DOCS = Path(__file__).parent.parent / "docs"


def set_in_conf(name: str) -> object:
    """The literal that docs/conf.py gives a name."""
    for node in ast.parse((DOCS / "conf.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return ast.literal_eval(node.value)
    raise KeyError(name)


def formulas(page: Path) -> list[str]:
    """What stands between dollar signs in a notebook's prose.  Raises ValueError where one has no partner."""
    found = []
    for cell in json.loads(page.read_text())["cells"]:
        text = re.sub(r"`[^`]*`", "", "".join(cell["source"])) if cell["cell_type"] == "markdown" else ""
        if text.count("$") % 2:
            raise ValueError(f"{page.name}: a dollar sign without a partner in {text!r}")
        found += re.findall(r"\$([^$]+)\$", text)
    return found


def test_formulas_of_notebooks_are_read_as_formulas() -> None:
    assert len(formulas(DOCS / "tutorial.ipynb")) > 20
    assert "dollarmath" in set_in_conf("myst_enable_extensions")  # type: ignore[operator]


def test_a_formula_without_an_end_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["The norm $x, and `$` is code"]}]}))
    with pytest.raises(ValueError, match=r"page\.ipynb: a dollar sign without a partner"):
        formulas(page)


def test_each_formula_becomes_a_node() -> None:
    parsers = pytest.importorskip("myst_parser.parsers.mdit")
    from myst_parser.config.main import MdParserConfig
    from myst_parser.mdit_to_docutils.base import DocutilsRenderer

    extensions = set_in_conf("myst_enable_extensions")
    parser = parsers.create_md_parser(MdParserConfig(enable_extensions=set(extensions)), DocutilsRenderer)  # type: ignore[call-overload]
    for page in (DOCS / "tutorial.ipynb", DOCS / "first_steps.ipynb"):
        read = []
        for cell in json.loads(page.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                blocks = parser.parse("".join(cell["source"]))
                read += [t.content for block in blocks for t in block.children or [] if t.type.startswith("math")]
        assert read == formulas(page), page.name


@pytest.fixture
def build() -> Any:
    spec = importlib.util.spec_from_file_location("build", DOCS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_version_has_a_folder_and_the_latest_is_led_to(build: Any, tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.2.1", "jupyter_execute", "_static"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    (tmp_path / "0.11.0").mkdir()  # whose build has failed
    (tmp_path / "0.10.0" / "llms.txt").write_text("- [Limits](limits.md): see [torch](https://pytorch.org)\n")
    assert build.versions(tmp_path) == ["0.10.0", "0.9.0", "0.2.1"]
    build.write_index(tmp_path)
    assert 'content="0; url=0.10.0/index.html"' in (tmp_path / "index.html").read_text()
    assert 'const versions = ["0.10.0", "0.9.0", "0.2.1"];' in (tmp_path / "versions.js").read_text()
    assert (tmp_path / "llms.txt").read_text() == "- [Limits](0.10.0/limits.md): see [torch](https://pytorch.org)\n"
    assert build.version() == autograd_hacks.__version__


def test_the_sidebar_lists_versions_by_what_the_build_writes(build: Any) -> None:
    shown = set_in_conf_text("html_sidebars")
    assert "versions.html" in shown
    template = (DOCS / "_templates" / "versions.html").read_text()
    assert 'id="versions"' in template
    assert 'getElementById("versions")' in build.SCRIPT
    assert '../versions.js"' in template
    tox = (DOCS.parent / "tox.ini").read_text()
    built = re.findall(r"python docs/build\.py .*-b (\w+)$", tox, re.M)
    assert built == ["html", "markdown", "html"]
    assert not re.search(r"-b html docs\b", tox)


def set_in_conf_text(name: str) -> str:
    """The source of what docs/conf.py gives a name."""
    (node,) = [
        node
        for node in ast.parse((DOCS / "conf.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.unparse(node.value)


def test_captions_have_one_rule() -> None:
    rules = re.findall(r"^([^{}\n]*caption[^{}\n]*)\{([^}]*)\}", (DOCS / "_static" / "site.css").read_text(), re.M)
    assert [body.strip() for _, body in rules] == ["text-align: left;"]


# The search for house words finds them in pages, docstrings and messages, and nowhere else


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
