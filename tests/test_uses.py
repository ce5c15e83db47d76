"""The benchmark's whole uses; no time is asserted."""

import os

import peers
import pytest
import torch
import uses
import uses_report
from given import given

CPU = torch.device("cpu")
IN_TESTS = [
    (use, peer)
    for use, own in uses.USES.items()
    for peer in own.theirs
    if not {"bergson", "kronfluence"} & {*own.packages.values()}
]


@pytest.mark.filterwarnings("ignore")  # others' own
@pytest.mark.parametrize(("name", "peer"), IN_TESTS)
def test_whole_uses_bring_what_other_systems_bring(name: str, peer: str) -> None:
    use, of = uses.USES[name], given(40, 8, 20)
    if peers.installed_version(use.packages[peer]) is None and not os.environ.get("CI"):
        pytest.skip(f"{use.packages[peer]} is not installed; tox -e py brings it")
    assert use.apart(use.ours(of)(), use.theirs[peer](of)()) <= use.limit


def test_whole_uses_are_compared_before_they_are_timed(monkeypatch) -> None:
    def ours(of):
        return lambda: torch.arange(3.0)

    def other(of):
        return lambda: 1.01 * torch.arange(3.0)

    def failing(of):
        raise NotImplementedError("not for this\nmodel")

    packages = {"same": "torch", "failing": "torch", "absent": "no-such-package"}
    theirs = {"same": ours, "failing": failing, "absent": other}
    own = uses.Use("{samples} numbers", ours, theirs, packages)
    monkeypatch.setattr(uses, "USES", {"a use": own})
    found = uses.uses(2, CPU, given(10, 2, 5))["a use"]
    assert found["what"] == "10 numbers"
    assert len(found["seconds"]["same"]) == 2
    assert found["failures"] == {"failing": "NotImplementedError: not for this", "absent": "not installed"}
    found["seconds"] = {uses_report.OURS: [0.1, 0.2], "same": [0.2, 0.5]}
    assert "100 ms" not in uses_report.as_text({"a use": found})
    assert all(part in uses_report.as_text({"a use": found}) for part in ("150 ms", "2.25", "not installed"))
    about = {"machine": "a machine", "threads": 1, "processors": 2, "torch": "2", "packages": {"captum": "1"}}
    data = {"about": {**about, "date": "today", "rounds": 2}, "uses": {"a use": found}}
    assert all(part in uses_report.as_page(data) for part in ("     - 2.25", "captum 1", "not installed"))
    own.theirs["same"] = other
    with pytest.raises(RuntimeError, match=r"same's numbers are 9[.]9e-03"):
        uses.uses(2, CPU, given(10, 2, 5))
