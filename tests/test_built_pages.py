"""How the pages are built: what conf.py sets, and what a page and a release must have."""

import ast
import configparser
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import autograd_hacks

DOCS = Path(__file__).parent.parent / "docs"


def set_in_conf(name: str) -> ast.expr:
    """What docs/conf.py gives a name."""
    body = ast.parse((DOCS / "conf.py").read_text()).body
    (found,) = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return found


def loaded(path: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


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
    assert "dollarmath" in ast.literal_eval(set_in_conf("myst_enable_extensions"))


def test_a_formula_without_an_end_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["The norm $x, and `$` is code"]}]}))
    with pytest.raises(ValueError, match=r"page\.ipynb: a dollar sign without a partner"):
        formulas(page)


def test_each_formula_becomes_a_node() -> None:
    parsers = pytest.importorskip("myst_parser.parsers.mdit")
    from myst_parser.config.main import MdParserConfig
    from myst_parser.mdit_to_docutils.base import DocutilsRenderer

    extensions = set(ast.literal_eval(set_in_conf("myst_enable_extensions")))
    parser = parsers.create_md_parser(MdParserConfig(enable_extensions=extensions), DocutilsRenderer)
    for page in (DOCS / "tutorial.ipynb", DOCS / "first_steps.ipynb"):
        read = []
        for cell in json.loads(page.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                blocks = parser.parse("".join(cell["source"]))
                read += [t.content for block in blocks for t in block.children or [] if t.type.startswith("math")]
        assert read == formulas(page), page.name


@pytest.fixture
def build() -> Any:
    return loaded(DOCS / "build.py")


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
    assert "versions.html" in ast.unparse(set_in_conf("html_sidebars"))
    template = (DOCS / "_templates" / "versions.html").read_text()
    assert 'id="versions"' in template
    assert 'getElementById("versions")' in build.SCRIPT
    assert '../versions.js"' in template
    tox = (DOCS.parent / "tox.ini").read_text()
    built = re.findall(r"python docs/build\.py .*-b (\w+)$", tox, re.M)
    assert built == ["html", "markdown", "html"]
    assert not re.search(r"-b html docs\b", tox)


def test_captions_have_one_rule() -> None:
    rules = re.findall(r"^([^{}\n]*caption[^{}\n]*)\{([^}]*)\}", (DOCS / "_static" / "site.css").read_text(), re.M)
    assert [body.strip() for _, body in rules] == ["text-align: left;"]


# The search for house words finds them in pages, docstrings and messages, and nowhere else


@pytest.fixture
def prose() -> Any:
    return loaded(DOCS / "prose.py")


def test_the_pages_have_none(prose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().out


MODULE = '"""{}"""\nanew = 1  # anew\n{}'
TEXTS: list[tuple[str, str, list[str]]] = [
    # the file's name, what is in it, and what is found
    ("page.rst", "Text ``anew``.\n\n.. code-block:: python\n\n   anew\n\nThen::\n\n    anew\n\nText.\n", []),
    ("page.rst", "Text.\n\n.. note::\n\n   Written anew.\n", ["anew"]),
    ("page.rst", "Text.\n\n.. doctest::\n\n   >>> anew = 1\n\nWritten anew.\n\n- anew\n", ["anew", "anew"]),
    ("module.py", MODULE.format("Made anew.", 'raise ValueError(f"{x} is worked out")'), ["anew", "worked out"]),
    ("module.py", MODULE.format("``anew``::\n\n    anew = 1\n\nText, taken for\n", 'NAMES = ["the name"]'), []),
    ("script.py", '"""Title."""\n# %%\n# It is taken\n# for the mean of ``anew``.\nanew = 1  # anew\n', []),
    (
        "page.ipynb",
        json.dumps({"cells": [{"cell_type": kind, "source": ["anew"]} for kind in ("markdown", "code")]}),
        ["anew"],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS)
def test_prose_is_told_from_code(name: str, text: str, expected: list[str], prose: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = sorted(line.split('"')[1] for line in prose.findings_in(prose.prose_of(tmp_path / name)))
    assert found == expected


def test_words_are_whole_and_all_are_found_over_line_breaks_too(prose: Any) -> None:
    (found,) = prose.findings_in("It is taken\n  for the mean.")
    assert found.startswith('"taken for the": write "assumed to be"')
    assert [len(prose.findings_in(text)) for text in ("one sample hardly counts", "Nothing is worked out anew.")] == [1, 2]


def test_the_modules_are_searched(prose: Any) -> None:
    pages = {"autograd_hacks/verbs/over.py", "docs/examples/wrong_labels.py", "CHANGELOG.rst"}
    assert pages <= prose.pages().keys()
    assert "autograd_hacks/verbs/over.py" not in prose.NOT_YET


def test_a_script_of_the_gallery_has_prose_in_comments_too(
    prose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(next(text for name, text, _ in TEXTS if name == script.name))
    monkeypatch.setattr(prose, "EXAMPLES", tmp_path)
    found = sorted(line.partition(":")[0] for line in prose.findings_in(prose.prose_of(script)))
    assert found == ['"anew"', '"taken for the"']


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("NOT_YET", {"docs/want.rst": "", "docs/gone.rst": ""},
         ["docs/want.rst: has no house words any more", "docs/gone.rst: is in NOT_YET and is no page"]),
        ("WORDS", {"gradients": "page"},
         ['docs/want.rst: "gradients": write "page"', 'README.rst: "gradients": write "page"']),
    ],
)  # fmt: skip
def test_the_list_of_other_pages_only_gets_shorter_and_has_all_that_have_some(
    prose: Any, name: str, more: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    own = getattr(prose, name)
    monkeypatch.setattr(prose, name, {**own, **more} if isinstance(own, dict) else {*own, *more})
    assert prose.main() == 1
    said = capsys.readouterr().out
    assert all(line in said for line in expected)


# What an index and its readers get: sources of methods, the sdist's files, the Pythons that are named


ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def test_every_paper_of_a_docstring_is_in_the_bibliography() -> None:
    named = {number for path in (ROOT / "autograd_hacks").rglob("*.py") for number in NUMBER.findall(path.read_text())}
    entries = (ROOT / "docs" / "bibliography.bib").read_text()
    listed = re.findall(r"eprint = \{(\d{4}\.\d{4,5})\}", entries)
    assert len(named) > 20
    assert len(listed) == len(set(listed))
    assert not named - set(listed), "add them to docs/bibliography.bib"


def test_every_entry_is_whole() -> None:
    entries = re.split(r"^@", (ROOT / "docs" / "bibliography.bib").read_text(), flags=re.M)[1:]
    keys = [re.match(r"\w+\{(\w+),", entry)[1] for entry in entries]  # type: ignore[index]
    assert len(keys) == len(set(keys))
    for entry in entries:
        assert entry.count("{") == entry.count("}"), entry
        assert all(f"{field} = " in entry for field in ("title", "author", "year", "note")), entry


def test_metadata_is_what_pip_wants() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    metadata = config["metadata"]
    assert metadata["license_expression"] == "BSD-3-Clause"
    assert "license" not in metadata
    assert not any("License ::" in line for line in metadata["classifiers"].splitlines()), "PEP 639 forbids both"
    minors = re.findall(r"Python :: 3\.(\d+)$", metadata["classifiers"], re.M)
    assert config["options"]["python_requires"] == f">=3.{minors[0]}"
    assert f'target-version = "py3{minors[0]}"' in (ROOT / "ruff.toml").read_text()
    lowest = (ROOT / "tox.ini").read_text().partition("[testenv:lowest]")[2].partition("[testenv")[0]
    assert f"base_python = python3.{minors[0]}" in lowest
    for line in config["options"]["install_requires"].split():
        name, _, version = line.partition(">=")
        assert f"{name}=={version}" in lowest, "tox -e lowest tries what setup.cfg allows"


def test_the_sdist_has_what_tests_read() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text()
    for folder in ("benchmarks", "docs", "tests"):
        assert f"graft {folder}\n" in manifest
    included = set(re.findall(r"\S+", " ".join(re.findall(r"^include (.*)$", manifest, re.M))))
    assert {"README.rst", "CHANGELOG.rst", "CITATION.cff", "LICENSE", "tox.ini", "ruff.toml"} <= included
    assert all((ROOT / name).exists() for name in included)


@pytest.fixture
def ready() -> Any:
    return loaded(ROOT / ".ci" / "ready.py")


def test_a_release_is_published_with_an_address_alone(ready: Any, tmp_path: Path) -> None:
    names = ("setup.cfg", "CITATION.cff", "CHANGELOG.rst", "autograd_hacks/errors.py")
    (tmp_path / "autograd_hacks").mkdir()
    for name in names:
        shutil.copy(ROOT / name, tmp_path / name)
    setup, citation, changelog, address = (tmp_path / name for name in names)

    def put(path: Path, pattern: str, text: str) -> list[str]:
        path.write_text(re.sub(pattern, text, path.read_text(), count=1, flags=re.M))
        return ready.missing(tmp_path)

    put(setup, r"^project_urls =\n( +.*\n)+", "")
    put(address, r'^BASE = ".*"$', 'BASE = ""')
    put(citation, r"^date-released:.*\n", "")
    left = put(changelog, rf"^{autograd_hacks.__version__} \(.*\)$", f"{autograd_hacks.__version__} (unreleased)")
    assert [line.split(":")[0] for line in left] == ["setup.cfg", "autograd_hacks/errors.py", *names[1:3]]
    put(
        setup,
        r"^keywords =",
        "project_urls =\n    Source = https://x.org/s\n    Documentation = https://x.org/d\nkeywords =",
    )
    put(citation, r"^version: .*$", r"\g<0>\ndate-released: 2027-01-01")
    put(changelog, r"\(unreleased\)", "(2027-01-01)")
    assert put(address, '^BASE = ""$', 'BASE = "https://x.org"') == [
        "BASE is https://x.org, and project_urls has Documentation = https://x.org/d"
    ]
    assert put(address, '^BASE = ".*"$', 'BASE = "https://x.org/d"') == []


def test_the_address_is_set_in_both_places_or_in_none(ready: Any) -> None:
    assert len([line for line in ready.missing() if "BASE" in line or "project_urls" in line]) in (0, 2)


def test_what_runs_the_checks() -> None:
    publish, tests = ((ROOT / ".github" / "workflows" / f"{name}.yml").read_text() for name in ("publish", "tests"))
    assert publish.index("python .ci/ready.py") < publish.index("tox -e build") < publish.index("gh-action-pypi-publish")
    environments = {*re.findall(r"^\[testenv:(\w+)\]", (ROOT / "tox.ini").read_text(), re.M), "py"}
    asked = {*re.findall(r"environment: (\w+), ", tests)}
    assert {"py", "lint", "docs", "build", "lowest", "nightly"} == asked <= environments
    assert [line for line in tests.splitlines() if "may-fail: true" in line] == [
        line for line in tests.splitlines() if "environment: nightly" in line
    ]
    run, tox = ((ROOT / name).read_text() for name in (".ci/run", "tox.ini"))
    usual = re.findall(r"^env_list = (.*)$", tox, re.M)[0].split(", ")
    assert {*",".join(re.findall(r"^python3 -m tox .*-e ([\w,]+)", run, re.M)).split(",")} == {*usual, "build"}
    assert "python3 -m tox -e py -- @tests/full.txt\n" in run
    assert "\ncommands = python -m pytest -n 2 @tests/full.txt {posargs}\n" in tox


def test_the_citation_has_the_version() -> None:
    citation, changelog = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.rst"))
    assert f"\nversion: {autograd_hacks.__version__}\n" in citation
    said = re.search(rf"^{re.escape(autograd_hacks.__version__)} \((.*)\)$", changelog, re.M)
    assert said is not None
    date = re.search(r"^date-released: (.*)$", citation, re.M)
    assert (date[1] if date else "unreleased") == said[1]
