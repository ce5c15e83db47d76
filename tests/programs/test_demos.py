"""The demos do what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

import autograd_hacks

ROOT = Path(__file__).parent.parent.parent


def run_demo(*options: str, setup: str = "", name: str = "wrong_labels") -> subprocess.CompletedProcess[str]:
    script = ROOT / "docs" / "examples" / f"{name}.py"
    arguments = f"import runpy, sys; sys.argv = {[script.name, *options]!r}; sys.path.insert(0, {str(script.parent)!r})"
    code = f"{setup}\n{arguments}\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_demo_finds_wrong_labels_and_draws_them(tmp_path: Path) -> None:
    done = run_demo("--output", str(tmp_path), "--epochs", "3", "--batch-size", "100", "--seed", "3")
    assert done.returncode == 0, done.stderr
    found = [int(n) for n in re.findall(r"(\d+) wrong labels", done.stdout)]
    assert len(found) == 2
    assert 45 < found[0] <= found[1] <= 90  # by chance 4.5 and 9
    for way in ("one backward per image", "torch.func.vmap(grad)", "autograd_hacks"):
        assert re.search(rf"{re.escape(way)} +\d+\.\d", done.stdout)
    assert "training: 100%" in done.stderr
    assert (tmp_path / "wrong_labels.png").read_bytes().startswith(b"\x89PNG")


def test_natural_gradient_gets_further_than_sgd_in_as_many_steps(tmp_path: Path) -> None:
    done = run_demo("--output", str(tmp_path), "--epochs", "2", name="natural_gradient")
    assert done.returncode == 0, done.stderr
    losses = {
        name: float(loss) for name, loss in re.findall(r"^(SGD with momentum|natural gradient) +([\d.]+)", done.stdout, re.M)
    }
    assert losses["natural gradient"] < losses["SGD with momentum"] / 2
    assert "natural gradient: 100%" in done.stderr
    assert (tmp_path / "natural_gradient.png").read_bytes().startswith(b"\x89PNG")


def test_the_energy_natural_gradient_solves_poissons_equation(tmp_path: Path) -> None:
    done = run_demo("--output", str(tmp_path), "--points", "120", "--steps", "25", name="pinn")
    assert done.returncode == 0, done.stderr
    errors = {name: float(e) for name, e in re.findall(r"^(energy natural gradient|Adam) +([\d.e+-]+)", done.stdout, re.M)}
    assert errors["energy natural gradient"] < min(1e-3, errors["Adam"] / 20)
    assert "energy natural gradient: 100%" in done.stderr
    assert (tmp_path / "pinn.png").read_bytes().startswith(b"\x89PNG")


def test_its_kernel_is_that_of_torch_func(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    examples = ROOT / "docs" / "examples"
    monkeypatch.syspath_prepend(str(examples))
    monkeypatch.setattr(sys, "argv", ["pinn.py", "--points", "8", "--steps", "1", "--output", str(tmp_path)])
    demo = runpy.run_path(str(examples / "pinn.py"))
    points, model = demo["some_points"](8, 0), demo["small_mlp"](0)

    def residual(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        def u(x: Tensor) -> Tensor:
            return functional_call(model, weights, x)[0]

        edge = ((x == 0) | (x == 1)).any()
        return torch.where(
            edge, demo["EDGE"] * u(x), jacrev(jacrev(u))(x).trace() + 2 * torch.pi**2 * (torch.pi * x).sin().prod()
        )

    rows = vmap(grad(residual), (None, 0))({name: p.detach() for name, p in model.named_parameters()}, points)
    jacobian = torch.cat([own.flatten(1) for own in rows.values()], 1)
    with autograd_hacks.add_hooks(model, mode="derivatives", param_grad=False):
        autograd_hacks.backward(demo["residuals"](model, points), "sum")
        torch.testing.assert_close(autograd_hacks.per_sample_grads(model).gram(), jacobian @ jacobian.mT)


@pytest.mark.parametrize("name", ["wrong_labels", "natural_gradient", "pinn"])
def test_the_demo_without_its_packages_names_the_extra(name: str) -> None:
    for package in ("sklearn", "tqdm", "matplotlib"):
        done = run_demo(setup=f"import sys; sys.modules[{package!r}] = None", name=name)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "pip install 'autograd-hacks[demo]'" in done.stderr


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--batch-size", "-1"], ["--seed", "x"], ["--speed"]])
def test_the_demo_refuses_options_that_make_no_sense(options: list[str]) -> None:
    done = run_demo(*options)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_the_demo_explains_itself() -> None:
    done = run_demo("--help")
    assert done.returncode == 0
    for option in ("--output DIR", "--batch-size", "--epochs", "--seed"):
        assert option in done.stdout


def test_private_training_gives_the_same_numbers_however_many_processes(tmp_path: Path) -> None:
    script = str(ROOT / "docs" / "examples" / "private_processes.py")
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    printed = []
    for count in (1, 4):  # 2 as well, by tox -e processes
        spawn = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [sys.executable, *spawn, script, "--steps", "20"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=settings, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert len(set(printed)) == 1
    assert re.search(r"step  20: \d+ samples, loss 0\.1\d+, clipped 0\.\d+, accuracy 0\.8\d+", printed[0])
