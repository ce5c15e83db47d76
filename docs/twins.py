"""Markdown beside each page, and ``llms.txt``, which lists them: for readers that are programs.

``python docs/build.py -b markdown``, behind the pages, runs no notebook again.  sphinx-markdown-builder writes them; here is
what it doesn't know: cards' titles, captions and abbreviations, of which the text is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx_design.shared import PassthroughTextElement

LONGEST = 240
"""Characters of a page's first sentences that stand in the list."""


def llms(app: Sphinx) -> Iterator[str]:
    """The lines of llms.txt (llmstxt.org): the library in a sentence, and each page with its first sentences."""
    root = app.env.get_doctree(app.config.root_doc)
    yield f"# {app.config.project} {app.config.release}"
    yield f"\n> {opening(root)}"
    yield "\nPages are Markdown beside the HTML, page.md for page.html; paths are relative to this file."
    for tree in root.findall(addnodes.toctree):
        yield f"\n## {tree.get('caption') or 'Pages'}\n"
        for page in tree["includefiles"]:
            yield from listed(app, page)


def listed(app: Sphinx, page: str) -> Iterator[str]:
    """A page, and those that it lists itself."""
    says = opening(app.env.get_doctree(page))
    yield f"- [{app.env.titles[page].astext()}]({page}.md)" + (f": {says}" if says else "")
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
    if failed is None and app.builder.name == "markdown":
        Path(app.outdir, "llms.txt").write_text("\n".join(llms(app)) + "\n", encoding="utf-8")


def within(translator: Any, node: nodes.Node) -> None:
    """Leaves a node's text where it is."""


def apart(translator: Any, node: nodes.Node) -> None:
    """Ends a paragraph."""
    translator.ensure_eol(2)


def setup(app: Sphinx) -> dict[str, Any]:
    for extension in ("sphinx_design", "sphinx_markdown_builder"):
        app.setup_extension(extension)
    app.add_node(nodes.abbreviation, override=True, markdown=(within, within))
    for kind in (nodes.caption, PassthroughTextElement):
        app.add_node(kind, override=True, markdown=(within, apart))
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
