"""How the pages are built: what conf.py sets, and what a page and a release must have."""

import ast
import configparser
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import autograd_hacks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


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


# What an index and its readers get: sources of methods, the sdist's files, the Pythons that are named


NUMBER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def test_every_paper_of_a_docstring_is_in_the_bibliography() -> None:
    named = {number for path in (ROOT / "autograd_hacks").rglob("*.py") for number in NUMBER.findall(path.read_text())}
    entries = (ROOT / "docs" / "bibliography.bib").read_text()
    listed = re.findall(r"eprint = \{(\d{4}\.\d{4,5})\}", entries)
    assert len(named) > 20
    assert len(listed) == len(set(listed))
    assert not named - set(listed), "add them to docs/bibliography.bib"


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


def test_the_citation_has_the_version() -> None:
    citation, changelog = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.rst"))
    assert f"\nversion: {autograd_hacks.__version__}\n" in citation
    said = re.search(rf"^{re.escape(autograd_hacks.__version__)} \((.*)\)$", changelog, re.M)
    assert said is not None
    date = re.search(r"^date-released: (.*)$", citation, re.M)
    assert (date[1] if date else "unreleased") == said[1]
