"""Builds the pages into a folder of their version, docs/_build/html/VERSION/, beside those of other versions.

    python docs/build.py -b html -W --keep-going

Arguments are sphinx-build's, without folders.  Above the versions stand an ``index.html`` that leads to the latest, its
``llms.txt``, and ``versions.js``, by which each page lists all versions: so pages of an old one know newer ones.
"""

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
SITE = DOCS / "_build" / "html"
REDIRECT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>autograd_hacks</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<link rel="canonical" href="{0}/index.html">
</head>
<body><a href="{0}/index.html">autograd_hacks {0}</a></body>
</html>
"""
SCRIPT = """const versions = {0};
const list = document.getElementById("versions");
const here = list.querySelector("a").textContent;
list.replaceChildren(...versions.map((version) => {{
  const item = document.createElement("li");
  const link = document.createElement("a");
  item.className = "toctree-l1" + (version === here ? " current-page" : "");
  link.className = "reference";
  link.href = `${{list.dataset.root}}${{version}}/index.html`;
  link.textContent = version;
  item.append(link);
  return item;
}}));
"""


def version() -> str:
    """The version whose pages these are."""
    found = re.search(r'^__version__ = "(.+)"$', (DOCS.parent / "autograd_hacks" / "__init__.py").read_text(), re.M)
    assert found is not None
    return found[1]


def versions(site: Path) -> list[str]:
    """Those whose pages are there, the latest first."""
    built = [page.parent.name for page in site.glob("*/index.html") if re.match(r"\d+(\.\d+)*", page.parent.name)]
    return sorted(built, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def write_index(site: Path) -> None:
    """What stands above the versions."""
    every = versions(site)
    (site / "index.html").write_text(REDIRECT.format(every[0]), encoding="utf-8")
    (site / "versions.js").write_text(SCRIPT.format(json.dumps(every)), encoding="utf-8")
    listing = site / every[0] / "llms.txt"
    if listing.exists():
        there = re.sub(r"\]\((?!https?:)", f"]({every[0]}/", listing.read_text(encoding="utf-8"))
        (site / "llms.txt").write_text(there, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    from sphinx.cmd.build import main as build

    status = build([*arguments, str(DOCS), str(SITE / version())])
    if not status:
        write_index(SITE)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
