"""The public face is documented, has an example that runs, and nothing else is public."""

import ast
import importlib
import inspect
import json
import re
import types
from abc import ABCMeta
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_built_pages import set_in_conf

import autograd_hacks
from autograd_hacks import errors, forms, formulas, original
from autograd_hacks.forms import base
from autograd_hacks.support.display import ELSEWHERE
from autograd_hacks.verbs.matrix import INTERNAL

ROOT = Path(__file__).parent.parent


ROOMS = [autograd_hacks.attribution, autograd_hacks.check, autograd_hacks.compiled, autograd_hacks.curvature]
ROOMS.append(autograd_hacks.private)


def public() -> dict[str, Any]:
    """What users take of the package and of its rooms, {"private.PrivateTraining": the class}, each once."""
    found: dict[str, Any] = {}
    for module in (autograd_hacks, *ROOMS):
        prefix = module.__name__.partition(".")[2]
        own = {f"{prefix}.{name}".lstrip("."): getattr(module, name) for name in module.__all__}
        found |= {name: x for name, x in own.items() if x not in ROOMS and x not in found.values()}
    return found


def test_every_public_name_is_documented() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    others = {
        f"{own.__name__.partition('.')[2]}.{n}": getattr(own, n) for own in (forms, formulas, original) for n in own.__all__
    }
    for name, thing in (public() | others).items():
        assert re.search(rf"\bautograd_hacks\.{name.removeprefix('original.')}\b", reference), name
        if inspect.ismodule(thing) or inspect.isfunction(thing) or type(thing) in (type, ABCMeta):
            assert thing.__doc__, name


def tiers(page: str) -> dict[str, str]:
    """The tier of each name.  Raises ValueError for a name in two of them."""
    found: dict[str, str] = {}
    for title, text in re.findall(r"^(Stable|Provisional)\n-+\n(.*?)(?=^\w[^\n]*\n---)", page, re.M | re.S):
        for name in re.findall(r"(?<!`)`autograd_hacks\.([\w.]+)`", text):
            if name in found:
                raise ValueError(f"{name} stands twice")
            found[name] = title
    return found


def test_every_public_name_stands_in_one_tier() -> None:
    page = (ROOT / "docs" / "api" / "tiers.rst").read_text()
    found = tiers(page)
    assert set(found) == set(public())
    assert found["add_hooks"] == "Stable"
    assert found["compile"] == "Provisional"
    with pytest.raises(ValueError, match="add_hooks stands twice"):
        tiers(page.replace("`autograd_hacks.over`", "`autograd_hacks.add_hooks`"))


def test_nothing_else_is_public() -> None:
    modules = {name for name, thing in vars(autograd_hacks).items() if isinstance(thing, types.ModuleType)}
    names = {name for name in vars(autograd_hacks) if not name.startswith("_")}
    assert names - modules == {*autograd_hacks.__all__, *original.__all__} - modules
    assert set(autograd_hacks.__all__) <= names


def test_tab_completion_shows_the_public_names_alone() -> None:
    assert {name for name in dir(autograd_hacks) if not name.startswith("__")} == set(autograd_hacks.__all__)
    shown = {name for name in dir(autograd_hacks.PerSampleGrads) if not name.startswith("_")}
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with autograd_hacks.add_hooks(model):
        model(x).sum().backward()
        grads = autograd_hacks.per_sample_grads(model)
    known = {name for name in dir(grads) if not name.startswith("_")}
    assert {"norms", "gram", "dot", "weighted_sum", "items"} <= shown & known
    assert not known & INTERNAL
    assert all(hasattr(grads, name) for name in INTERNAL), "gone: take it out of INTERNAL"
    page = (ROOT / "docs" / "api" / "reading.rst").read_text()
    methods = sorted(name for name in INTERNAL if callable(getattr(autograd_hacks.PerSampleGrads, name, None)))
    assert f":exclude-members: {', '.join(methods)}" in page


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("norms", "per_sample_grads(model).norms()"),
        ("clip", "clip_grad1_norm_(model, max_norm)"),
        ("norm", "per_sample_grads(model).norms()"),
        ("per_sample_gradients", "compute_grad1(model), which sets param.grad1"),
        ("verifies", "verify"),
    ],
)
def test_a_name_that_is_not_there(name: str, call: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(autograd_hacks, name)
    assert str(raised.value).endswith(f"has no attribute {name!r}. Did you mean autograd_hacks.{call}?")


def test_names_of_rooms_are_found_without_their_room() -> None:
    assert autograd_hacks.Store is autograd_hacks.attribution.Store
    assert "Store" not in dir(autograd_hacks)


def test_names_without_a_hint() -> None:
    for name in ("zzz", "_zzz", "sys", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"has no attribute {name!r}$"):
            getattr(autograd_hacks, name)
    assert not hasattr(autograd_hacks, "__wrapped__")


def test_what_is_suggested_is_there() -> None:
    assert all(call.partition("(")[0] in public() for call in ELSEWHERE)


def test_the_version_stands_in_one_place() -> None:
    assert f"\n{autograd_hacks.__version__} (" in (ROOT / "CHANGELOG.rst").read_text()
    assert "\nversion = attr: autograd_hacks.__version__\n" in (ROOT / "setup.cfg").read_text()
    others = [ROOT / "setup.py", ROOT / "README.rst", *ROOT.glob("docs/*.py"), *ROOT.glob("autograd_hacks/*/*.py")]
    assert not [path.name for path in others if autograd_hacks.__version__ in path.read_text()]


# Every public name has an example that runs: in a doctest, a notebook, a script of the gallery, or a tested recipe


MADE = {"_build", "_generated", "gallery"}
RECIPES = {"integrations", "want.rst"}
"""Pages whose code blocks are run by tests/integrations."""


def code_of(page: str, with_blocks: bool = False) -> str:
    """What of a page is run.  with_blocks: its code blocks, too"""
    lines = re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", page, re.M)
    directives = "testcode" + ("|code-block:: python" if with_blocks else "")
    blocks = re.findall(rf"^ *\.\. (?:{directives})[^\n]*\n((?: +[^\n]*\n|\n)+)", page, re.M)
    return "\n".join([*lines, *blocks])


@cache
def all_code() -> str:
    pages = [ROOT / "README.rst", *(path for path in (ROOT / "docs").rglob("*.rst") if not MADE & {*path.parts})]
    found = [code_of(page.read_text(), bool(RECIPES & {page.name, page.parent.name})) for page in pages]
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        found += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found += [script.read_text() for script in (ROOT / "docs" / "examples").glob("*.py")]
    return "\n".join(found)


def thing(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def own_names(cls: type) -> set[str]:
    """The public names of a class that the package has defined, with methods and attributes alike."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("autograd_hacks")]
    return {name for own in ours for name in vars(own) if not name.startswith("_")}


def documented() -> Iterator[tuple[type, set[str], bool]]:
    """Each class of the reference with the members that its page shows, and whether these are listed one by one."""
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        for path, options in re.findall(r"^\.\. autoclass:: (\S+)\n((?:   :[^\n]*\n)*)", page.read_text(), re.M):
            cls, given = thing(path), dict(re.findall(r":([\w-]+): ?(.*)", options))
            listed = set(filter(None, re.split(r",\s*", given.get("members", ""))))
            left_out = set(re.split(r",\s*", given.get("exclude-members", "")))
            has_docs = {name for name in own_names(cls) if inspect.getdoc(inspect.getattr_static(cls, name))}
            fields = set(getattr(cls, "_fields", ())) | set(getattr(cls, "__dataclass_fields__", ()))
            yield cls, listed or (has_docs - left_out - fields if "members" in given else set()), bool(listed)


def test_every_public_name_has_an_example() -> None:
    names = [*public(), *forms.__all__, *formulas.__all__, *original.__all__]
    assert not {name.rpartition(".")[2] for name in names} - {*re.findall(r"\w+", all_code())}


def test_every_documented_method_has_an_example() -> None:
    assert len([*documented()]) > 40
    named = {*re.findall(r"(?:\.|\bdef )(\w+)", all_code())}
    assert not [f"{cls.__name__}.{name}" for cls, shown, _ in documented() for name in shown - named]


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_raised_by_an_example(name: str) -> None:
    page = (ROOT / "docs" / "api" / "errors.rst").read_text()
    if name == "PerSampleGradientError":  # which the others derive from, and is caught
        assert f"except errors.{name} as error" in code_of(page)
    else:
        assert re.search(rf"^ +autograd_hacks\.errors\.{name}: ", page, re.M)


def test_what_a_page_lists_is_there_and_nothing_else_is_public() -> None:
    for cls, shown, is_listed in documented():
        assert all(hasattr(cls, name) or name in getattr(cls, "__annotations__", {}) for name in shown), cls
        if is_listed and cls in public().values() and not issubclass(cls, autograd_hacks.PerSampleGrads):
            assert own_names(cls) <= shown, f"{cls.__name__}: document these, or let them begin with an underscore"


def test_constructors_that_nobody_calls_are_not_shown() -> None:
    """Those of classes that are no public names: functions return them."""
    hidden = {node.value for node in ast.walk(set_in_conf("HANDED_OUT")) if isinstance(node, ast.Constant)}
    shown = {cls.__name__ for cls, *_ in documented()}
    constructed = {*(name.rpartition(".")[2] for name in public()), *forms.__all__, *formulas.__all__, "At"}
    assert hidden == shown - (constructed - {"PerSampleGrads", "PrivateStep", "EKFAC", "KFAC"})


def test_forms_show_what_their_page_shows() -> None:
    ((_, shown, _),) = [found for found in documented() if found[0] is forms.Form]
    assert own_names(forms.Form) - base.INTERNAL == shown
    form = forms.Outer(torch.ones(2, 1, 3), torch.ones(2, 1, 4))
    assert {"left", "right", "norms", "samples", "shape"} <= {*dir(form)}
    assert not base.INTERNAL & {*dir(form)}
    assert all(hasattr(autograd_hacks.forms.Lookup, name) for name in base.INTERNAL), "gone: take it out of INTERNAL"
