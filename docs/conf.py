"""How Sphinx builds the pages."""

import importlib.metadata

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
exclude_patterns = ["_build"]
nitpicky = False
