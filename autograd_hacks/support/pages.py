"""The sections that messages name, as text for a terminal.

The pages are in ``autograd_hacks/pages`` of a wheel, where setup.py puts them, and in ``docs`` of a clone.
"""

import re
from difflib import get_close_matches
from pathlib import Path

from autograd_hacks.errors import EXPLAINED

PACKAGE = Path(__file__).parent.parent
HEADING = re.compile(r"^(\S.*)\n(([=\-~^])\3+)$", re.MULTILINE)
MARKS = [
    (r"^\.\. (?:_|(?:testsetup|testcode|toctree|image|figure)::).*$(?:\n(?: .*)?$)*", ""),  # what a terminal doesn't show
    (r"^\.\. (?:doctest|code-block|container)::.*\n|^ +:\w[\w-]*:(?: .*)?$\n?", ""),  # of which it shows the content
    (r"``([^`\n]+)``(?=  )", r"\1    "),  # in a table: the columns stay aligned
    (r":doc:`([^`<]+) <([^`>]+)>`", r"\1 (docs/\2.rst)"),
    (r":doc:`/?([^`]+)`", r"docs/\1.rst"),
    (r"`([^`<\n]+)\s<([^`>\s]+)>`__?", r"\1 (\2)"),
    (r"(?<!\")(?:``|(?::\w+:)?`)([^`\n]+)(?:``|`_?_?)", r"\1"),
    (r"^(?!\.\. )(.*:):$", r"\1"),
    (r"\n{3,}", "\n\n"),
]
"""Marks of reStructuredText, and what a terminal shows instead."""


def folder() -> Path:
    """The folder of the pages.  Raises FileNotFoundError if it is missing."""
    for place in (PACKAGE / "pages", PACKAGE.parent / "docs"):
        if (place / "errors.rst").exists():
            return place
    raise FileNotFoundError(
        f"the pages are missing: a wheel has them in {PACKAGE / 'pages'}, a clone in {PACKAGE.parent / 'docs'}. Install the "
        "library again."
    )


def explained(name: str) -> str:
    """The text of the section that a message names, or that explains an error class.

    name: a name that ``python -m autograd_hacks explain`` lists; or a class of `autograd_hacks.errors`: SamplesMixed
    Raises KeyError with close names for an unknown name; FileNotFoundError if the pages are not installed.
    """
    if name not in EXPLAINED:
        close = get_close_matches(name.lower(), EXPLAINED, 3, 0.4) or list(EXPLAINED)[:3]
        raise KeyError(f"there is no section {name!r}; close names are {', '.join(close)}.")
    title, page = EXPLAINED[name]
    return plain(section((folder() / page).read_text(encoding="utf-8"), title)) + f"\n\n(docs/{page} of the sources)"


def section(page: str, title: str) -> str:
    """A section of a page with its subsections.  Raises KeyError if the page has no such section."""
    found = [mark for mark in HEADING.finditer(page) if len(mark[2]) >= len(mark[1])]
    own = next((mark for mark in found if mark[1] == title), None)
    if own is None:
        raise KeyError(f"the page has no section {title!r}")
    ranks = list(dict.fromkeys(mark[3] for mark in found))
    behind = [mark for mark in found if mark.start() > own.start() and ranks.index(mark[3]) <= ranks.index(own[3])]
    return page[own.start() : behind[0].start() if behind else None].rstrip()


def plain(text: str) -> str:
    """reStructuredText without its marks: roles, directives, and code that only prepares examples."""
    for mark, shown in MARKS:
        text = re.sub(mark, shown, text, flags=re.MULTILINE)
    return text.strip()
