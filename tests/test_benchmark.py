"""The benchmark's machinery, on a tiny model; no time is asserted."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cards
import knock_outs
import measuring
import pytest
import report
import run
import torch
import uses
from given import given
from measuring import Case, checked, measured
from rarely import rarely
from systems import trainable
from tables import TABLES, Table
from ways import WAYS, installed_version, is_ours
from workloads import Workload, classification, multilayer, of_shape

CPU = torch.device("cpu")
TINY_MODEL = Workload(
    multilayer(6, 5, 3), of_shape(4, 6), lambda model, batch: classification(model, {**batch, "y": batch["y"] % 3})
)
NAME, TITLE = "tiny model", "A table"
CLIP, SKIPPED, VMAP = "clip: ours", "rows: ours, param_grad=False", "rows: vmap(grad)"


def broken(workload, model):
    raise NotImplementedError("not for this\nmodel")


def wrong(workload, model):
    step = WAYS["rows: ours"](workload, model)
    return lambda batch: {name: 1.01 * rows for name, rows in step(batch).items()}


def found(ways, workload=TINY_MODEL, **more):
    failures = {}
    return checked(Case(workload, tuple(ways), **more), CPU, failures, None), failures


def write(monkeypatch, folder, *options, **tables):
    monkeypatch.setattr(run, "TABLES", tables)
    monkeypatch.setattr(report, "chart", lambda result, path: None)  # takes longest, and has its own test
    run.main(["--rounds", "2", "--threads", "1", "--output", str(folder), *options])
    (file,) = folder.glob("*.json")
    data = json.loads(file.read_text())
    assert file.with_suffix(".txt").read_text() == report.text(data)
    return data


def test_tables_name_ways_that_there_are():
    asked = {way for own in TABLES.values() for way in own.ways + own.peers}
    assert asked <= set(WAYS)
    assert {way for way in WAYS if is_ours(way)} <= asked | {"norms: ours"}
    assert all(name in TABLES[title].models() for title in TABLES for name in TABLES[title].cases(True))


@pytest.mark.parametrize("what", ["rows", "norms", "clip"])
def test_ways_agree_with_the_loop(what):
    ways = {way for way in WAYS if way.startswith(f"{what}:")}
    usual = {way for way in ways if "BackPACK" not in way and "Opacus" not in way and "compiled" not in way}
    errors, failures = found(sorted(usual))
    assert failures == {}
    assert max(errors.values()) < 1e-9
    assert {way for way in usual if is_ours(way)} <= set(errors)


def test_what_fails_or_is_wrong_is_said(monkeypatch):
    for name, maker in {"rows: broken": broken, SKIPPED: wrong, "rows: empty": WAYS["plain"]}.items():
        monkeypatch.setitem(WAYS, name, maker)
    errors, failures = found(["rows: broken", SKIPPED, "rows: empty"])
    assert errors == {}
    assert failures == {
        "rows: broken": "NotImplementedError: not for this",
        SKIPPED: "AssertionError: wrong on 0.weight",
        "rows: empty": "ValueError: nothing for the parameter 0.weight",
    }


def test_the_library_being_wrong_ends_the_run_with_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(WAYS, SKIPPED, wrong)
    with pytest.raises(SystemExit, match="tiny model: rows: ours, param_grad=False: AssertionError: wrong on 0"):
        write(monkeypatch, tmp_path, a=Table(lambda: {NAME: TINY_MODEL}, ("plain", SKIPPED)))
    assert "wrong on 0.weight" in capsys.readouterr().out


def test_from_figures_to_table_page_and_chart(tmp_path, monkeypatch):
    monkeypatch.setitem(WAYS, "rows: ExpandedWeights", broken)
    chart, ways = report.chart, ("plain", "write once", "rows: ours", SKIPPED)
    table = Table(lambda: {NAME: TINY_MODEL, "same": TINY_MODEL}, ways, (VMAP, "rows: ExpandedWeights"))
    data = write(monkeypatch, tmp_path, "--peers", **{TITLE: table})
    result = data["results"][TITLE][NAME]
    assert {way: len(own) for way, own in result["seconds"].items()} == dict.fromkeys((*ways, VMAP), 2)
    assert [len(result["first"][way]) for way in ("plain", SKIPPED)] == [1, measuring.MODELS]
    assert set(result["peak MB"]) == set(ways)
    picture = tmp_path / report.chart_name("cpu", TITLE, NAME)
    chart(result, picture)
    drawn = picture.read_bytes()
    assert b"<svg" in drawn
    chart(result, picture)
    assert picture.read_bytes() == drawn  # so that pages change with figures alone
    page = report.page(data, {TITLE: {NAME: "a.svg", "same": "b.svg"}})
    assert all(f"image:: {name}{ground}.svg" in page for name in "ab" for ground in ("", "-dark"))
    for words in (report.text(data), page, report.page(data)):
        assert all(part in words for part in (*ways, NAME, "NotImplementedError: not for this", "geometric mean of 2"))
        assert "fastest other way / ours" in words


@pytest.mark.filterwarnings("ignore")  # of Opacus, and of torch's batching rules
@pytest.mark.parametrize("make", [cards.bert, *rarely(cards.gpt2)])
def test_models_of_cards(make, tmp_path, monkeypatch):
    pytest.importorskip("opacus")
    own = next(table for table in TABLES.values() if table.models is make)
    ways = tuple(way.replace("compiled", "graph") for way in own.ways)  # which takes no time to compile
    data = write(monkeypatch, tmp_path, "--gpu", "--peers", a=dataclasses.replace(own, models=lambda: make(True), ways=ways))
    (result,) = data["results"]["a"].values()
    assert set(result["failures"]) == ({"clip: Opacus, ghost"} if make is cards.gpt2 else set())  # not for tied weights
    assert set(result["seconds"]) | set(result["failures"]) == {*ways, *own.peers}
    assert max(result["errors"].values()) < 1e-2
    with torch.device("meta"):
        model = next(iter(make().values())).model()  # of the size of its name, in millions
    assert round(sum(p.numel() for p in trainable(model).values()) / 1e6) == {cards.gpt2: 124, cards.bert: 22}[make]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_steps_are_compared_as_they_are_timed(monkeypatch):
    torch.compiler.reset()
    case = Case(TINY_MODEL, ("plain, compiled", "rows: graph", "norms: graph", "norms: compiled", "clip: graph"))
    result = measured(NAME, case, 2, CPU, memory=False)
    assert result["failures"] == {}
    assert result["errors"].keys() == set(case.ways[1:])
    monkeypatch.setitem(WAYS, "rows: graph", wrong)
    assert "from one backward pass per sample" in measured(NAME, case, 1, CPU, memory=False)["failures"]["rows: graph"]


# The benchmark's whole uses; no time is asserted


IN_TESTS = [(use, peer) for use, own in uses.USES.items() for peer in own.theirs if own.package != "kronfluence"]


@pytest.mark.filterwarnings("ignore")  # others' own
@pytest.mark.parametrize(("name", "peer"), IN_TESTS)
def test_whole_uses_bring_what_other_systems_bring(name: str, peer: str) -> None:
    use, of = uses.USES[name], given(40, 8, 20)
    if installed_version(use.package) is None and not os.environ.get("CI"):
        pytest.skip(f"{use.package} is not installed; tox -e py brings it")
    assert use.apart(use.ours(of), use.theirs[peer](of)) <= use.limit


# What docs/knock_outs.rst says of other tools is what the script finds, and `check_rows` sees each case


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
