"""`check_rows` of whole norms: it certifies no parameter that could be lacking; and what it is given."""

import pytest
import torch
import torch.nn as nn
from oracle import joined
from test_check_rows import N, Rows, losses_of, rows_of
from torch import Tensor
from twin import Bare

from autograd_hacks.check import check_rows
from autograd_hacks.check.comparisons import WHOLE, percent
from autograd_hacks.errors import VerificationFailed


def scaled(by: float, *sizes: int) -> nn.Module:
    """A linear layer whose gradient is small."""
    return Bare(lambda m, x: m.by * m.inner(x), inner=nn.Linear(*sizes), by=by)


def case(dtype: torch.dtype, by: float) -> tuple[nn.Module, tuple[Tensor, Tensor], Rows]:
    """Two heads that are added up, of which one has small gradients.  by: how small"""
    torch.manual_seed(0)

    model = Bare(
        lambda m, x: m.large(x) + m.small(x) + m.smaller(x),
        large=nn.Linear(5, 3),
        small=scaled(by, 5, 3),
        smaller=scaled(by / 2, 5, 3),
    ).to(dtype)
    batch = torch.randn(N, 5, dtype=dtype), torch.arange(N) % 3
    return model, batch, rows_of(model, batch)


def norms(rows: Rows) -> Tensor:
    return joined(rows).double().norm(dim=1)


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_what_could_be_lacking_is_not_certified(dtype: torch.dtype, by: float) -> None:
    """Numbers with and without small parameters are both right, so that neither says that they are there."""
    model, batch, rows = case(dtype, by)
    for left_out in ("nothing", "smaller", "small"):  # 'small' is in both names
        given = norms({name: x for name, x in rows.items() if left_out not in name})
        checked = check_rows(model, batch, losses_of, given)
        lines = {line.name: line.verdict for line in checked.parameters}
        assert lines.pop(WHOLE) == "right"
        assert set(lines) >= {f"{layer}.inner.{what}" for layer in ("small", "smaller") for what in ("weight", "bias")}
        assert all(verdict == "unknown: too small to make a difference" for verdict in lines.values())
        assert checked.covered == sum(x[0].numel() for name, x in rows.items() if name not in lines)
        text = str(checked)
        assert f"over all 54 parameters; shown to be in it: {percent(checked.share)}\n" in text
        assert "by name, or compute in float64" in text
        with pytest.raises(VerificationFailed, match=r"too few.*coverage=1\.0"):
            check_rows(model, batch, losses_of, given, coverage=1.0)
    assert check_rows(model, batch, losses_of, rows, coverage=1.0).share == 1


def test_with_more_digits_all_is_told() -> None:
    model, batch, rows = case(torch.float64, 1e-3)
    checked = check_rows(model, batch, losses_of, norms(rows), coverage=1.0)
    assert [line.name for line in checked.parameters] == [WHOLE]
    for left_out in rows:
        with pytest.raises(VerificationFailed, match="wrong"):
            check_rows(model, batch, losses_of, norms({name: x for name, x in rows.items() if name != left_out}))


def test_one_sample_is_enough_to_tell() -> None:
    """A parameter that only sample 2 reaches, such as an expert's."""
    model, batch, _ = case(torch.float32, 0.0)
    model.small.by = (torch.arange(N) == 2).float()[:, None]
    rows = rows_of(model, batch)
    lines = [line.name for line in check_rows(model, batch, losses_of, norms(rows)).parameters]
    assert lines == [WHOLE, "smaller.inner.weight", "smaller.inner.bias"]


def test_a_gradient_of_zero_is_not_told_by_sums() -> None:
    model, batch, rows = case(torch.float64, 0.0)
    checked = check_rows(model, batch, losses_of, norms(rows))
    assert checked.covered == 18
    assert [line.name for line in checked.parameters][1:] == list(rows)[2:]
    assert check_rows(model, batch, losses_of, rows, coverage=1.0).share == 1
