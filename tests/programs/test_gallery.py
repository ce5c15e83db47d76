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


Bounds = dict[str, tuple[float, float]]
NONE = float("inf")
SAYS: dict[str, tuple[str, tuple[str, ...], dict[str, str], Bounds, tuple[str, ...]]] = {
    # name: (page, modules that it needs, options, numbers with their bounds, words)
    "low ranks": ("logra", (), {}, {
        r"rank 64: the furthest (\S+) of": (0, 1e-4), r"rank +8: correlation (\S+),": (0.5, NONE),
    }, ()),
    "LESS": ("less", (), {}, {
        r"formula, not projected: (\S+)": (0.8, NONE), r"LESS .* images, +(\d+)% on": (71, NONE),  # of all 14 %
    }, ()),
    "duplicates": ("dedup", (), {}, {r"pairs (\d+) are among": (35, NONE), r"off by (\S+) on": (0, 0.01)}, ()),
    "TRAK's scores are traker's": ("trak_scores", ("trak",), {}, {r"furthest from traker's: (\S+) of": (0, 1e-4)}, ()),
    "TrackStar finds facts and is its formula": ("trackstar", ("transformers",), {}, {
        r"from the definition (\S+), of": (0, 1e-3), r"TrackStar .*first 10: +(\d+)%": (90, NONE),
    }, ()),
    "the replay predicts trainings": ("magic_replay", (), {}, {r"LDS, .*: (\S+)": (0.97, NONE)}, ()),
    "without BackPACK a line says so": ("batch_size", (), {"--epochs": "1", "--draws": "20", "without": "backpack"}, {}, (
        r"^not compared with BackPACK.*pip install backpack-for-pytorch", "nan",
    )),
    "the file that explains the library agrees with it": ("how_it_works", (), {}, {}, (
        r"table\.weight meets the batch at EmbeddingBackward0",
        r"gain         meets the batch at MulBackward0, behind AddBackward0",
        r"samples mix at first\.bias, first\.weight, gain, place, table\.weight\n",
        r"This file, the library and one backward pass for each sample agree\.",
        r"at SubBackward0, before gain",
    )),
    "self influence finds wrong labels without peers too": ("find_wrong_labels", (), {
        "--images": "400", "--epochs": "9", "without": "captum.influence kronfluence.analyzer",
    }, {rf"(?m)^{name} +(0\.\d+)": (0.8, NONE) for name in ("gradient's length²", "TracIn", "EK-FAC")}, (
        "not compared with captum", "not compared with kronfluence",
    )),
    "TracIn is captum's and EK-FAC kronfluence's": ("find_wrong_labels", ("captum", "kronfluence"), {
        "--images": "400", "--epochs": "9",
    }, {r"TracIn is captum's to (\S+) of": (0, 1e-4), r"rank correlation with kronfluence's (\S+)": (0.95, NONE)}, ()),
    "both backends are equally sure": ("uncertainty", ("laplace", "curvlinops"), {
        "--epochs": "20", "--train": "40", "--test": "30", "--angles": "2",
    }, {r"furthest that a probability is from the other backend's: (\S+)": (0, 1e-4)}, ()),
    "a language model is trained privately and its lengths are Opacus'": (
        "private_language_model", ("peft", "accelerate", "opacus"),
        {"--epochs": "1", "--sequences": "600", "--public": "5"},
        {r"gradients are Opacus' to (\S+)": (0, 1e-4), r"(?m)^epsilon (\S+) for delta": (7.5, 8)}, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_what_a_page_prints(name: str, tmp_path: Path) -> None:
    page, needs, options, numbers, words = SAYS[name]
    for module in needs:
        pytest.importorskip(module)
    given = (part for pair in options.items() if pair[0] != "without" for part in pair)
    out = printed(page, tmp_path, *given, without=options.get("without", ""))
    for pattern, (least, most) in numbers.items():
        assert least <= number(pattern, out) <= most, pattern
    for pattern in words:
        assert re.search(pattern, out, re.M), pattern


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


# The gallery's examples on digits agree with the systems that they are held to, at a small size


def test_learned_weights_are_autograds_and_less_for_wrong_labels(tmp_path: Path) -> None:
    out = printed("learning_to_reweight", tmp_path, "--epochs", "12")
    assert number(r"furthest from autograd's (\S+) of", out) < 1e-5
    assert number(r"mean weight: (\S+) of right", out) > 1.3 * number(r"labels, (\S+) of wrong", out)
    assert number(r"reweighted (\S+);", out) > 0.6
    assert "at its best epoch" in out
    assert "chosen on these images" in out


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
