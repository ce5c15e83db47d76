"""Tries the installed package, without the clone: the README's ten lines, the sections that errors name, and
the table of costs.

python -I .ci/from_wheel.py README.rst
"""

import doctest
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import autograd_hacks
from autograd_hacks.errors import EXPLAINED
from autograd_hacks.forms.cost import costs_of
from autograd_hacks.support import pages


def main(readme: str) -> int:
    installed = Path(autograd_hacks.__file__).parent
    if installed.parent != Path(sysconfig.get_path("purelib")):
        print(f"{installed} is not where pip installs: this would try the clone", file=sys.stderr)
        return 1
    lines = pages.section(Path(readme).read_text(encoding="utf-8"), "The idea in ten lines")
    example = doctest.DocTestParser().get_doctest(lines, {}, "README", readme, 0)
    results = doctest.DocTestRunner().run(example)
    if results.failed or not results.attempted:
        return 1
    for name in EXPLAINED:
        pages.explained(name)
    if pages.folder() != installed / "pages" or not (installed / "py.typed").exists():
        print(f"{installed} has no pages, or no py.typed", file=sys.stderr)
        return 1
    costs_of(torch.device("cpu"))  # raises where the wheel has no costs.json
    subprocess.run([sys.executable, "-I", "-m", "autograd_hacks", "explain", "samples-that-mix"], check=True)
    print(f"\nautograd_hacks {autograd_hacks.__version__} in {installed}: {results.attempted} lines of the README")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
