"""The gallery's examples on digits agree with the systems that they are held to, at a small size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def printed(name: str, folder: Path, *options: str, without: str = "") -> str:
    """What the example prints.  It has drawn its picture.  without: a package that is not there"""
    script = ROOT / "docs" / "examples" / f"{name}.py"
    arguments = [script.name, "--output", str(folder), *options]
    code = (
        f"import runpy, sys; sys.argv = {arguments!r}; sys.path[:0] = {[str(ROOT), str(script.parent)]!r}\n"
        f"sys.modules.update(dict.fromkeys({without.split()!r}))\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    settings = {**os.environ, "TQDM_DISABLE": "1", "MPLBACKEND": "agg"}
    settings.pop("DEMO_IN_GALLERY", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return done.stdout


def number(pattern: str, out: str) -> float:
    found = re.search(pattern, out)
    assert found, out
    return float(found[1])


def test_learned_weights_are_autograds_and_less_for_wrong_labels(tmp_path: Path) -> None:
    out = printed("learning_to_reweight", tmp_path, "--epochs", "12")
    assert number(r"furthest from autograd's (\S+) of", out) < 1e-5
    assert number(r"mean weight: (\S+) of right", out) > 1.3 * number(r"labels, (\S+) of wrong", out)
    assert number(r"reweighted (\S+);", out) > 0.6
    assert "at its best epoch" in out
    assert "chosen on these images" in out


def test_self_influence_finds_wrong_labels_without_peers_too(tmp_path: Path) -> None:
    out = printed(
        "find_wrong_labels", tmp_path, "--images", "600", "--epochs", "9", without="captum.influence kronfluence.analyzer"
    )
    for name in ("gradient's length²", "TracIn", "EK-FAC"):
        assert number(rf"(?m)^{name} +(0\.\d+)", out) > 0.8
    assert "captum's TracIn: skipped, captum" in out
    assert "kronfluence's EK-FAC: skipped, kronfluence" in out


def test_tracin_is_captums_and_ekfac_kronfluences(tmp_path: Path) -> None:
    pytest.importorskip("captum")
    pytest.importorskip("kronfluence")
    out = printed("find_wrong_labels", tmp_path, "--images", "600", "--epochs", "9")
    assert number(r"TracIn is captum's to (\S+) of", out) < 1e-4
    assert number(r"rank correlation with kronfluence's (\S+)", out) > 0.95


def test_both_backends_are_equally_sure(tmp_path: Path) -> None:
    pytest.importorskip("laplace")
    pytest.importorskip("curvlinops")
    out = printed("uncertainty", tmp_path, "--epochs", "20", "--train", "40", "--test", "30", "--angles", "2")
    assert number(r"furthest that a probability is from the other backend's: (\S+)", out) < 1e-4


def test_without_laplace_it_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"autograd-hacks\[laplace\]"):
        printed("uncertainty", tmp_path, without="laplace")
