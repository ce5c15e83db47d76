"""`benchmarks/gpu.py`: each part's code, in sizes that a CPU runs in seconds; no time is asserted."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import measuring
import pytest
import torch
from gpu_parts import PARTS, Part
from measuring import Case
from rarely import rarely
from systems import trainable
from torch.testing import assert_close
from ways import WAYS
from workloads import stack

import autograd_hacks

TINY = "some"
QUICK = "cnn"
"""The part that runs with the usual tests; the others take the rest of a minute."""
CLIP, GHOST, VMAP = "clip: ours, param_grad=False", "clip: Opacus, ghost", "clip: vmap(grad)"
FAILING = {("gpt2", GHOST), ("wide", GHOST)}
"""Opacus' ghost clipping is not for tied weights."""


def run(folder: Path, *told: str, part: str = TINY, rounds: int = 3) -> dict[str, Any]:
    gpu.main([part, "--tiny", "--device", "cpu", "--rounds", str(rounds), "--output", str(folder), *told])
    return json.loads((folder / "gpu.json").read_text())["results"].get(gpu.PARTS[part].title, {})


@pytest.fixture
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part of two small cases."""
    cases = {name: Case(stack(2, 10, 4), ("plain", CLIP), 8, apart=name == "b") for name in "ab"}
    monkeypatch.setattr(gpu, "PARTS", {TINY: Part("Some", lambda tiny: cases)})


@pytest.mark.filterwarnings("ignore")  # of Opacus, and of torch's batching rules
@pytest.mark.parametrize("name", [QUICK, *rarely(*(name for name in PARTS if name != QUICK))])
def test_a_part_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "peak", lambda *given: 1.0)  # which takes longest, and has tests of its own
    if GHOST in {way for case in PARTS[name].cases(True).values() for way in case.ways}:
        pytest.importorskip("opacus")
    for result in run(tmp_path, part=name, rounds=1).values():
        assert set(result["failures"]) <= {way for part, way in FAILING if part == name}
        assert set(result["seconds"]) | set(result["failures"]) == set(result["ways"])
        assert max(result["errors"].values()) < 1e-2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_full_models_have_the_sizes_of_their_names() -> None:
    """On the meta device, where they take no memory."""
    millions = {"gpt2": [124], "pythia": [70, 162, 405, 1012, 1415, 2775, 6856], "bert": [22] * 4, "lora": [7], "vit": [86]}
    for name, expected in millions.items():
        with torch.device("meta"):
            models = [case.workload.model() for case in PARTS[name].cases(False).values()]
        assert [round(sum(p.numel() for p in trainable(model).values()) / 1e6) for model in models] == expected
        if name == "lora":
            assert round(sum(p.numel() for p in models[0].parameters()) / 1e8) == 80


def test_dot_is_what_the_rows_say() -> None:
    """And .grad is their mean."""
    work = stack(2, 10, 4)
    torch.manual_seed(0)
    model, batch = work.model(), work.batch(0)
    torch.manual_seed(1)
    step = WAYS["dot: ours, param_grad=False"](work, model)
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
@pytest.mark.usefixtures("_parts")
def test_figures_are_kept_and_put_together(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert all(len(own) == 3 for result in first.values() for own in result["seconds"].values())
    assert all(set(result["peak MB"]) == {"plain", CLIP} for result in first.values())
    assert run(tmp_path) == first
    assert run(tmp_path, "--again") != first
    for words in ((tmp_path / "gpu.txt").read_text(), (tmp_path / "gpu.rst").read_text()):
        assert all(part in words for part in ("Some", "time ×", CLIP, "no figures", "tokens/s"))
    data = json.loads((tmp_path / "gpu.json").read_text())
    data["about"]["machine"] = "another card"
    (tmp_path / "gpu.json").write_text(json.dumps(data))
    assert run(tmp_path) != data["results"]["Some"]  # figures of two cards are not mixed


@pytest.mark.slow
@pytest.mark.usefixtures("_parts")
def test_what_ran_out_of_time_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu, "ENOUGH", -1.0)
    gpu.main([TINY, "--tiny", "--device", "cpu", "--output", str(tmp_path)])
    assert "run the part again" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "ENOUGH", 1.0)
    assert set(run(tmp_path)) == {"a", "b"}


def test_parts_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    commands = []

    def command(told: list[str], **options: Any) -> Any:
        commands.append(told[2])
        assert options["timeout"] <= 60 * 9
        if told[2] == "gpt2":
            raise subprocess.TimeoutExpired(told, options["timeout"])
        assert {"--tiny", "--rounds=2", "--again"} <= set(told)
        return SimpleNamespace(returncode=int(told[2] == "vit"))

    monkeypatch.setattr(gpu.subprocess, "run", command)
    with pytest.raises(SystemExit, match="gpt2, vit"):
        gpu.main(["all", "--tiny", "--device", "cpu", "--rounds", "2", "--again", "--output", str(tmp_path)])
    assert commands == list(PARTS)
    assert "was ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    "told",
    [["nope"], ["smoke", "--device", "cpu"], ["smoke", "--tiny", "--device", "tpu"], ["smoke", "--tiny", "--rounds", "0"]],
)
def test_options_that_make_no_sense(told: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu.main([*told, "--device", "cpu"] if "--device" not in told else told)
    said = capsys.readouterr().err
    assert "expected" in said or "invalid choice" in said
