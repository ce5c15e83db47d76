"""The benchmark's whole uses; no time is asserted."""

import dataclasses
import os

import pytest
import report
import torch
import uses
from given import given
from ways import installed_version

IN_TESTS = [(use, peer) for use, own in uses.USES.items() for peer in own.theirs if own.package != "kronfluence"]


@pytest.mark.filterwarnings("ignore")  # others' own
@pytest.mark.parametrize(("name", "peer"), IN_TESTS)
def test_whole_uses_bring_what_other_systems_bring(name: str, peer: str) -> None:
    use, of = uses.USES[name], given(40, 8, 20)
    if installed_version(use.package) is None and not os.environ.get("CI"):
        pytest.skip(f"{use.package} is not installed; tox -e py brings it")
    assert use.apart(use.ours(of), use.theirs[peer](of)) <= use.limit


def test_whole_uses_are_compared_before_they_are_timed() -> None:
    def failing(of):
        raise NotImplementedError("not for this\nmodel")

    ways = {"same": lambda of: torch.arange(3.0), "failing": failing, "other": lambda of: 1.01 * torch.arange(3.0)}
    use = uses.Use("{samples} numbers", ways["same"], "torch", ways)
    found = uses.measured(use, 2, given(10, 2, 5))
    assert {way: len(own) for way, own in found["seconds"].items()} == {"ours": 2, "ours, probe=False": 2, "same": 2}
    other = "its numbers are 9.9e-03 from ours; expected 1e-04 at most"
    assert found["failures"] == {"failing": "NotImplementedError: not for this", "other": other}
    found["seconds"] = {"ours": [0.1, 0.2], "same": [0.2, 0.5]}
    assert report.rows_of(found)["same"][:2] == ["350.00", "2.33"]
    absent = uses.measured(dataclasses.replace(use, package="no-such-package"), 1, given(10, 2, 5))
    assert absent["failures"] == dict.fromkeys(ways, "not installed")
