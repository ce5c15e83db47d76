"""How Sphinx builds the pages."""

import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import sys
import urllib.request

import torch
from sphinx.application import Sphinx

from autograd_hacks.formulas import RULES

project = "autograd_hacks"
copyright = "2026, the autograd_hacks developers"
release = importlib.metadata.version("autograd-hacks")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
extensions = [
    "twins",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinx_markdown_builder",
]
html_theme = "furo"
html_title = "autograd_hacks"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
# Furo's own, and the list of versions, which build.py makes.
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html", "sidebar/navigation.html"),
        *("versions.html", "sidebar/scroll-end.html", "sidebar/variant-selector.html"),
    ]
}
html_theme_options = {"top_of_page_buttons": []}
html_show_sphinx = False
pygments_style, pygments_dark_style = "tango", "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
# The examples run where their pictures are wanted: by tox -e gallery, with -D plot_gallery=1.
plot_gallery = "0"
sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"private_processes\.py$",
    "within_subsection_order": "FileNameSortKey",
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "capture_repr": (),
    "write_computation_times": False,
    "show_signature": False,
    "image_srcset": ["2x"],
    "thumbnail_size": (600, 440),  # the size of docs/pictures, and twice what site.css gives them
}
maximum_signature_line_length = 78
python_use_unqualified_type_names = True
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
exclude_patterns = ["_build", "_templates", "_generated", "examples", "gallery/*.ipynb"]
# The notebook is run by every build, and fails it where a cell fails.
nb_execution_mode, nb_execution_raise_on_error, nb_execution_show_tb = "force", True, True
nb_execution_timeout = 120
os.environ.setdefault("TQDM_DISABLE", "1")  # pages have no use for progress
# What cells have printed or drawn, in the Markdown twins.
nb_mime_priority_overrides = [("markdown", "image/png", 10), ("markdown", "text/plain", 20)]
# Formulas between dollar signs, in notebooks.
myst_enable_extensions = ["dollarmath"]
nitpicky = False


def write_support_table() -> None:
    """The support list, from `autograd_hacks.formulas.RULES` to a page."""
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 30 70", "", "   * - Layer", "     - Rule"]
    for formula in dict.fromkeys(rule.formula for rule in RULES.values()):
        layers = ", ".join(f"``{layer.__name__}``" for layer, rule in RULES.items() if rule.formula is formula)
        says = " ".join(re.sub(" {3,}(?=\\S)", "; ", (formula.__doc__ or "").replace("\n    ", "\n")).split())
        lines += [f"   * - {layers}", f"     - {says}".replace("*", "\\*").replace("`", "\\`")]
    folder = pathlib.Path(__file__).parent / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "support.rst").write_text("\n".join(lines) + "\n")


def write_benchmark() -> None:
    """The tables of every machine whose figures are in ``docs/benchmark``, and charts of models on a CPU."""
    here = pathlib.Path(__file__).parent
    sys.path.insert(0, str(here.parent / "benchmarks"))
    import report

    pages = []
    for file in sorted((here / "benchmark").glob("*.json"), key=lambda file: file.stem):
        data, charts = json.loads(file.read_text()), {}
        drawn = data["about"]["device"] == "cpu" and not file.stem.endswith("uses")
        for title, results in data["results"].items() if drawn else ():
            for name, result in results.items():
                picture = charts.setdefault(title, {})[name] = f"_generated/{report.chart_name(file.stem, title, name)}"
                report.chart(result, here / picture)
                report.chart(result, here / report.dark(picture), report.DARK)
        pages.append(report.page(data, charts))
    (here / "_generated" / "benchmark.rst").write_text("\n".join(pages))


def parameters(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Makes a list of what a docstring says of parameters: "rate, damping: both > 0    steps: how many"."""
    try:
        known = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return
    written, within = [], False
    for line in re.split(r"\n| {3,}(?=\w[\w, ]*: )", "\n".join(lines)):
        names, colon, says = line.partition(": ")
        if colon and set(names.split(", ")) <= known:
            written += [] if within else [""]
            written.append(f":param {names.replace(' ', '')}: {says}")
            within = True
        else:
            if within and re.match("Raises |Returns |Source: ", line):
                written.append("")
                within = False
            within = within and bool(line)
            written.append(f"    {line}" if within else line)
    lines[:] = written


HANDED_OUT = {
    *("PerSampleGrads", "Hooked", "Accumulation", "Quantities", "CompiledStep", "Labels", "EKFAC", "KFAC", "Coverage"),
    *("PrivateStep", "CheckedRows", "CheckedParameter", "Description", "Row", "NoiseScale"),
}
"""Classes that functions return and nobody constructs: their constructors' arguments are not shown."""


def signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, arguments: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    return ("", returned) if what == "class" and name.rpartition(".")[2] in HANDED_OUT else None


def inventories() -> dict[str, tuple[str, str]]:
    """The names in torch's and Python's pages, to link to: fetched; without a network an earlier build's, or none."""
    found = {}
    for name, site in {"torch": "https://docs.pytorch.org/docs/stable", "python": "https://docs.python.org/3"}.items():
        kept = pathlib.Path(__file__).parent / "_generated" / f"{name}.inv"
        try:
            with urllib.request.urlopen(f"{site}/objects.inv", timeout=5) as answer:
                names = answer.read()
        except OSError:
            names = b""
        if names.startswith(b"# Sphinx inventory"):
            kept.write_bytes(names)
        if kept.exists():
            found[name] = (site, str(kept))
    return found


torch.nn.Module.__module__ = "torch.nn"  # the name that torch's pages have it by
write_support_table()
write_benchmark()
intersphinx_mapping = inventories()


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", parameters)
    app.connect("autodoc-process-signature", signature)
