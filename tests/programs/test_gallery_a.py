"""The examples that are held to other systems agree with them."""

import re
from pathlib import Path

import pytest
from test_demos import run_demo

NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?|nan)"


def shown(tmp_path: Path, name: str, *options: str, setup: str = "") -> str:
    """What an example prints, when it has drawn its picture."""
    done = run_demo("--output", str(tmp_path), *options, setup=setup, name=name)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return done.stdout


def table(printed: str, *rows: str) -> dict[str, list[float]]:
    found = {row: re.search(rf"^{re.escape(row)} +(.*)$", printed, re.M) for row in rows}
    return {row: [float(number) for number in match[1].split()] for row, match in found.items() if match}


def test_private_weights_and_epsilon_are_opacus_by_image_and_by_user(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    printed = shown(tmp_path, "private_digits", "--epochs", "2")
    for unit in ("by image", "by user"):
        rows = table(printed, f"{unit:10}Opacus", f"{unit:10}autograd_hacks")
        theirs, (epsilon, accuracy, _, apart) = rows.values()
        assert [epsilon, accuracy] == theirs[:2]
        assert epsilon > 0
        assert apart < 1e-4
    assert epsilon > table(printed, "by image  Opacus")["by image  Opacus"][0]


def test_the_planted_sentence_taught_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = shown(tmp_path, "who_taught", "--sentences", "12", "--epochs", "100")
    assert 'it says "seven three nine one"' in printed
    cosines = re.findall(rf"^ +{NUMBER}  (the .*)$", printed, re.M)
    assert cosines[0][1] == "the code of the old vault is seven three nine one"
    assert float(cosines[0][0]) > 1.5 * float(cosines[1][0])
    apart = re.search(rf"furthest from autograd.*: {NUMBER}", printed)
    assert apart is not None
    assert float(apart[1]) < 1e-4


def test_jacobian_descent_takes_the_steps_of_torchjd(tmp_path: Path) -> None:
    pytest.importorskip("torchjd")
    pytest.importorskip("quadprog")
    printed = shown(tmp_path, "jacobian_descent", "--steps", "10")
    rows = table(printed, "mean of images", "UPGrad, by TorchJD", "UPGrad, by autograd_hacks")
    mean, theirs, ours = rows.values()
    assert ours[:2] == theirs[:2]
    assert ours[3] < 1e-4 < mean[3]
    assert ours[1] < mean[1]


def test_noise_is_backpacks_variance(tmp_path: Path) -> None:
    pytest.importorskip("backpack")
    printed = shown(tmp_path, "batch_size", "--epochs", "2", "--draws", "20")
    rows = [[float(number) for number in line.split()] for line in printed.splitlines() if re.match(r" +\d", line)]
    assert [len(row) for row in rows] == [6, 6, 6]
    for _, ours, theirs, apart, scale, _ in rows:
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert apart < 1e-4
        assert scale > 0


def test_without_backpack_a_line_says_so(tmp_path: Path) -> None:
    setup = "import sys; sys.modules['backpack'] = None"
    printed = shown(tmp_path, "batch_size", "--epochs", "1", "--draws", "20", setup=setup)
    assert re.search(r"^not compared with backpack.*pip install backpack-for-pytorch", printed, re.M)
    assert "nan" in printed


@pytest.mark.parametrize(
    ("name", "package"), [("private_digits", "opacus"), ("who_taught", "transformers"), ("jacobian_descent", "torchjd")]
)
def test_an_example_without_its_packages_names_the_extra(name: str, package: str) -> None:
    done = run_demo(setup=f"import sys; sys.modules[{package!r}] = None", name=name)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install 'autograd-hacks[demo,{package}]'" in done.stderr
