"""What an index and its readers get: sources of methods, the sdist's files, the Pythons that are named."""

import configparser
import re
from pathlib import Path

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
