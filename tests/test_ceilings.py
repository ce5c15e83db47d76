"""Sizes that may only fall.

Statements are counted, not lines, so nobody joins lines or cuts docstrings to stay below a ceiling.
"""

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

from test_layout import ROOMS

import autograd_hacks

ROOT = Path(__file__).parent.parent
CEILINGS = {"core": 14698, "rooms": 4466, "tests": 19768, "benchmarks": 1740}
"""The largest numbers of statements.  Lower them when statements go; what moves takes its share along."""
SLACK = 100
"""A ceiling must be less than this above the number, so that what was removed can't grow again."""
NAMES = 16
"""The largest number of public names, beside modules."""


def statements(folders: Iterable[Path]) -> int:
    """The number of statements in a list of files, or in the files of folders."""
    paths = [path for own in folders for path in ([own] if own.suffix else own.rglob("*.py"))]
    return sum(_statements(ast.parse(path.read_text())) for path in paths)


def _statements(within: ast.AST) -> int:
    """Expressions have none, and take most of the time."""
    inner = ast.stmt | ast.excepthandler | ast.match_case
    below = [node for node in ast.iter_child_nodes(within) if isinstance(node, inner)]
    return sum(isinstance(node, ast.stmt) + _statements(node) for node in below)


def floors() -> dict[str, list[Path]]:
    """The folders and files that each ceiling counts."""
    package = ROOT / "autograd_hacks"
    return {
        "core": [path for path in package.iterdir() if path.name not in ROOMS and path.suffix in ("", ".py")],
        "rooms": [package / name for name in ROOMS],
        "tests": [ROOT / "tests"],
        "benchmarks": [ROOT / "benchmarks"],
    }


def wrong_ceilings(count: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    found = []
    for name, most in ceilings.items():
        if count[name] > most:
            found.append(f"{name} has {count[name]} statements; expected at most {most}")
        if count[name] <= most - SLACK:
            found.append(f"{name} has {count[name]} statements and a ceiling of {most}; lower it to {count[name]}")
    return found


def test_no_floor_is_above_its_ceiling() -> None:
    wrong = wrong_ceilings({name: statements(paths) for name, paths in floors().items()}, CEILINGS)
    assert not wrong, "\n".join(wrong)


def test_public_names() -> None:
    assert sum(not inspect.ismodule(getattr(autograd_hacks, name)) for name in autograd_hacks.__all__) <= NAMES


# The tests' own tests.


def test_every_file_of_the_package_has_one_ceiling() -> None:
    counted = [path for name in ("core", "rooms") for path in floors()[name]]
    assert len(counted) == len(set(counted))
    assert {path for path in (ROOT / "autograd_hacks").iterdir() if path.name != "py.typed"} <= set(counted)
