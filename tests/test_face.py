"""The public face is documented, and nothing else is public."""

import inspect
import re
import types
from abc import ABCMeta
from pathlib import Path

import autograd_hacks

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_documented() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    for module in (autograd_hacks, autograd_hacks.forms, autograd_hacks.rules):
        for name in module.__all__:
            thing = getattr(module, name)
            assert re.search(rf"\b{module.__name__}\.{name}\b", reference), name
            if inspect.ismodule(thing) or inspect.isfunction(thing) or type(thing) in (type, ABCMeta):
                assert thing.__doc__, name


def test_nothing_else_is_public() -> None:
    modules = {name for name, thing in vars(autograd_hacks).items() if isinstance(thing, types.ModuleType)}
    public = {name for name in vars(autograd_hacks) if not name.startswith("_")}
    assert public - modules == set(autograd_hacks.__all__) - modules
    assert set(autograd_hacks.__all__) <= public


def test_the_version_stands_in_one_place() -> None:
    assert f"\n{autograd_hacks.__version__} (" in (ROOT / "CHANGELOG.rst").read_text()
    assert "\nversion = attr: autograd_hacks.__version__\n" in (ROOT / "setup.cfg").read_text()
    others = [ROOT / "setup.py", ROOT / "README.rst", *ROOT.glob("docs/*.py"), *ROOT.glob("autograd_hacks/*/*.py")]
    assert not [path.name for path in others if autograd_hacks.__version__ in path.read_text()]
