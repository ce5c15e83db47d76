"""Every public name has an example that runs: in a doctest, a notebook, a script of the gallery, or a tested recipe."""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_built_pages import set_in_conf

import autograd_hacks
from autograd_hacks import errors, forms, formulas
from autograd_hacks.forms import base

ROOT = Path(__file__).parent.parent
MADE = {"_build", "_generated", "gallery"}
RECIPES = {"integrations", "want.rst"}
"""Pages whose code blocks are run by tests/integrations and tests/verbs."""


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


def lacks(name: str, code: str) -> bool:
    return not re.search(rf"\b{name}\b", code)


def lacks_member(name: str, code: str) -> bool:
    return not re.search(rf"(?:\.|\bdef ){name}\b", code)


def test_every_public_name_has_an_example() -> None:
    names = [*autograd_hacks.__all__, *forms.__all__, *formulas.__all__]
    assert not [name for name in names if lacks(name, all_code())]


def test_every_documented_method_has_an_example() -> None:
    assert len([*documented()]) > 40
    missing = [
        f"{cls.__name__}.{name}" for cls, shown, _ in documented() for name in shown if lacks_member(name, all_code())
    ]
    assert not missing


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_raised_by_an_example(name: str) -> None:
    page = (ROOT / "docs" / "api" / "errors.rst").read_text()
    if name == "PerSampleGradientError":  # which the others derive from, and is caught
        assert f"except errors.{name} as error" in code_of(page)
    else:
        assert re.search(rf"^ +autograd_hacks\.errors\.{name}: ", page, re.M)


def test_what_has_no_example_is_found() -> None:
    code = code_of(">>> autograd_hacks.over(model)\ngrads.norms() in a sentence\n\n.. testcode::\n\n   grads.dot(v)\n")
    assert not lacks("over", code)
    assert lacks("ove", code)
    assert lacks_member("norms", code)
    assert not lacks_member("dot", code)
    block = ".. code-block:: python\n\n   grads.gram()\n"
    assert lacks_member("gram", code_of(block))
    assert not lacks_member("gram", code_of(block, with_blocks=True))


def test_what_a_page_lists_is_there_and_nothing_else_is_public() -> None:
    public = [thing(f"autograd_hacks.{name}") for name in autograd_hacks.__all__]
    for cls, shown, is_listed in documented():
        assert all(hasattr(cls, name) or name in getattr(cls, "__annotations__", {}) for name in shown), cls
        if is_listed and cls in public and not issubclass(cls, autograd_hacks.PerSampleGrads):
            assert own_names(cls) <= shown, f"{cls.__name__}: document these, or let them begin with an underscore"


def test_constructors_that_nobody_calls_are_not_shown() -> None:
    """Those of classes that are no public names: functions return them."""
    hidden = {node.value for node in ast.walk(set_in_conf("HANDED_OUT")) if isinstance(node, ast.Constant)}
    shown = {cls.__name__ for cls, *_ in documented()}
    constructed = {*autograd_hacks.__all__, *forms.__all__, *formulas.__all__, "At"} - {"PerSampleGrads", "PrivateStep"}
    assert hidden == shown - constructed


def test_forms_show_what_their_page_shows() -> None:
    ((_, shown, _),) = [found for found in documented() if found[0] is forms.Form]
    assert own_names(forms.Form) - base.INTERNAL == shown
    form = forms.Outer(torch.ones(2, 1, 3), torch.ones(2, 1, 4))
    assert {"left", "right", "norms", "samples", "shape"} <= {*dir(form)}
    assert not base.INTERNAL & {*dir(form)}
    assert all(hasattr(autograd_hacks.forms.Lookup, name) for name in base.INTERNAL), "gone: take it out of INTERNAL"
