"""What steps cost, by device."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import device_costs
import pytest
import torch

from autograd_hacks.forms import cost


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the table."""
    path = tmp_path / "costs.json"
    path.write_text(cost.TABLE.read_text())
    for module in (cost, device_costs):
        monkeypatch.setattr(module, "TABLE", path)
    cost._costs_of.cache_clear()
    yield path
    cost._costs_of.cache_clear()


@pytest.mark.parametrize(("capability", "double"), [((9, 0), 2), ((8, 9), 64)])
def test_cards_without_units_for_float64(capability: tuple[int, int], double: float) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert cost.costs_of(torch.device("cuda", 0)).double == double


def test_other_devices_cost_what_a_cpu_does() -> None:
    cpu = cost.costs_of(torch.device("cpu"))
    assert cost.costs_of(torch.device("meta")) == cost.costs_of(torch.device("mps", 0)) == cpu


def test_all_costs_are_measured_and_written(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_costs, "ROUNDS", 1)
    device_costs.main(["--size", "256"])
    written = json.loads(table.read_text())["cpu"]
    assert written != json.loads(Path(cost.__file__).with_name("costs.json").read_text())["cpu"]
    assert all(value >= 0 for value in vars(cost.Costs(**written)).values())
