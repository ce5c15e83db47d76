"""What steps cost, by device: the table's numbers for cards that were timed, and those of arithmetic for others."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import device_costs
import pytest
import torch

from autograd_hacks.forms import cost
from autograd_hacks.forms.positions import Windows

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
    clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
)  # fmt: skip
GAMES = SimpleNamespace(**{**vars(H100), "name": "a card for games", "major": 8, "minor": 9, "memory_bus_width": 384})
SILENT = SimpleNamespace(name="a card that tells little", major=9, minor=0, multi_processor_count=132)


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


def test_what_a_card_costs_follows_from_its_bandwidth() -> None:
    """33.5 · 10¹² multiplications and 3.35 · 10¹² bytes a second: 40 multiplications while a number is moved."""
    costs = cost.costs_by_bandwidth(H100)
    assert costs.write == costs.read == pytest.approx(40, rel=0.01)
    assert costs.double == 2
    assert cost.costs_by_bandwidth(GAMES).double == 64
    assert cost.costs_by_bandwidth(GAMES).write > 500
    assert cost.costs_by_bandwidth(SILENT).write == cost.INTENSITY


def test_a_card_that_was_timed_has_its_own_numbers(table: Path) -> None:
    own = {**json.loads(table.read_text())["cpu"], "write": 123}
    table.write_text(json.dumps({**json.loads(table.read_text()), H100.name: own}))
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=H100):
        assert cost.costs_of(torch.device("cuda", 0)).write == 123
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=GAMES):
        assert cost.costs_of(torch.device("cuda", 1)) == cost.costs_by_bandwidth(GAMES)


def test_other_devices_cost_what_a_cpu_does() -> None:
    cpu = cost.costs_of(torch.device("cpu"))
    assert cost.costs_of(torch.device("meta")) == cost.costs_of(torch.device("mps", 0)) == cpu


@pytest.mark.parametrize(
    ("channels", "fan_out", "kernel", "image", "is_cut"),
    [(3, 16, 3, 32, True), (16, 16, 3, 32, False), (16, 32, 3, 16, False), (64, 128, 1, 8, True), (64, 20, 3, 4, False)],
)
def test_few_channels_go_through_windows_and_blocks_of_them_do_not(
    channels: int, fan_out: int, kernel: int, image: int, is_cut: bool
) -> None:
    axes = [(size, size) for size in (kernel, 1, kernel // 2, 1, image)]
    assert cost.way_of_convolution(Windows(torch.empty(16, channels, image, image), *axes), fan_out)[0] == is_cut


def test_all_costs_are_measured_and_written(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_costs, "ROUNDS", 1)
    device_costs.main(["--size", "256"])
    written = json.loads(table.read_text())["cpu"]
    assert written != json.loads(Path(cost.__file__).with_name("costs.json").read_text())["cpu"]
    assert all(value >= 0 for value in vars(cost.Costs(**written)).values())
