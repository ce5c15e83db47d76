"""The public face is documented, and nothing else is public."""

import inspect
import re
import types
from abc import ABCMeta
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import autograd_hacks
from autograd_hacks.support.display import MEANT
from autograd_hacks.verbs.matrix import INTERNAL

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_documented() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    for module in (autograd_hacks, autograd_hacks.forms, autograd_hacks.formulas):
        for name in module.__all__:
            thing = getattr(module, name)
            assert re.search(rf"\b{module.__name__}\.{name}\b", reference), name
            if inspect.ismodule(thing) or inspect.isfunction(thing) or type(thing) in (type, ABCMeta):
                assert thing.__doc__, name


def tiers(page: str) -> dict[str, str]:
    """The tier of each name.  Raises ValueError for a name in two of them."""
    found: dict[str, str] = {}
    for title, text in re.findall(r"^(Stable|Provisional)\n-+\n(.*?)(?=^\w[^\n]*\n---)", page, re.M | re.S):
        for name in re.findall(r"(?<!`)`autograd_hacks\.(\w+)`", text):
            if name in found:
                raise ValueError(f"{name} stands twice")
            found[name] = title
    return found


def test_every_public_name_stands_in_one_tier() -> None:
    page = (ROOT / "docs" / "api" / "tiers.rst").read_text()
    found = tiers(page)
    assert set(found) == set(autograd_hacks.__all__)
    assert found["add_hooks"] == "Stable"
    assert found["compile"] == "Provisional"
    with pytest.raises(ValueError, match="add_hooks stands twice"):
        tiers(page.replace("`autograd_hacks.over`", "`autograd_hacks.add_hooks`"))


def test_nothing_else_is_public() -> None:
    modules = {name for name, thing in vars(autograd_hacks).items() if isinstance(thing, types.ModuleType)}
    public = {name for name in vars(autograd_hacks) if not name.startswith("_")}
    assert public - modules == set(autograd_hacks.__all__) - modules
    assert set(autograd_hacks.__all__) <= public


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
        ("grad_sample", "compute_grad1(model), which sets param.grad1"),
        ("per_sample_gradients", "compute_grad1(model), which sets param.grad1"),
        ("verifies", "verify"),
    ],
)
def test_a_name_that_is_not_there(name: str, call: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(autograd_hacks, name)
    assert str(raised.value).endswith(f"has no attribute {name!r}. Did you mean autograd_hacks.{call}?")


def test_a_hint_at_an_integration_is_a_line_to_paste() -> None:
    with pytest.raises(AttributeError) as raised:
        autograd_hacks.PrivacyEngine  # noqa: B018
    line = str(raised.value).partition("Did you mean this: ")[2].rstrip("?")
    assert line == "from autograd_hacks.integrations.opacus import PrivacyEngine"
    pytest.importorskip("opacus")
    exec(line)


def test_names_without_a_hint() -> None:
    for name in ("zzz", "_zzz", "sys", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"has no attribute {name!r}$"):
            getattr(autograd_hacks, name)
    assert not hasattr(autograd_hacks, "__wrapped__")


def test_what_is_suggested_is_there() -> None:
    tried = [name for names in MEANT.values() for name in names]
    assert len(tried) == len(set(tried))
    assert not set(tried) & set(autograd_hacks.__all__)
    for call in MEANT:
        name, *verb = re.findall(r"(\w+)\(", call.split(",")[0] + ")") or [""]
        assert call.startswith("integrations.") or name in autograd_hacks.__all__
        assert all(hasattr(autograd_hacks.PerSampleGrads, own) for own in verb)


def test_the_version_stands_in_one_place() -> None:
    assert f"\n{autograd_hacks.__version__} (" in (ROOT / "CHANGELOG.rst").read_text()
    assert "\nversion = attr: autograd_hacks.__version__\n" in (ROOT / "setup.cfg").read_text()
    others = [ROOT / "setup.py", ROOT / "README.rst", *ROOT.glob("docs/*.py"), *ROOT.glob("autograd_hacks/*/*.py")]
    assert not [path.name for path in others if autograd_hacks.__version__ in path.read_text()]
