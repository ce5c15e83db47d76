"""Labels of rows: they follow rows that stay, and no others."""

import torch

from autograd_hacks.probe.labels import carried


def test_a_matrix_from_the_left_moves_rows() -> None:
    x, order = torch.randn(3, 3), torch.eye(3).flip(0)
    rows = {id(x): torch.arange(3)}
    assert carried("matmul", (order, x), order @ x, rows) is None
    found = carried("matmul", (x, order), x @ order, rows)
    assert found is not None
    assert torch.equal(found, torch.arange(3))
