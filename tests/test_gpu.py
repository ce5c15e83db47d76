"""`benchmarks/gpu.py`: each part's code, in sizes that a CPU runs in seconds; no time is asserted."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import gpu_report
import gpu_tests
import pytest
import torch
from gpu_parts import PARTS, TOKENS, Case, Goal, Part
from gpu_report import PLAIN
from gpu_ways import CLIP, DOT, GHOST, NORMS, NORMS_BY_KERNELS, OPACUS, PROJECT, ROWS, WAYS
from rarely import rarely
from systems import trainable
from torch.testing import assert_close
from workloads import Workload, classification, multilayer, of_shape

import autograd_hacks

TINY = "some"
QUICK = "cnn"
"""The part that runs with the usual tests; the others take the rest of a minute."""
FAILING = {("gpt2", GHOST), ("wide", GHOST), ("norms", NORMS_BY_KERNELS)}
"""Opacus' ghost clipping is not for tied weights, and Triton has no kernels for a CPU."""


def small(ways: tuple[str, ...] = (PLAIN, CLIP), apart: bool = False, goal: str = CLIP) -> Case:
    work = Workload(multilayer(6, 5, 10), of_shape(4, 6), classification)
    return Case(work, ways, (Goal(goal, 1.5),), tokens=8, apart=apart)


def run(folder: Path, *told: str) -> dict[str, Any]:
    gpu.main([TINY, "--tiny", "--device", "cpu", "--rounds", "3", "--output", str(folder), *told])
    return json.loads((folder / "gpu" / f"{TINY}.json").read_text())


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """One part of two small cases."""
    found = {TINY: Part("Some", lambda tiny: {"a": small(), "b": small(apart=True)})}
    monkeypatch.setattr(gpu, "PARTS", found)
    return found


@pytest.mark.filterwarnings("ignore")  # of Opacus, and of torch's batching rules
@pytest.mark.parametrize("name", [QUICK, *rarely(*(name for name in PARTS if name != QUICK))])
def test_a_part_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "peak", lambda *given: 1.0)  # which takes longest, and has tests of its own
    if GHOST in {way for case in PARTS[name].cases(True).values() for way in case.ways}:
        pytest.importorskip("opacus")
    gpu.main([name, "--tiny", "--device", "cpu", "--rounds", "1", "--output", str(tmp_path)])
    part = json.loads((tmp_path / "gpu.json").read_text())["parts"][name]
    assert part["finished"]
    assert part["tiny"]
    for case in part["cases"].values():
        assert set(case["failures"]) <= {way for part_name, way in FAILING if part_name == name}
        assert set(case["seconds"]) | set(case["failures"]) == set(case["ways"])
        assert case["error"] < 1e-2
        assert all(goal["way"] in case["ways"] for goal in case["goals"])


def test_full_parts_are_what_was_asked_for() -> None:
    """Their cases are made, and no model; each way is known, and every goal has its way and what it is measured in."""
    for part in PARTS.values():
        assert part.minutes < 9
        for case in part.cases(False).values():
            assert case.ways[0] == PLAIN
            assert set(case.ways) <= set(WAYS)
            for goal in case.goals:
                assert goal.way in case.ways
                assert goal.unit in ("of plain", TOKENS, *case.ways)
    goals = {str(goal) for part in PARTS.values() for case in part.cases(False).values() for goal in case.goals}
    assert {"at least 60,000 tokens/s", "at least 26 × as fast as rows by a loop", "at most 1.3 plain steps"} <= goals


def test_full_models_have_the_sizes_of_their_names() -> None:
    """On the meta device, where they take no memory."""
    millions = {"gpt2": [124], "pythia": [70, 162, 405, 1012, 1415, 2775, 6856], "bert": [22] * 4, "lora": [7], "vit": [86]}
    for name, expected in millions.items():
        models = [gpu.on_meta(case) for case in PARTS[name].cases(False).values()]
        assert [round(sum(p.numel() for p in trainable(model).values()) / 1e6) for model in models] == expected
        if name == "lora":
            assert round(sum(p.numel() for p in models[0].parameters()) / 1e8) == 80


FILES = ["tests/devices/test_a.py", "tests/devices/test_b.py", "tests/devices/test_c.py"]


def run_tests(folder: Path, *told: str) -> dict[str, Any]:
    gpu.main([gpu_tests.TESTS, "--tiny", "--device", "cpu", "--output", str(folder), *told])
    return json.loads((folder / "gpu" / f"{gpu_tests.TESTS}.json").read_text())


def test_tests_that_fail_or_hang_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in a process of its own; what has a row is not run again."""
    ran = []

    def pytest_of(command: list[str], **options: Any) -> Any:
        ran.append(command[-1])
        assert options["timeout"] <= gpu_tests.SECONDS
        if command[-1] == FILES[1]:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        fails = command[-1] == FILES[2]
        out = "FAILED tests/devices/test_c.py::test_it - nope\n1 failed in 2s" if fails else "===== 3 passed in 1s ====="
        return SimpleNamespace(returncode=int(fails), stdout=out, stderr="")

    monkeypatch.setattr(gpu_tests, "files", lambda tiny: FILES)
    monkeypatch.setattr(gpu_tests.subprocess, "run", pytest_of)
    part = run_tests(tmp_path)
    assert part["finished"]
    assert ran == FILES
    assert [own["passed"] for own in part["tests"].values()] == [True, False, False]
    words = (tmp_path / "gpu.txt").read_text(), (tmp_path / "gpu.rst").read_text()
    for own in words:
        assert all(says in own for says in (*FILES, "3 passed in 1s", gpu_tests.OUT_OF_TIME, "test_c.py::test_it - nope"))
    run_tests(tmp_path)
    assert ran == FILES


def test_files_that_were_not_begun_are_run_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = run_tests(tmp_path, "--minutes", "1e-9")
    assert (part["finished"], part["tests"]) == (False, {})
    assert "run the part again" in (tmp_path / "gpu.txt").read_text()
    part = run_tests(tmp_path)
    assert part["finished"]
    assert all("1 passed" in own["says"] for own in part["tests"].values())  # by pytest itself


def test_all_files_of_tests_by_device_are_run() -> None:
    folder = Path(__file__).parent / "devices"
    assert [Path(file).name for file in gpu_tests.files(False)] == sorted(file.name for file in folder.glob("test_*.py"))


def test_dot_is_what_the_rows_say() -> None:
    """And .grad is their mean."""
    work = Workload(multilayer(6, 5, 10), of_shape(4, 6), classification)
    torch.manual_seed(0)
    model = work.model()
    batch = work.batch(0)
    torch.manual_seed(1)
    step = WAYS[DOT](work, model)
    torch.manual_seed(1)
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    found = step(batch)["dot"]
    with autograd_hacks.pause_hooks():
        losses = work.losses(model, batch)
        rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    right = [sum((g * v).sum() for g, v in zip(own, direction.values())) for own in rows]
    assert_close(found, torch.stack(right))
    assert_close([p.grad for p in model.parameters()], [torch.stack(own).mean(0) for own in zip(*rows)])


@pytest.mark.slow
def test_figures_are_kept_and_put_together(tmp_path: Path, parts: dict[str, Part], capsys: pytest.CaptureFixture) -> None:
    first = run(tmp_path)
    assert all(len(own) == 3 for case in first["cases"].values() for own in case["seconds"].values())
    assert all(set(case["peak MB"]) == {PLAIN, CLIP} for case in first["cases"].values())
    assert run(tmp_path) == first
    assert "has its figures" in capsys.readouterr().out
    assert run(tmp_path, "--again") != first
    words = (tmp_path / "gpu.txt").read_text(), (tmp_path / "gpu.rst").read_text()
    assert words[0] == gpu_report.text(json.loads((tmp_path / "gpu.json").read_text()))
    for own in words:
        assert all(
            part in own for part in ("Some", first["about"]["machine"], "at most 1.5 plain steps", "plain steps", "clip")
        )
        assert "no figures" in own


@pytest.mark.slow
def test_what_ran_out_of_time_goes_on(tmp_path: Path, parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ENOUGH", -1.0)
    assert run(tmp_path)["cases"] == {}
    assert "run the part again" in (tmp_path / "gpu.txt").read_text()
    monkeypatch.setattr(gpu, "ENOUGH", 1.0)
    whole = run(tmp_path)
    assert whole["finished"]
    assert set(whole["cases"]) == {"a", "b"}
    late = run(tmp_path, "--again", "--minutes", "1e-9")
    assert all(case["failures"] == dict.fromkeys((PLAIN, CLIP), gpu.OUT_OF_TIME) for case in late["cases"].values())


@pytest.mark.parametrize("apart", [True, False])
def test_a_way_that_is_out_of_memory_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    def full(workload: Any, model: torch.nn.Module) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def late(workload: Any, model: torch.nn.Module) -> Any:
        steps = iter([{}, {}])

        def step(batch: Any) -> Any:
            return next(steps)

        return step

    monkeypatch.setitem(WAYS, ROWS, full)
    monkeypatch.setitem(WAYS, NORMS, late)
    case = small((PLAIN, ROWS, NORMS, CLIP), apart)
    monkeypatch.setattr(gpu, "PARTS", {TINY: Part("Some", lambda tiny: {"a": case})})
    found = run(tmp_path)["cases"]["a"]
    assert set(found["seconds"]) == {PLAIN, CLIP}
    assert found["failures"][ROWS] == gpu.OUT_OF_MEMORY
    assert found["failures"][NORMS].startswith("fails: StopIteration")
    assert gpu.OUT_OF_MEMORY in (tmp_path / "gpu.txt").read_text()
    assert gpu.OUT_OF_MEMORY in (tmp_path / "gpu.rst").read_text()


def test_parts_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    commands = []

    def command(told: list[str], **options: Any) -> Any:
        commands.append(told[2])
        assert options["timeout"] <= 60 * 9
        if told[2] == "norms":
            raise subprocess.TimeoutExpired(told, options["timeout"])
        assert {"--tiny", "--rounds=2", "--again"} <= set(told)
        return SimpleNamespace(returncode=int(told[2] == "vit"))

    monkeypatch.setattr(gpu.subprocess, "run", command)
    with pytest.raises(SystemExit, match="norms, vit"):
        gpu.main(["all", "--tiny", "--device", "cpu", "--rounds", "2", "--again", "--output", str(tmp_path)])
    assert commands == list(PARTS)
    assert "was ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    "told",
    [["nope"], ["smoke", "--device", "cpu"], ["smoke", "--tiny", "--device", "tpu"], ["smoke", "--tiny", "--rounds", "0"]],
)
def test_options_that_make_no_sense(told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu.main([*told, "--device", "cpu"] if "--device" not in told else told)
    assert "expected" in capsys.readouterr().err


def test_goals_are_said() -> None:
    assert str(Goal(CLIP, 1.5)) == "at most 1.5 plain steps"
    assert str(Goal(PROJECT, 13_000, TOKENS)) == "at least 13,000 tokens/s"
    assert str(Goal(CLIP, 1.0, GHOST)) == "at least 1 × as fast as clip by Opacus, ghost"
    assert OPACUS in WAYS
