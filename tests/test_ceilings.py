"""Sizes that may only fall, and what must be gone when each node of autograd has a law of its own.

Statements are counted, not lines, so nobody joins lines or cuts docstrings to stay below a ceiling.
"""

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

import pytest
from test_layout import ROOMS

import autograd_hacks

ROOT = Path(__file__).parent.parent
CEILINGS = {"core": 14338, "rooms": 4572, "tests": 20590, "benchmarks": 1740}
"""The largest numbers of statements.  Lower them when statements go; what moves takes its share along."""
SLACK = 100
"""A ceiling must be less than this above the number, so that what was removed can't grow again."""
NAMES = 16
"""The largest number of public names, beside modules."""

GONE = {
    "capture/by_part.py": "PartCall _adds_up _added check_cut check_forward _is_context_parallel refuse_parts",
    "capture/forward.py": "Noted Repeated _is_one Forward",
    "capture/side_doors.py": "watch _Doors _differ _tensors_in",
    "capture/same_graph.py": "SameGraph remember recall _sizes _laid_out",
    "probe/plan.py": "Place Steady Plan is_milestone is_second_try is_power_of_two",
    "probe/planner.py": "Known Planner uncovered _is_ragged is_time_first",
    "probe/routes.py": "Routes places_left kinds_in axes_of moves_as_proven moved_by has_choosing _dealt _keeps_places",
    "reading/created.py": "follow _follow_call _take_apart _is_labelled _inside _meetings _above _verdict _computed _proven",
    "reading/outside.py": "read_losses _read come_apart check_losses",
    "reading/checkpoints.py": "Inside look_inside _again _read _proven",
    "reading/inner_losses.py": "frontier sums_samples _down _is_apart",
    "reading/adding_up.py": "check_totals check_documents _untold _passes _compared",
    "reading/proof.py": "prove _prove kept_where_open grads_kept past_zeros place_by_sizes hypotheses leave_out_mixed fill",
    "reading/labelling.py": "Hypothesis Found Passes _view_of usual_layouts _has_numbers_of _like_meetings _are_rows_of",
    "rules/rule.py": "Call is_recomputed needs_batch Rule single_input positionwise",
    "rules/table.py": "rule_for covered parts_of_composites axes_for is_supported register_rule",
    "rules/linear.py": "product added linear transposed_linear bilinear prelu linear_cross_entropy",
    "rules/conv.py": "conv convolution transposed_convolution",
    "support/reach.py": "Holder Reach _refused _is_iterator _mentioned slots_of _content_of_cell _set_all _fill_cell refill",
    "support/untouched.py": "Aside untouched",
    "verbs/hooking.py": "Hooked add_hooks _why_unshown _why_not_by_tape _check_tape",
    "verbs/leaks.py": "check_values _replaced _are_same",
    "distributed/cut.py": "cuts_of over_samples refuse_curvature whole_sum whole_norms each_norms _by_groups over_stages",
    # Classes, with some of their members.
    "Plan": "AGAIN place_of set_place is_due keeps_arrived has_opened zeros steady",
    "Place": "kind layouts is_decided was_empty is_unseen",
    "Routes": "are_chosen rows _of _known _below _above",
    "Keys": "names below of with_all_behind _of _made",
    "Repeated": "fields place rule shape owned of holds",
}
"""Files and classes of the package that one law per node replaces, each with what it defines.

A file or class that defines most of the same is the same under another name, so it isn't gone.
"""


def statements(folders: Iterable[Path]) -> int:
    """The number of statements in a list of files, or in the files of folders."""
    paths = [path for own in folders for path in ([own] if own.suffix else own.rglob("*.py"))]
    return sum(isinstance(node, ast.stmt) for path in paths for node in ast.walk(ast.parse(path.read_text())))


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


def members(body: Iterable[ast.stmt]) -> set[str]:
    """The names of functions, classes and annotated fields, with the attributes that ``__init__`` sets."""
    found = set[str]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            targets = [target for at in ast.walk(node) if isinstance(at, ast.Assign) for target in at.targets]
            flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
            found |= {one.attr for one in flat if isinstance(one, ast.Attribute)}
    return found


def definitions(package: Path) -> dict[str, set[str]]:
    """What each file and class of a package defines; classes are named "file: class"."""
    found = {}
    for path in package.rglob("*.py"):
        module, place = ast.parse(path.read_text()), path.relative_to(package).as_posix()
        classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        found |= {place: members(module.body)} | {f"{place}: {own.name}": members(own.body) for own in classes}
    return found


def still_there(name: str, found: dict[str, set[str]]) -> list[str]:
    """The files, or the core's classes, that are the one of `GONE`, or the same under another name."""
    wanted, is_file = set(GONE[name].split()), name.endswith(".py")
    alike = [at for at, own in found.items() if at.split(": ")[-1] == name or len(wanted & own) > max(1, len(wanted) / 2)]
    return [at for at in alike if at.endswith(".py") is is_file and (is_file or at.split("/")[0] not in ROOMS)]


def test_no_floor_is_above_its_ceiling() -> None:
    wrong = wrong_ceilings({name: statements(paths) for name, paths in floors().items()}, CEILINGS)
    assert not wrong, "\n".join(wrong)


def test_public_names() -> None:
    assert sum(not inspect.ismodule(getattr(autograd_hacks, name)) for name in autograd_hacks.__all__) <= NAMES


@pytest.fixture(scope="module")
def defined() -> dict[str, set[str]]:
    return definitions(ROOT / "autograd_hacks")


@pytest.mark.parametrize("name", GONE)
def test_gone(name: str, defined: dict[str, set[str]]) -> None:
    found = still_there(name, defined)
    assert not found, f"{name} is still there: {', '.join(found)}"


# The tests' own tests.


def test_every_file_of_the_package_has_one_ceiling() -> None:
    counted = [path for name in ("core", "rooms") for path in floors()[name]]
    assert len(counted) == len(set(counted))
    assert {path for path in (ROOT / "autograd_hacks").iterdir() if path.name != "py.typed"} <= set(counted)
