"""A text beside each page, and ``llms.txt``, which lists them: for readers that are programs.

``sphinx-build -b text docs docs/_build/html``, behind the pages, reads nothing anew.  Sphinx's own text builder writes
them: the extensions that write Markdown don't know cards, charts and notebooks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

LONGEST = 240
"""Characters of a page's first sentences that stand in the list."""


def llms(app: Sphinx) -> Iterator[str]:
    """The lines of llms.txt (llmstxt.org): the library in a sentence, and each page with its first sentences."""
    root = app.env.get_doctree(app.config.root_doc)
    yield f"# {app.config.project} {app.config.release}"
    yield f"\n> {opening(root)}"
    yield "\nPages are plain text beside the HTML, page.txt for page.html; paths are relative to this file."
    for tree in root.findall(addnodes.toctree):
        yield f"\n## {tree.get('caption') or 'Pages'}\n"
        for page in tree["includefiles"]:
            yield from listed(app, page)


def listed(app: Sphinx, page: str) -> Iterator[str]:
    """A page, and those that it lists itself."""
    says = opening(app.env.get_doctree(page))
    yield f"- [{app.env.titles[page].astext()}]({page}.txt)" + (f": {says}" if says else "")
    for below in app.env.toctree_includes.get(page, ()):
        yield from listed(app, below)


def opening(page: nodes.document) -> str:
    """A page's first paragraph, cut at the end of a sentence."""
    paragraphs = (p.astext() for p in page.findall(nodes.paragraph) if isinstance(p.parent, nodes.section))
    text = " ".join(next(paragraphs, "").split()).rstrip(":")
    if len(text) <= LONGEST:
        return text
    end = text.rfind(". ", 0, LONGEST)
    return text[: end + 1] if end > 0 else text[:LONGEST].rsplit(" ", 1)[0] + " ..."


def write(app: Sphinx, failed: Exception | None) -> None:
    if failed is None and app.builder.name == "text":
        Path(app.outdir, "llms.txt").write_text("\n".join(llms(app)) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
