"""``python -m autograd_hacks``: an overview, the pages, explanations of errors, and a check of your own model."""

import argparse
import subprocess
import sys
import webbrowser
from collections.abc import Sequence

import autograd_hacks
from autograd_hacks.check.doctor import examine, print_machine, returned_by, small_model
from autograd_hacks.errors import EXPLAINED
from autograd_hacks.support.display import text_table
from autograd_hacks.support.pages import explained, folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the doctor found a fault, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        "python -m autograd_hacks",
        description=f"autograd_hacks {autograd_hacks.__version__}: the gradient of every sample's own loss, from one pass",
    )
    parser.add_argument("--version", action="version", version=f"autograd_hacks {autograd_hacks.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="print versions and devices, and check rows, also of your model")
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, x), (model, (x, ...)) or, by keyword, (model, {'x': x})",
    )
    docs = commands.add_parser("docs", help="open the pages in a browser; build them first if they aren't built")
    explain = commands.add_parser("explain", help="print more about an error: the section that its last line names")
    explain.add_argument("name", nargs="?", metavar="NAME", help="a section or an error class; without it, all are listed")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "explain":
        return _explain(options.name, explain)
    if options.command == "docs":
        return _docs(docs)
    try:
        given = small_model() if options.model is None else returned_by(options.model)
    except ValueError as error:
        doctor.error(str(error))
    print_machine()
    return examine(given, options.model or "a small model")


def _docs(parser: argparse.ArgumentParser) -> int:
    """Opens the built pages.  Builds them first, without running notebooks, if they aren't there."""
    build = folder() / "build.py"
    site = build.parent / "_build" / "html" / "index.html"
    if not site.exists() and build.exists():
        subprocess.run([sys.executable, build, "-q", "-D", "nb_execution_mode=off", "-b", "html"], check=False)
    if not site.exists():
        parser.error("pip installs no built pages. In a clone, pip install '.[docs]' installs what builds them")
    print(site)
    webbrowser.open(site.as_uri())
    return 0


def _explain(name: str | None, parser: argparse.ArgumentParser) -> int:
    """Prints one section; or the names of all sections, each with the error classes that it explains."""
    if name is not None:
        try:
            print(explained(name))
        except (KeyError, FileNotFoundError) as error:
            parser.error(str(error.args[0]))
        return 0
    sections = [(known, section) for known, section in EXPLAINED.items() if known[0].islower()]
    classes = [(known, section) for known, section in EXPLAINED.items() if known[0].isupper()]
    rows = [(name, own[0], " ".join(known for known, section in classes if section == own)) for name, own in sections]
    print(
        "python -m autograd_hacks explain NAME prints a section. The sections are:\n",
        text_table([("name", "section", "errors"), *sorted(rows)]),
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
