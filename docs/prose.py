"""Finds house words in the pages, in the package's docstrings and messages, and in the gallery's scripts with their
comments, and says what to write.

    python docs/prose.py

Files in NOT_YET still have some.  That list only gets shorter: a file without house words must not be
in it, and a new file must not contain any.
"""

import ast
import json
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
WORDS = {
    r"told (?:apart|from)": "distinguished from",
    r"taken? for (?:the|a|what)": "assumed to be",
    r"in the place of": "instead of",
    r"but for": "except for",
    r"hardly": "rarely, or a number",
    r"(?:come|comes|came) (?:of|by)": "come from",
    r"handed? out": "returned",
    r"no automatism": "not chosen automatically",
    r"aimed for|aimed at": "the target is",
    r"(?:speak|speaks) for": "support",
    r"gone on with|go on where|goes on where": "continue",
    r"for it is|for they|for it has": "because it is",
    r"side doors?": "another way",
    r"that is no|is no (?:number|matrix)": "is not a",
    r"anew": "again",
    r"worked out": "computed",
    r"nobody's": "of no sample",
    r"whose each": "each of which",
    r"of an own|an own": "its own",
    r"(?:say|says|said) of": "say about",
    r"what is more than": "more than",
    r"stands? in their place": "replaces them",
    r"on that account": "therefore",
    r"brought to": "given to, or scaled to",
    r"by hand of": "with",
    r"nothing too much": "nothing more",
    r"unless told": "by default",
    r"all the same": "still, or anyway",
    r"as ever": "as usual",
    r"put back": "restored",
    r"(?:is|are) no (?:batch|matrices|tensor)": "is not a",
    r"in the mean": "in expectation, or mostly",
    r"(?:add|adds|added|adding) them up": "sum",
    r"(?:taken|takes?) it that": "assume that",
    r"mend(?:s|ed)?": "fix",
    r"(?:aim|aims)": "target",
    r"(?:hears|hear) of": "sees, or notices",
    r"taken apart": "split",
}
"""What is searched for, as whole words, and what to write."""
BLOCK = r"^( *)(?! )(?:\.\. (?:code-block|doctest|test\w+|toctree|math)::|(?!\.\. ).*::$).*\n(?:\1 +.*\n| *\n)*"
"""A directive with code, or a paragraph that ends with two colons, and the lines below that are further in."""
NOT_YET: set[str] = set()


def prose_of(path: Path) -> str:
    """A file without its code: literals, doctests, blocks of directives, a notebook's code cells.

    Of a module, its strings; of a script in the gallery, whose comments become text on its page, also its comments.
    """
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    if path.suffix != ".py":
        return _without_code(path.read_text())
    return _without_code(strings_of(path) + (comments_of(path) if path.parent == EXAMPLES else ""))


def strings_of(path: Path) -> str:
    """A module's docstrings and messages, with "X" for the values in them."""
    tree = ast.parse(path.read_text())
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in formatted for part in node.values}
    found = ["".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in n.values) for n in formatted]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            found.append(node.value)
    return "\n\n|\n\n".join(text for text in found if " " in text)


def comments_of(path: Path) -> str:
    """A module's comments.  Those on consecutive lines are one text."""
    found, last = [], 0
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                found += ["\n\n|\n\n"] if token.start[0] > last + 1 else ["\n"]
                found.append(token.string.lstrip("#%").removeprefix(" "))
                last = token.start[0]
    return "".join(found)


def _without_code(text: str) -> str:
    text = re.sub(BLOCK, "\n", text, flags=re.M)
    text = re.sub(r"^ *(?:>>>|\.\.\.) .*$", "", text, flags=re.M)
    return re.sub(r"``[^`]*``|`[^`]*`", "it", text)


def findings_in(text: str) -> list[str]:
    """A line for each house word."""
    text = " ".join(text.split())
    found = []
    for word, better in WORDS.items():
        for hit in re.finditer(rf"\b(?:{word})\b", text, re.I):
            near = text[max(0, hit.start() - 40) : hit.end() + 30]
            found.append(f'"{hit[0]}": write "{better}"    ... {near} ...')
    return found


def pages() -> dict[str, Path]:
    """The pages, the gallery's scripts and the package's modules, by their names from the root of the repository."""
    docs = ROOT / "docs"
    made = {"_build", "_generated", "gallery", "examples"}
    found = [path for ending in ("*.rst", "*.ipynb") for path in docs.rglob(ending) if not made & {*path.parts}]
    modules = [*(ROOT / "autograd_hacks").rglob("*.py"), *EXAMPLES.glob("*.py")]
    first = [ROOT / "README.rst", ROOT / "CHANGELOG.rst"]
    return {path.relative_to(ROOT).as_posix(): path for path in [*first, *sorted(found), *sorted(modules)]}


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    wrong = []
    known = pages()
    for name, path in known.items():
        found = findings_in(prose_of(path))
        if name in NOT_YET and not found:
            wrong.append(f"{name}: has no house words any more. Take it out of NOT_YET in docs/prose.py")
        elif name not in NOT_YET:
            wrong += [f"{name}: {line}" for line in found]
    wrong += [f"{name}: is in NOT_YET and is no page" for name in sorted(NOT_YET - known.keys())]
    print("\n".join(wrong) or "prose: no house words")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
