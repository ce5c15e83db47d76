"""The examples that are held to other systems agree with them."""

import re
from pathlib import Path

import pytest
from test_demos import number, printed

pytestmark = pytest.mark.slow
NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?|nan)"


def table(out: str, *rows: str) -> dict[str, list[float]]:
    found = {row: re.search(rf"^{re.escape(row)} +(.*)$", out, re.M) for row in rows}
    return {row: [float(number) for number in match[1].split()] for row, match in found.items() if match}


def test_private_weights_and_epsilon_are_opacus_by_image_and_by_user(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    out = printed("private_digits", tmp_path, "--epochs", "2")
    for unit in ("by image", "by user"):
        rows = table(out, f"{unit:10}Opacus", f"{unit:10}autograd_hacks")
        theirs, (epsilon, accuracy, apart) = rows.values()
        assert [epsilon, accuracy] == theirs[:2]
        assert epsilon > 0
        assert apart < 1e-4
    assert epsilon > table(out, "by image  Opacus")["by image  Opacus"][0]


def test_the_planted_sentence_taught_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = printed("who_taught", tmp_path, "--sentences", "12", "--epochs", "100")
    assert 'it says "seven three nine one"' in out
    cosines = re.findall(rf"^ +{NUMBER}  (the .*)$", out, re.M)
    assert cosines[0][1] == "the code of the old vault is seven three nine one"
    assert float(cosines[0][0]) > 1.5 * float(cosines[1][0])
    assert number(rf"furthest from autograd.*: {NUMBER}", out) < 1e-4


def test_jacobian_descent_takes_the_steps_of_torchjd(tmp_path: Path) -> None:
    pytest.importorskip("torchjd")
    pytest.importorskip("quadprog")
    out = printed("jacobian_descent", tmp_path, "--steps", "10")
    rows = table(out, "mean of images", "UPGrad, by TorchJD", "UPGrad, by autograd_hacks")
    mean, theirs, ours = rows.values()
    assert ours[:2] == theirs[:2]
    assert ours[2] < 1e-4 < mean[2]
    assert ours[1] < mean[1]


def test_noise_is_backpacks_variance(tmp_path: Path) -> None:
    pytest.importorskip("backpack")
    out = printed("batch_size", tmp_path, "--epochs", "2")
    rows = [[float(number) for number in line.split()] for line in out.splitlines() if re.match(r" +\d", line)]
    assert [len(row) for row in rows] == [7, 7, 7]
    for _, ours, theirs, apart, scale, _, batches in rows:
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert apart < 1e-4
        assert scale > 0
        assert 0.8 < batches < 1.25  # of 200 draws


def test_without_backpack_a_line_says_so(tmp_path: Path) -> None:
    out = printed("batch_size", tmp_path, "--epochs", "1", "--draws", "20", without="backpack")
    assert re.search(r"^not compared with BackPACK.*pip install backpack-for-pytorch", out, re.M)
    assert "nan" in out
