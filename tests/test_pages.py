"""How the pages are built: what conf.py sets, and what a page must have."""

import ast
import json
import re
from pathlib import Path

import pytest

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
