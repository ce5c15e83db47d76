"""How Sphinx builds the pages."""

import importlib.metadata
import pathlib

from autograd_hacks.rules import RULES

project = "autograd_hacks"
copyright = "2026, the autograd_hacks developers"
release = importlib.metadata.version("autograd-hacks")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest"]
html_theme = "alabaster"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "any"
doctest_global_setup = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import autograd_hacks
_ = torch.manual_seed(0)
"""
exclude_patterns = ["_build", "_generated"]
nitpicky = False


def write_support_table() -> None:
    """The support list, from `autograd_hacks.rules.RULES` to a page."""
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - Layer", "     - Rule"]
    for layer, rule in RULES.items():
        says = " ".join((rule.__doc__ or "").split()).replace("*", "\\*").replace("`", "\\`")
        lines += [f"   * - ``{layer.__name__}``", f"     - {says}"]
    folder = pathlib.Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "support.rst").write_text("\n".join(lines) + "\n")


write_support_table()
