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


# The gallery's examples on digits agree with the systems that they are held to, at a small size


def test_learned_weights_are_autograds_and_less_for_wrong_labels(tmp_path: Path) -> None:
    out = printed("learning_to_reweight", tmp_path, "--epochs", "12")
    assert number(r"furthest from autograd's (\S+) of", out) < 1e-5
    assert number(r"mean weight: (\S+) of right", out) > 1.3 * number(r"labels, (\S+) of wrong", out)
    assert number(r"reweighted (\S+);", out) > 0.6
    assert "at its best epoch" in out
    assert "chosen on these images" in out


def test_the_file_that_explains_the_library_agrees_with_it(tmp_path: Path) -> None:
    out = printed("how_it_works", tmp_path)
    assert "table.weight meets the batch at EmbeddingBackward0" in out
    assert "gain         meets the batch at MulBackward0, behind AddBackward0" in out
    assert "samples mix at first.bias, first.weight, gain, place, table.weight\n" in out
    assert "This file, the library and one backward pass for each sample agree." in out
    assert "at SubBackward0, before gain" in out


def test_self_influence_finds_wrong_labels_without_peers_too(tmp_path: Path) -> None:
    out = printed(
        "find_wrong_labels", tmp_path, "--images", "400", "--epochs", "9", without="captum.influence kronfluence.analyzer"
    )
    for name in ("gradient's length²", "TracIn", "EK-FAC"):
        assert number(rf"(?m)^{name} +(0\.\d+)", out) > 0.8
    assert "not compared with captum" in out
    assert "not compared with kronfluence" in out


def test_tracin_is_captums_and_ekfac_kronfluences(tmp_path: Path) -> None:
    pytest.importorskip("captum")
    pytest.importorskip("kronfluence")
    out = printed("find_wrong_labels", tmp_path, "--images", "400", "--epochs", "9")
    assert number(r"TracIn is captum's to (\S+) of", out) < 1e-4
    assert number(r"rank correlation with kronfluence's (\S+)", out) > 0.95


def test_both_backends_are_equally_sure(tmp_path: Path) -> None:
    pytest.importorskip("laplace")
    pytest.importorskip("curvlinops")
    out = printed("uncertainty", tmp_path, "--epochs", "20", "--train", "40", "--test", "30", "--angles", "2")
    assert number(r"furthest that a probability is from the other backend's: (\S+)", out) < 1e-4


def test_a_language_model_is_trained_privately_and_its_lengths_are_opacus(tmp_path: Path) -> None:
    for name in ("peft", "accelerate", "opacus"):
        pytest.importorskip(name)
    out = printed("private_language_model", tmp_path, "--epochs", "1", "--sequences", "600", "--public", "5")
    assert number(r"gradients are Opacus' to (\S+)", out) < 1e-4
    assert 7.5 < number(r"(?m)^epsilon (\S+) for delta", out) <= 8


def test_values_of_a_step_are_those_of_all_its_subsets(tmp_path: Path) -> None:
    out = printed("in_run_shapley", tmp_path, "--epochs", "8")
    off = r"{} +(?:\S+e\S+ +){{{}}}(\S+)"
    assert number(off.format("a linear loss, a linear model", 0), out) < 1e-12
    assert number(off.format("a linear loss, a linear model", 1), out) < 1e-12
    assert number(off.format("a quadratic loss, a linear model", 1), out) < 1e-12
    assert number(off.format("a quadratic loss, a linear model", 0), out) > 0.01  # to first order it is not
    assert (
        number(off.format("cross entropy, a network", 1), out) < number(off.format("cross entropy, a network", 0), out) / 2
    )
    assert number(r"during_backward is the same to (\S+)", out) < 1e-5
    assert number(r"(\d+) of 1697 labels are wrong", out) == 255
    for order in ("first order", "second order"):
        assert number(rf"{order} +(\d+) have one", out) > 150  # by chance 38
        assert number(rf"{order} .* add up to (\S+),", out) < 0
