"""What docs/knock_outs.rst says of other tools is what the script finds, and `check_rows` sees each case."""

import os
import re
import subprocess
import sys
from pathlib import Path

import knock_outs
import pytest

NUMBER = re.compile(r"\d\.\de[+-]\d+")
SILENT = {
    "experts": {"bergson": "not given", "kronfluence": "VerificationFailed"},
    "positions": {"Opacus": r"ValueError: .*\(1, 16, 16\)|VerificationFailed: check_rows found wrong norms"},
    "adapters": {"Opacus": r"65\.9 %"},
    "twice": {"Opacus": r"table\.weight.*wrong: 4 of 4 samples"},
}
"""What check_rows says of tools that say nothing, by case."""


def parts(page: str) -> dict[str, str]:
    """What a page says of each tool, by its name and version, without digits of errors."""
    names = "|".join([*knock_outs.TOOLS.values(), "torch", "autograd_hacks"])
    found = re.split(rf"^((?:{names}) ?[\d.]*, [^:\n]+): ", page, flags=re.M)
    return {title: NUMBER.sub("#", text).strip() for title, text in zip(found[1::2], found[2::2])}


def page_of(case: str) -> str:
    """What the script makes in a process of its own: tools keep settings, which other tests may have changed."""
    command = [sys.executable, "-W", "ignore", "-c", "import sys, knock_outs; print(knock_outs.page(sys.argv[1]))", case]
    where = os.pathsep.join([str(Path(knock_outs.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": where})
    assert not ran.returncode, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", knock_outs.CASES)
@pytest.mark.filterwarnings("ignore")  # tools' own, when they are imported
def test_the_page_says_what_the_tools_do(case: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("opacus")
    written = (knock_outs.FOLDER / f"{case}.txt").read_text()
    page = page_of(case)
    found, shown = parts(page), parts(written)
    for tool, says in SILENT[case].items():
        of_tool = {title: text for title, text in found.items() if title.startswith(tool)}
        for title, text in of_tool.items():
            assert re.search(says, text), f"{title}: {text}"
            assert text.startswith("no error"), f"{title}: {text}"
        assert any(title.startswith(tool) for title in shown)
    assert found["autograd_hacks, add_hooks"].startswith("no error, no warning\nright: 4 samples, attributed: 100 %")
    if page.split(", ")[1:4] == written.split(", ")[1:4]:  # the versions
        assert {title: text for title, text in shown.items() if title in found} == found, "run benchmarks/knock_outs.py"


def test_all_tools_are_on_the_page() -> None:
    text = "".join((knock_outs.FOLDER / f"{case}.txt").read_text() for case in knock_outs.CASES)
    assert all(re.search(rf"^{tool} \d", text, re.M) for tool in knock_outs.TOOLS.values())
