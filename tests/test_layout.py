"""The package's layout: imports run one way, no file is long, and the reader's map names every module.

Imports under ``TYPE_CHECKING``, inside functions and by ``import_module`` count like any other.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from autograd_hacks import extending

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autograd_hacks"
ROOMS = ["integrations", "private", "curvature", "attribution", "check", "compiled", "distributed"]
"""Folders that could each be a package of its own.  The core doesn't import them."""
FLOORS = ["original", "extending", "verbs", "reading", "capture", "graph", "probe", "formulas", "forms"]
"""The core.  A file imports its own floor and those behind it; and `CELLAR`, as all do."""
DOORS = ["__init__.py", "extending.py", "forms/__init__.py", "formulas/__init__.py"]
"""What rooms import of the core."""
KEYS = {
    # Tools have several rooms in one, and use their faces.  Trainers say what private steps say of batches.
    "integrations": [
        *(f"{room}/__init__.py" for room in ("private", "curvature", "attribution", "compiled")),
        "private/poisson.py",
    ],
    # Compiled graphs are labelled by the laws of graph/, and the tapes of probe/ by labels: a second reader of both.
    "compiled": ["graph", "probe", "forms", "formulas", "capture/above.py", "reading/certificate.py"],
}
"""Floors and files that a room imports, too."""
CELLAR = ["support", "errors"]
"""Of the floors, these import nothing; support imports errors."""
ROOFS = ["__main__", "__init__"]
"""The commands, and the face: they import everything.  Nothing imports a command, and only commands and rooms the face."""
LONGEST = 450

Arrows = dict[str, set[str]]
"""Each module's path within the package, and those that it imports."""


@cache
def arrows(package: Path) -> Arrows:
    paths = {path.relative_to(package) for path in package.rglob("*.py")}
    modules = {".".join([package.name, *_names(path)]): path.as_posix() for path in paths}
    found: Arrows = {}
    for path in paths:
        folder = [package.name, *path.parent.parts]
        tree = ast.parse((package / path).read_text())
        found[path.as_posix()] = {modules[name] for names in _imported(tree, folder) if (name := _known(names, modules))}
    return found


def _names(path: Path) -> list[str]:
    return [*path.parent.parts, *([] if path.stem == "__init__" else [path.stem])]


def _imported(tree: ast.AST, folder: list[str]) -> Iterator[list[str]]:
    """All that is imported, each as the names that lead there; the last of them may be a name within a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) + 1 - node.level] if node.level else []
            for alias in node.names:
                yield [*base, *(node.module.split(".") if node.module else []), alias.name]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, what = node.func, node.args[0].value
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("import_module", "__import__") and isinstance(what, str):
                up = len(what) - len(what.lstrip("."))
                base = folder[: len(folder) + 1 - up] if up else []
                yield [*base, *what.lstrip(".").split(".")]


def _known(names: list[str], modules: dict[str, str]) -> str | None:
    """The longest of a.b.c, a.b and a that is a module of the package."""
    return next((name for end in range(len(names), 0, -1) if (name := ".".join(names[:end])) in modules), None)


def circles(found: Arrows) -> list[str]:
    """Modules that import themselves by way of others; those of one tangle in one line.

    The face has the core's names when it imports the rooms, which import them from it.
    """
    reached: Arrows = {}
    found = {module: imported - {"__init__.py"} for module, imported in found.items()}
    for module, imported in found.items():
        reached[module], ahead = set(), list(imported)
        while ahead:
            other = ahead.pop()
            if other not in reached[module]:
                reached[module].add(other)
                ahead += found[other]
    return sorted({" ".join(sorted(o for o in reached[m] if m in reached[o])) for m in found if m in reached[m]})


def floor_of(module: str) -> str:
    path = Path(module)
    return path.stem if path.stem == "__main__" or len(path.parts) == 1 else path.parts[0]


def arrows_back(found: Arrows) -> list[str]:
    """Imports of what lies in front, and whatever is on no floor."""
    order = [[roof] for roof in ROOFS] + [ROOMS] + [[floor] for floor in [*FLOORS, *CELLAR]]
    rank = {name: number for number, names in enumerate(order) for name in names}
    back = [f"{module} is on no floor" for module in found if floor_of(module) not in rank]
    for module, imported in found.items():
        for other in imported:
            here, there = floor_of(module), floor_of(other)
            is_face = here in ROOMS and other == "__init__.py"
            if here in rank and there in rank and rank[there] < rank[here] and not is_face:
                back.append(f"{module} imports {other}")
    return sorted(back)


def through_walls(found: Arrows) -> list[str]:
    """What rooms import of other rooms, or of the core but not by its doors."""
    return sorted(
        f"{module} imports {other}"
        for module, imported in found.items()
        for other in imported
        if (room := floor_of(module)) in ROOMS
        and floor_of(other) not in (room, *CELLAR, *KEYS.get(room, ()))
        and other not in (*DOORS, *KEYS.get(room, ()))
    )


def long_files(folder: Path) -> list[str]:
    lengths = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    return sorted(f"{path.relative_to(folder).as_posix()}: {n}" for path, n in lengths.items() if n > LONGEST)


def same_names(found: Arrows) -> list[str]:
    count = Counter(Path(module).stem for module in found)
    return sorted(module for module in found if count[Path(module).stem] > 1 and Path(module).stem not in ROOFS)


def differences(page: str, found: Arrows) -> list[str]:
    """Modules that the page doesn't name by their paths in the package, and paths of its floors that are no modules."""
    modules = {module for module in found if Path(module).stem not in ROOFS}
    named = set(re.findall(r"(?<![\w/])(?:\w+/)*\w+\.py\b", page))
    stale = {path for path in named - modules if path.split("/")[0] in (*ROOMS, *FLOORS, *CELLAR)}
    return sorted([f"{module} is not named" for module in modules - named] + [f"{path} is named" for path in stale])


@pytest.mark.parametrize("faults", [circles, arrows_back, through_walls, same_names])
def test_no_fault(faults: Callable[[Arrows], list[str]]) -> None:
    found = faults(arrows(PACKAGE))
    assert not found, "\n".join(found)


def test_rooms_use_all_that_extenders_get() -> None:
    files = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    used = {names[2] for path in files for names in _imported(ast.parse(path.read_text()), []) if "extending" in names}
    assert used == set(extending.__all__)


@pytest.mark.parametrize("folder", ["autograd_hacks", "tests"])
def test_no_file_is_long(folder: str) -> None:
    found = long_files(ROOT / folder)
    assert not found, "\n".join(found)


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports a test by its file's name: of two with one name it collects one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]


def test_the_readers_map_names_every_module() -> None:
    found = differences((ROOT / "docs" / "design.rst").read_text(), arrows(PACKAGE))
    assert not found, "\n".join(found)
