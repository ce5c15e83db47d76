"""The benchmark's machinery, on a tiny model; no time is asserted."""

import dataclasses
import json
import math

import derived
import in_compiler
import jaxed
import layers
import measuring
import over_processes as of
import peers
import pytest
import report
import run
import torch
from aims import all_aims, proof_costs, ratios
from architectures import ARCHITECTURES
from derived import DERIVED, FUNC_GRAD
from families import TINY
from systems import CLIPPED, CLIPPING, DEFAULT, GRAD1, LOOP, PLAIN, REAL, SKIPPED, SYSTEMS
from workloads import ARCHITECTURE, MAIN, Workload, classification, multilayer, of_shape

CPU = torch.device("cpu")
TINY_MODEL = Workload(
    multilayer(6, 5, 3), of_shape(4, 6), lambda model, batch: classification(model, {**batch, "y": batch["y"] % 3})
)
WORKLOAD = "tiny model"


def broken(workload, model):
    raise NotImplementedError("not for this\nmodel")


def wrong(workload, model):
    step = SYSTEMS[GRAD1][DEFAULT](workload, model)
    return lambda batch: {name: 1.01 * rows for name, rows in step(batch).items()}


@pytest.fixture
def _one_workload(monkeypatch):
    monkeypatch.setattr(run, "WORKLOADS", {WORKLOAD: TINY_MODEL})
    sound = {LOOP: peers.loop, peers.VMAP: peers.torch_func, peers.EXPANDED: broken}
    clipped = {LOOP: peers.loop_clip, peers.VMAP: peers.clipping(peers.torch_func)}
    monkeypatch.setattr(run.peers, "PEERS", {GRAD1: sound, CLIPPED: clipped})


def measured(folder, *more):
    run.main(["--quick", "--rounds", "2", "--threads", "1", "--output", str(folder), *more])
    return json.loads((folder / "cpu.json").read_text())


@pytest.mark.parametrize("task", [GRAD1, CLIPPED])
def test_systems_agree_with_the_loop(task):
    own = {peers.VMAP: peers.PEERS[task][peers.VMAP], peers.EXPANDED: peers.PEERS[task][peers.EXPANDED]}
    assert run.checked(task, WORKLOAD, TINY_MODEL, SYSTEMS[task] | own, CPU) == {}


def test_what_fails_or_is_wrong_is_said():
    failures = run.checked(GRAD1, WORKLOAD, TINY_MODEL, {"broken": broken, "wrong": wrong}, CPU)
    assert failures == {"broken": "NotImplementedError: not for this", "wrong": "AssertionError: wrong on 0.weight"}


def test_a_peer_without_rows_fails():
    failures = run.checked(GRAD1, WORKLOAD, TINY_MODEL, {"empty": SYSTEMS[GRAD1][PLAIN]}, CPU)
    assert failures == {"empty": "ValueError: nothing for the parameter 0.weight"}


def test_the_library_being_wrong_ends_the_run():
    with pytest.raises(AssertionError, match="wrong on"):
        run.checked(GRAD1, WORKLOAD, TINY_MODEL, {SKIPPED: wrong}, CPU)


@pytest.mark.usefixtures("_one_workload")
def test_from_figures_to_table_page_and_chart(tmp_path):
    data = measured(tmp_path, "--peers")
    assert len(data["results"][GRAD1][WORKLOAD]["seconds"][DEFAULT]) == 2
    assert (tmp_path / "cpu.txt").read_text() == report.text(data)
    for task in (GRAD1, CLIPPED):
        picture = tmp_path / report.chart_name("cpu", task, WORKLOAD)
        drawn = picture.read_bytes()
        assert b"<svg" in drawn
        report.chart(data, task, WORKLOAD, picture)
        assert picture.read_bytes() == drawn  # so that pages change with figures alone
    charts = {task: {WORKLOAD: f"{task}.svg"} for task in (GRAD1, CLIPPED)}
    assert all(f"image:: {task}{ground}.svg" in report.page(data, charts) for task in charts for ground in ("", "-dark"))
    for words in (report.text(data), report.page(data, charts)):
        assert all(part in words for part in (SKIPPED, DEFAULT, WORKLOAD, "NotImplementedError: not for this"))
        assert "at least 1.00 " in words or "at least 1.00\n" in words
        assert "Traces and proofs" in words
        assert "all proofs of 1,000 steps" in words


@pytest.mark.slow
@pytest.mark.usefixtures("_one_workload")
def test_peers_of_an_earlier_run_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "chart", lambda data, task, workload, path: None)  # takes longest, and has its own test
    first = measured(tmp_path, "--peers")
    for _ in range(2):  # kept figures are kept again
        later = measured(tmp_path)
        assert peers.VMAP not in later["results"][GRAD1][WORKLOAD]["seconds"]
        ratio = ratios(first, GRAD1, WORKLOAD)[peers.VMAP]
        assert ratios(later, GRAD1, WORKLOAD)[peers.VMAP] == ratio
        assert report.failures(later, GRAD1, WORKLOAD) == {peers.EXPANDED: "NotImplementedError: not for this"}
        assert f"{ratio:.2f}" in report.text(later)
        assert f"of {first['about']['date']}" in report.text(later)
    again = measured(tmp_path, "--peers")
    assert again["kept"] == {}


@pytest.mark.slow
def test_architectures_have_a_table_of_their_own(tmp_path, monkeypatch):
    name = "UNet, noise drawn inside"
    monkeypatch.setattr(run, "ARCHITECTURES", {name: lambda size: ARCHITECTURES[name](TINY)})
    monkeypatch.setattr(report, "chart", lambda data, task, workload, path: None)
    run.main(["--architectures", "--peers", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)])
    data = json.loads((tmp_path / "cpu-architectures.json").read_text())
    result = data["results"][REAL][name]
    assert {SKIPPED, DEFAULT, CLIPPING, LOOP, peers.VMAP} <= set(result["seconds"])
    assert set(result["errors"]) == {SKIPPED, DEFAULT, CLIPPING}
    assert max(result["errors"].values()) < 1e-9
    assert sum(result["reads"].values()) == len(list(ARCHITECTURES[name](TINY).model().parameters()))
    for words in (report.text(data), report.page(data, {REAL: {name: "a.svg"}})):
        assert all(part in words for part in (name, "parameters read by", "largest relative error", "first step"))
    found = {aim.what: aim.bound for aim in all_aims(data) if aim.system == CLIPPING}
    assert found == {"clipped step / plain": 1.5, "peak memory without rows / plain's": 1.3}


TINY_LOSSES = {
    "heat": (multilayer(2, 4, 1, between=torch.nn.Tanh), derived.points(4, 2)),
    "Laplacian": (multilayer(3, 4, 1, between=torch.nn.Tanh), derived.points(4, 3)),
    "score": (multilayer(3, 4, 1, between=torch.nn.Tanh), derived.points(4, 3)),
    "CNN": (derived.critic(2, 4), derived.points(3, 3, 4, 4)),
    "attention": (lambda: derived.Attention(4), derived.points(3, 2, 4)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("part", TINY_LOSSES)
def test_losses_with_derivatives_are_one_loss_in_all_systems(part):
    full = next(workload for name, workload in derived.WORKLOADS.items() if part in name)
    model, batch = TINY_LOSSES[part]
    workload, errors = dataclasses.replace(full, model=model, batch=batch), {}
    chosen = derived.SYSTEMS[DERIVED] | derived.PEERS[DERIVED]
    chosen = {name: maker for name, maker in chosen.items() if derived.fits(name, workload)}
    assert run.checked(DERIVED, part, workload, chosen, CPU, errors) == {}
    assert max(errors.values()) < 1e-9


@pytest.mark.slow
def test_derivatives_have_a_table_of_their_own(tmp_path, monkeypatch):
    name, (model, batch) = "gradient penalty of an MLP", (multilayer(3, 4, 1, between=torch.nn.Tanh), derived.points(4, 3))
    full = next(workload for workload in derived.WORKLOADS.values() if workload.kind == derived.MLP)
    monkeypatch.setattr(run, "WORKLOADS", {name: dataclasses.replace(full, model=model, batch=batch)})
    monkeypatch.setattr(report, "chart", lambda data, task, workload, path: None)
    run.main(["--workload", name, "--peers", "--rounds", "2", "--threads", "1", "--output", str(tmp_path)])
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert data["results"].keys() == {DERIVED}
    assert "proofs" not in data or data["proofs"] == {}
    result = data["results"][DERIVED][name]
    assert {PLAIN, SKIPPED, DEFAULT, CLIPPING, LOOP, FUNC_GRAD} == set(result["seconds"])
    assert "ours, clipped step" in report.page(data, {DERIVED: {name: "a.svg"}})
    result["seconds"] = {system: [20.0] for system in result["seconds"]} | {SKIPPED: [2.0], FUNC_GRAD: [16.0]}
    result["peak MB"] = {PLAIN: 1.0, CLIPPING: 3.0}
    aims = {(aim.system, aim.what): aim for aim in all_aims(data)}
    ratio, memory = "step / vmap(grad)", "peak memory / plain's"
    assert [aims[system, ratio].met for system in (SKIPPED, DEFAULT)] == [True, False]
    assert aims[SKIPPED, ratio].bound == 0.15
    assert not aims[CLIPPING, memory].met
    result["kind"] = derived.SMALL
    assert {aim.bound for aim in all_aims(data) if aim.what == ratio} == {0.8}


def test_architectures_that_fail_are_said():
    workload = Workload(TINY_MODEL.model, TINY_MODEL.batch, TINY_MODEL.losses, ARCHITECTURE)
    failures = run.checked(REAL, WORKLOAD, workload, {SKIPPED: wrong, DEFAULT: broken}, CPU)
    assert failures == {SKIPPED: "AssertionError: wrong on 0.weight", DEFAULT: "NotImplementedError: not for this"}
    result = {"kind": ARCHITECTURE, "seconds": {PLAIN: [1.0]}, "failures": failures}
    aims = all_aims({"results": {REAL: {WORKLOAD: result}}})
    assert [(aim.system, aim.what, aim.met) for aim in aims] == [(SKIPPED, "fails", False), (DEFAULT, "fails", False)]


def test_the_last_word_of_another_process_is_said(tmp_path):
    def python(*lines):
        file = tmp_path / "python"
        file.write_text("\n".join(["#!/bin/sh", *lines]))
        file.chmod(0o755)
        return str(file)

    with pytest.raises(RuntimeError, match="No module named 'jax'"):
        jaxed.measured(WORKLOAD, 1, 1, python("echo \"No module named 'jax'\" >&2", "exit 1"), 7)
    told = python("""echo '{"seconds": [0.5], "parameters": 7, "version": "1"}'""")
    assert jaxed.measured(WORKLOAD, 1, 1, told, 7) == [0.5]
    with pytest.raises(RuntimeError, match="7 parameters, where torch's model has 8"):
        jaxed.measured(WORKLOAD, 1, 1, told, 8)


def test_aims():
    seconds = {PLAIN: [1.0], "write once": [1.0], SKIPPED: [2.6], DEFAULT: [2.9], LOOP: [2.7]}
    result = {"kind": MAIN, "seconds": seconds, "failures": {}}
    found = {(aim.system, aim.what): aim for aim in all_aims({"results": {GRAD1: {WORKLOAD: result}}})}
    floor, faster = "step / (plain + write once)", "fastest other way / ours"
    assert not found[SKIPPED, floor].met
    assert found[SKIPPED, floor].limit == 2.5
    assert found[DEFAULT, floor].met
    assert found[SKIPPED, faster].met
    assert not found[DEFAULT, faster].met


def test_costs_of_proofs():
    steps = {str(n): [2.0] for n in range(1, 17)} | {"1": [9.0], "2": [8.0], "4": [3.0], "16": [7.0]}
    seconds = steps | {"plain": [1.0], "clipped": [2.0], "verify": [5.0]}
    memory = {"clipped step": 10.0, "first step": 5.0, "second step": 8.0}
    found = {"proofs": {WORKLOAD: {"seconds": seconds, "peak MB": memory}}, "results": {}}
    costs = proof_costs(found["proofs"][WORKLOAD])
    assert costs["every"] == 7 + 6 + 3 * 1 + 2 * 5  # of the steps 1, 2, 4 and 16, and of three later ones
    assert (costs["first"], costs["verify"], costs["memory"]) == (9, 5, 0.8)
    assert all(aim.met for aim in all_aims(found))
    seconds["1"] = [10.5]
    assert [aim.what for aim in all_aims(found) if not aim.met] == ["first step / plain"]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_exponent(power):
    sizes = [8, 16, 64, 512]
    assert math.isclose(measuring.exponent(sizes, [3.0 * size**power for size in sizes]), power, abs_tol=1e-9)


@pytest.mark.slow
def test_growth_and_memory():
    grown = measuring.scaling(
        "N", [2, 4, 8], lambda size: Workload(multilayer(6, 3), of_shape(size, 6), TINY_MODEL.losses), 1, CPU
    )
    assert all(len(own) == 3 for own in grown["seconds"].values())
    rows = grown["peak MB"][f"{GRAD1}: {DEFAULT}"]
    assert rows == sorted(rows)


def test_peak_counts_what_is_kept_between_steps():
    least = 4 * 4 * sum(p.numel() for p in TINY_MODEL.model().parameters()) / 1e6  # four samples, four bytes
    assert measuring.peak(TINY_MODEL, SYSTEMS[GRAD1][DEFAULT], CPU) > least


@pytest.mark.parametrize(
    "options", [["--workload", "nope"], ["--system", "nope"], ["--rounds", "0"], ["--threads", "0"], ["--device", "tpu"]]
)
def test_options_that_make_no_sense(options, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main([*options, "--output", str(tmp_path / "out")])
    assert "expected" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ways_of_clipping_that_are_timed_over_processes_bring_the_same() -> None:
    made = {way: of.made(of.ONE, way) for way in of.WAYS}
    for _, step in made.values():
        step(torch.randn(of.SAMPLES, 3, of.WIDTH, generator=torch.Generator().manual_seed(0)))
    models = {way: model for way, (model, _) in made.items()}
    of.check(models)
    with pytest.raises(RuntimeError, match="is off by"):
        of.check({**models, of.TWICE: models[of.PLAIN]})


def test_figures_over_processes_are_ratios_to_the_same_round() -> None:
    times = {way: [1.0, 2.0] for way in of.WAYS} | {of.SKIPPED: [1.5, 3.5]}
    found = dict.fromkeys(of.ENGINES, times)
    assert of.ratios(found)[of.ONE][of.SKIPPED] == pytest.approx((1.5 + 1.75) / 2)
    assert "1.62, 1.5 missed" in of.as_text(found)


@pytest.mark.slow
def test_layers_have_a_table_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "COUNTS", (1, 2, 4))
    monkeypatch.setattr(layers, "WIDTHS", (3, 12))
    run.main(["--layers", "--rounds", "2", "--output", str(tmp_path)])
    data = json.loads((tmp_path / "cpu-layers.json").read_text())
    assert data["about"]["threads"] == 1
    assert data["layers"].keys() == {"3", "12"}
    for found in data["layers"].values():
        assert found["counts"] == [1, 2, 4]
        assert {way: [len(own) for own in times] for way, times in found["seconds"].items()} == {
            way: [2, 2, 2] for way in layers.WAYS
        }
    told = (tmp_path / "cpu-layers.txt").read_text()
    assert told == layers.as_text(data["layers"])
    assert all(part in told for part in ("width 3", "width 12", "4 layers", *layers.WAYS))


def test_a_layer_costs_the_slope_of_what_is_beyond_plain():
    counts = [10, 50, 200]
    seconds = {
        PLAIN: [[1e-6 * (100 + 7 * n), 1.0] for n in counts],  # the second round on a busier machine
        layers.ROWS: [[1e-6 * (150 + 10 * n), 1.0 + 1e-6 * (50 + 3 * n)] for n in counts],
    }
    found = {"counts": counts, "seconds": seconds}
    assert layers.beyond(seconds, layers.ROWS) == pytest.approx([80, 200, 650])
    assert layers.a_layer(found, layers.ROWS) == pytest.approx(3)
    assert "width 16" in layers.as_text({"16": found})


def test_wrong_numbers_of_layers_are_not_timed(monkeypatch):
    monkeypatch.setitem(layers.WAYS, layers.ROWS, wrong)
    with pytest.raises(AssertionError, match="wrong on"):
        layers.layers(1, CPU, [2], [3])


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_steps_in_the_compiler_have_a_table_of_their_own(tmp_path, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(in_compiler, "models", lambda: {WORKLOAD: TINY_MODEL})
    few = {way: maker for way, maker in in_compiler.ways().items() if "clip" not in way}
    monkeypatch.setattr(in_compiler, "ways", lambda: few)
    run.main(["--compiled", "--rounds", "2", "--output", str(tmp_path)])
    own = json.loads((tmp_path / "cpu-compiled.json").read_text())["compiled"][WORKLOAD]
    assert own["failed"] == {}
    assert {way: len(times) for way, times in own["seconds"].items()} == dict.fromkeys(in_compiler.ways(), 2)
    assert own["compiling"].keys() == own["seconds"].keys()
    told = (tmp_path / "cpu-compiled.txt").read_text()
    assert all(part in told for part in (WORKLOAD, "rows: compiled", "norms: graph"))


def test_wrong_numbers_of_compiled_steps_are_not_timed(monkeypatch):
    monkeypatch.setattr(in_compiler, "models", lambda: {WORKLOAD: TINY_MODEL})
    monkeypatch.setattr(in_compiler, "ways", lambda: {"rows: hooks": wrong})
    own = in_compiler.in_compiler([WORKLOAD], 1, CPU)[WORKLOAD]
    assert own["seconds"] == {}
    assert "from one backward pass per sample" in own["failed"]["rows: hooks"]
