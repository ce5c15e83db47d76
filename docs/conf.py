"""How Sphinx builds the pages."""

import importlib.metadata
import json
import pathlib
import re
import sys

from autograd_hacks.rules import RULES

project = "autograd_hacks"
copyright = "2026, the autograd_hacks developers"
release = importlib.metadata.version("autograd-hacks")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1200px"}
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
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 30 70", "", "   * - Layer", "     - Rule"]
    for formula in dict.fromkeys(rule.formula for rule in RULES.values()):
        layers = ", ".join(f"``{layer.__name__}``" for layer, rule in RULES.items() if rule.formula is formula)
        says = " ".join(re.sub(" {3,}(?=\\S)", "; ", (formula.__doc__ or "").replace("\n    ", "\n")).split())
        lines += [f"   * - {layers}", f"     - {says}".replace("*", "\\*").replace("`", "\\`")]
    folder = pathlib.Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "support.rst").write_text("\n".join(lines) + "\n")


def write_benchmark() -> None:
    """The tables and charts of every machine whose figures are in ``docs/benchmark``."""
    here = pathlib.Path(__file__).parent
    sys.path.insert(0, str(here.parent / "benchmarks"))
    import report

    pages = []
    for file in sorted((here / "benchmark").glob("*.json")):
        data = json.loads(file.read_text())
        charts = {task: f"_generated/{report.chart_name(file.stem, task)}" for task in data["results"]}
        for task, chart in charts.items():
            report.chart(data, task, here / chart)
        pages.append(report.page(data, charts))
    (here / "_generated" / "benchmark.rst").write_text("\n".join(pages))


write_support_table()
write_benchmark()
