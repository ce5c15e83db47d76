"""`check_rows`: what it must find in other engines' numbers, what it must pass, and that it leaves no trace."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import joined, one_loss_at_a_time
from oracle import of_classes as losses_of
from rarely import crossed
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.check import check_rows, comparisons
from autograd_hacks.check.comparisons import WHOLE, percent
from autograd_hacks.errors import VerificationFailed

Rows = dict[str, Tensor]
N = 6


def case(dtype: torch.dtype = torch.float64, samples: int = N) -> tuple[nn.Module, tuple[Tensor, Tensor], Rows]:
    """A model, a batch, and the right rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(samples, 5, dtype=dtype), torch.arange(samples) % 3
    return model, (x, y), rows_of(model, (x, y))


def rows_of(model: nn.Module, batch: tuple[Any, ...], losses: Callable[..., Tensor] = losses_of) -> Rows:
    found = one_loss_at_a_time(model, lambda: losses(model, *batch))
    return {name: rows for name, rows in found.items() if rows is not None}


def found(says: str, *args: Any, **kwargs: Any) -> str:
    """What is raised, which says something."""
    with pytest.raises(VerificationFailed, match=says) as raised:
        check_rows(*args, **kwargs)
    return str(raised.value)


def line_of(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.split("\n") if line.startswith(f"{name} ")]
    return re.split("  +", line)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_right_numbers_pass_in_every_form(dtype: torch.dtype) -> None:
    model, batch, rows = case(dtype)
    norms = {name: x.double().flatten(1).norm(dim=1).to(dtype) for name, x in rows.items()}
    whole = joined(rows).double()
    for given in (rows, norms, whole.norm(dim=1)):
        if isinstance(given, Tensor) and dtype == torch.bfloat16:
            assert check_rows(model, batch, losses_of, given).share < 1  # of whole norms small parts are not told
            continue
        checked = check_rows(model, batch, losses_of, given, coverage=1.0)
        assert all(line.verdict == "right" for line in checked.parameters)
        assert (checked.samples, checked.share, checked.numbers) == (N, 1.0, 75)
        title = "over all 75 parameters" if isinstance(given, Tensor) else "attributed: 100 % of 75 parameters"
        assert str(checked).split("\n")[0] == f"{N} samples, {title}"
        assert f">{checked}</pre>" in checked._repr_html_()
    assert [line.name for line in check_rows(model, batch, losses_of, rows).parameters] == list(rows)


@crossed(name=["0.weight", "2.bias"], dtype=[torch.float64, torch.float32])
def test_an_error_of_a_thousandth_in_one_sample_is_found(dtype: torch.dtype, name: str) -> None:
    model, batch, rows = case(dtype)
    for n in range(N):
        wrong = {k: x.clone() for k, x in rows.items()}
        wrong[name][n] *= 1.001
        text = found("wrong rows", model, batch, losses_of, wrong)
        _, shape, error, sample, verdict = line_of(text, name)
        assert (shape, sample, verdict) == (str(tuple(rows[name].shape[1:])), str(n), f"wrong: 1 of {N} samples")
        assert float(error) == pytest.approx(1e-3, rel=0.1)
        assert text.count("wrong: ") == 1
        norms = joined(rows).double().norm(dim=1)
        norms[n] *= 0.999
        assert "1 of 6 samples" in found("wrong norms", model, batch, losses_of, norms)


def test_an_error_in_a_sample_whose_gradient_is_small_is_found() -> None:
    model, (x, y), _ = case(torch.float32)

    def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model, x, y) * torch.tensor([1, 1e-6, 1, 1, 1e6, 1])

    rows = rows_of(model, (x, y), weighted)
    assert check_rows(model, (x, y), weighted, rows).share == 1
    rows["0.weight"][1, 0] *= 1.01
    assert line_of(found("0.weight", model, (x, y), weighted, rows), "0.weight")[3] == "1"


SWAPPED = [0, 1, 4, 3, 2, 5]
SLOPE = torch.linspace(0.5, 1, N)


MISTAKES: list[tuple[str, Callable[[Rows], Any], str]] = [
    # what is wrong, how it came, what is said
    ("rows", lambda rows: {k: x[SWAPPED] for k, x in rows.items()}, "(wrong: 2 of 6 samples.*){4}"),
    ("norms", lambda rows: joined(rows)[SWAPPED].norm(dim=1), "2 of 6"),
    *[("rows", lambda rows, by=by: {k: by * x for k, x in rows.items()}, f"rows are {says}")
      for by, says in [(N, "N times"), (1 / N, "1/N times"), (-1, "-1 times"), (2, "2 times"), (0, "zero")]],
    *[("norms", lambda rows, by=by: by * joined(rows).norm(dim=1), f"norms are {says}")
      for by, says in [(N, "N times"), (1 / N, "1/N times"), (2, "2 times")]],
    ("rows", lambda rows: {k: x * SLOPE.to(x).view(-1, *[1] * (x.ndim - 1)) for k, x in rows.items()},
     "the wrong length, 0.5 to 1 times"),
    ("norms", lambda rows: joined(rows).square().sum(1), "squares"),
    ("norms", lambda rows: {k: x.flatten(1).square().sum(1) for k, x in rows.items()}, "squares"),
    ("norms", lambda rows: joined(rows).norm(dim=1) * SLOPE.to(joined(rows)), "^(?!.*All norms)"),
    ("rows", lambda rows: {**rows, "0.weight": rows["0.weight"] * N}, "^(?!.*All rows)"),  # of some parameters alone
]  # fmt: skip


@crossed(mistake=MISTAKES, dtype=[torch.float64, torch.float32])
def test_a_mistake_is_found_and_recognised(mistake: tuple[str, Callable[[Rows], Any], str], dtype: torch.dtype) -> None:
    (what, change, says), (model, batch, rows) = mistake, case(dtype)
    text = found(f"wrong {what}", model, batch, losses_of, change(rows))
    assert re.search(f"(?s){says}", text), text
    if what == "rows":
        assert ("loss_reduction" in text) == ("rows are N times" in text or "rows are 1/N times" in text)


def test_a_parameter_that_is_lacking_is_said() -> None:
    model, batch, rows = case()
    for given in ({**rows, "0.weight": None}, {name: x for name, x in rows.items() if name != "0.weight"}):
        checked = check_rows(model, batch, losses_of, given)
        assert line_of(str(checked), "0.weight")[-1] == "not given"
        assert (checked.covered, checked.numbers) == (35, 75)
        assert "attributed: 46.6 % of 75 parameters" in str(checked)
        assert check_rows(model, batch, losses_of, given, coverage=0.46).share < 0.47
        text = found(r"too few rows.*coverage=0\.47", model, batch, losses_of, given, coverage=0.47)
        assert "not given" in text


def test_what_no_loss_depends_on_counts_for_nothing() -> None:
    model, batch, rows = case()
    model.unused = nn.Linear(50, 50).double()
    model.forward = lambda x: model[2](model[1](model[0](x)))
    checked = check_rows(model, batch, losses_of, rows, coverage=1.0)
    assert line_of(str(checked), "unused.weight")[-1] == "not given; no loss depends on it"
    rows["unused.bias"] = torch.zeros(N, 50).double()
    check_rows(model, batch, losses_of, rows, coverage=1.0)
    rows["unused.bias"][2, 3] = 1e-9
    assert line_of(found("wrong rows", model, batch, losses_of, rows), "unused.bias")[2:4] == ["inf", "2"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found(bad: float) -> None:
    model, batch, rows = case(torch.float32)
    rows["2.bias"][3, 1] = bad
    _, _, error, sample, verdict = line_of(found("wrong rows", model, batch, losses_of, rows), "2.bias")
    assert (error, sample, verdict) == ("inf", "3", "not finite: 1 of 6 samples")
    assert "not finite: 6 of 6" in found("wrong", model, batch, losses_of, torch.full((N,), bad))
    batch[0][2] = bad  # and so are losses
    assert "autograd's own is not finite" in found("wrong rows", model, batch, losses_of, rows)


def attends(m: nn.Module, x: Tensor) -> Tensor:
    """The keys' bias is the same for all positions, so that its true gradient is zero."""
    return m.head(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)).mean(1))


def mostly_sure(model: nn.Module, x: Tensor) -> Tensor:
    """Sample 2 is sure of its class, so that its loss is near zero."""
    out = model(x)
    y = out[2].argmax() + torch.tensor([0, 1, 0, 2, 1])
    return F.cross_entropy(out * torch.tensor([1, 1, 60, 1, 1])[:, None], y % 3, reduction="none")


def sure() -> tuple[nn.Module, Tensor, Rows]:
    """Of float32, with rows whose digits are all right."""
    torch.manual_seed(1)
    model, x = (
        Bare(attends, **{name: nn.Linear(8, 3 if name == "head" else 8) for name in ("q", "k", "v", "head")}),
        torch.randn(5, 7, 8),
    )
    rows = rows_of(model.double(), (x.double(),), mostly_sure)
    return model.float(), x, {name: own.float() for name, own in rows.items()}


def test_rounding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's own few digits of a gradient near zero are not held against an engine's."""
    model, x, rows = sure()
    table = str(check_rows(model, (x,), mostly_sure, rows))
    assert line_of(table, "k.bias")[-1] == "right; too few digits in float32: 5 of 5 samples"
    assert line_of(table, "head.weight")[3:] == ["2", "right; too few digits in float32: 1 of 5 samples"]
    whole = joined(rows).double().norm(dim=1)
    for given in (whole, {name: r.flatten(1).norm(dim=1) for name, r in rows.items()}):
        check_rows(model, (x,), mostly_sure, given)
    monkeypatch.setattr(comparisons.Comparison, "allowance", lambda *_: 0.0)
    for given in (rows, whole):
        found("wrong", model, (x,), mostly_sure, given)


def test_an_error_is_no_rounding() -> None:
    model, x, rows = sure()
    for name, n in zip(sorted(rows.keys() - {"k.bias"}), (0, 1, 3, 4, 0, 1, 3)):
        wrong = {k: v.clone() for k, v in rows.items()}
        wrong[name][n] *= 1.001
        assert line_of(found("wrong rows", model, (x,), mostly_sure, wrong), name)[3] == str(n)
    rows["k.bias"][1] += 1e-4 * rows["q.weight"][1, 0]
    assert line_of(found("wrong rows", model, (x,), mostly_sure, rows), "k.bias")[3] == "1"


def keyed(m: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
    """The keys' bias has a gradient of zero, summed from numbers as large as the other gradients."""
    h = m.words(ids)
    h = h + h.sum(1, keepdim=True)
    return F.cross_entropy(m.head(m.attend(h, m.keys(h), m.values(h))[0]).mT, y, reduction="none").mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_cancels_may_have_other_rounding(dtype: torch.dtype) -> None:
    """Each sample alone may sum in another order than the batch, and no digit of the keys' bias is common."""
    for seed in range(15, 30):
        torch.manual_seed(seed)
        model = Bare(
            keyed, words=nn.Embedding(7, 4), keys=nn.Linear(4, 5), values=nn.Linear(4, 5),
            attend=nn.MultiheadAttention(4, 2, batch_first=True, kdim=5, vdim=5), head=nn.Linear(4, 7),
        ).to(dtype)  # fmt: skip
        ids, y = torch.randint(7, (2, 2, 3))
        alone = [rows_of(model, (ids[n : n + 1], y[n : n + 1]), Bare.forward) for n in range(2)]
        check_rows(model, (ids, y), Bare.forward, {name: torch.cat([own[name] for own in alone]) for name in alone[0]})


@crossed(small=[1.0, 1e-2, 1e-4], dtype=[torch.float32, torch.float64])
def test_an_error_does_not_hide_behind_a_larger_gradient(small: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).to(dtype), torch.randn(N, 4, dtype=dtype)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return (model[0](x).sin() + small * model[1](x).sin()).sum(1)

    rows = rows_of(model, (x,), losses)
    for name in ("1.weight", "1.bias"):
        text = found("wrong rows", model, (x,), losses, {**rows, name: 1.001 * rows[name]})
        assert line_of(text, name)[-1] == "wrong: 6 of 6 samples"


def test_dropout_and_batch_norm_mean_what_they_do_in_a_step_and_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)).double()
    x, y = torch.randn(N, 4).double(), torch.arange(N) % 3
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    rows = rows_of(model, (x, y))
    for name, b in model.named_buffers():
        b.copy_(buffers[name])
    torch.set_rng_state(state)
    parameters, ids = {k: p.detach().clone() for k, p in model.named_parameters()}, [id(p) for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    check_rows(model, (x, y), losses_of, rows)
    found("wrong rows", model, (x, y), losses_of, {**rows, "0.bias": rows["0.weight"].sum(2)})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert [id(p) for p in model.parameters()] == ids
    assert all(
        torch.equal(p, parameters[name]) and torch.equal(p.grad, torch.ones_like(p)) for name, p in model.named_parameters()
    )
    torch.manual_seed(5)  # other masks
    found("wrong rows", model, (x, y), losses_of, rows)


def test_a_shared_parameter_has_any_of_its_names_and_is_one_gradient() -> None:
    """A table that is also read past its module, which hooks on modules don't see."""
    model = Bare(
        lambda m, ids: F.linear(m.table(ids).tanh(), m.head.weight).mean(1),
        table=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False),
    ).double()  # fmt: skip
    model.head.weight = model.table.weight
    batch = (torch.randint(7, (N, 3)), torch.arange(N) % 7)
    rows = rows_of(model, batch)["table.weight"]
    for given in ({"table.weight": rows}, {"head.weight": rows}, {"table.weight": rows, "head.weight": rows}):
        checked = check_rows(model, batch, losses_of, given, coverage=1.0)
        assert [line.name for line in checked.parameters] == list(given)
        assert checked.numbers == 28
    table = model.table.weight.detach().clone().requires_grad_()
    losses = F.cross_entropy((model.table(batch[0]).detach().tanh() @ table.T).mean(1), batch[1], reduction="none")
    part = torch.stack([torch.autograd.grad(one, table, retain_graph=True)[0] for one in losses])
    found("head.weight", model, batch, losses_of, {"head.weight": part})


def test_batches_and_losses_of_other_kinds() -> None:
    model, (x, y), rows = case()
    check_rows(model, {"x": x, "y": y}, lambda model, batch: losses_of(model, batch["x"], batch["y"]), rows)
    check_rows(model, x, lambda model, x: losses_of(model, x, y), rows)
    with torch.no_grad():
        check_rows(model, (x, y), losses_of, {name: r.to_sparse() for name, r in rows.items()})
    check_rows(model, [x, y], lambda model, batch: losses_of(model, *batch), rows)
    alone, batch, own = case(samples=1)
    for given in (own, joined(own).norm(dim=1)):
        check_rows(alone, batch, losses_of, given)


def test_rows_of_a_model_with_hooks() -> None:
    """Recording stops for the time, and the record stays."""
    model, (x, y), _ = case()
    with autograd_hacks.add_hooks(model, param_grad=False):
        autograd_hacks.backward(losses_of(model, x, y))
        grads = autograd_hacks.per_sample_grads(model)
        check_rows(model, (x, y), losses_of, grads.dense(), coverage=1.0)
        for given in (grads.norms(), grads.norms(per_parameter=True)):
            check_rows(model, (x, y), losses_of, given)
        with pytest.raises(TypeError, match=r"give dense\(\)"):
            check_rows(model, (x, y), losses_of, grads)
        assert torch.equal(autograd_hacks.per_sample_grads(model).norms(), grads.norms())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_masks_in_another_precision_are_not_taken_for_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(), nn.Linear(40, 3)).to(dtype)
    batch, state = (torch.randn(N, 5, dtype=dtype), torch.arange(N) % 3), torch.get_rng_state()
    rows = rows_of(model, batch)
    torch.set_rng_state(state)
    check_rows(model, batch, losses_of, rows)
    rows["0.weight"][2] *= 1.2 if dtype == torch.bfloat16 else 1.001
    assert line_of(found("wrong rows", model, batch, losses_of, rows), "0.weight")[3] == "2"


def test_autocast_allows_for_its_dtype() -> None:
    model, (x, y), _ = case(torch.float32)

    def under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), y, reduction="none")

    with torch.autocast("cpu", torch.bfloat16):
        rows = rows_of(model, (x, y), under_autocast)
        check_rows(model, (x, y), under_autocast, rows)
        x = 30 * x  # some samples are sure of their class, and have few digits
        model.double()
        with torch.autocast("cpu", enabled=False):
            exact = rows_of(model, (x.double(), y))
        table = str(check_rows(model.float(), (x, y), under_autocast, exact))
        assert "too few digits in bfloat16" in table
        rows = rows_of(model, (x, y), under_autocast)
        rows["2.weight"][4] *= 1.2
        found("wrong rows", model, (x, y), under_autocast, rows)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_rows_of_a_model_with_another_engines_hooks() -> None:
    """Theirs don't run, and keep what they have."""
    model, batch, rows = case()
    seen: list[str] = []
    handles = [layer.register_full_backward_hook(lambda *_: seen.append("backward")) for layer in model]
    handles += [layer.register_full_backward_pre_hook(lambda *_: (torch.zeros(N, 1),)) for layer in model]
    check_rows(model, batch, losses_of, rows)
    found("wrong rows", model, batch, losses_of, {name: 2 * x for name, x in rows.items()})
    assert not seen
    for handle in handles[3:]:
        handle.remove()
    losses_of(model, *batch).sum().backward()
    assert seen == ["backward"] * 3


@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_rows_of_a_model_that_opacus_has_wrapped() -> None:
    opacus = pytest.importorskip("opacus")
    model, batch, rows = case()
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")
    losses_of(wrapped, *batch).sum().backward()
    theirs = {name: p.grad_sample for name, p in model.named_parameters()}
    checked = check_rows(model, batch, losses_of, theirs, coverage=1.0)
    assert [line.verdict for line in checked.parameters] == ["right"] * 4
    check_rows(wrapped, batch, losses_of, {f"_module.{name}": x for name, x in rows.items()})
    assert all(p.grad_sample is theirs[name] for name, p in model.named_parameters())
    assert not any(layer.activations for layer in model if hasattr(layer, "activations"))


# Of whole norms: it certifies no parameter that could be lacking


def scaled(by: float, *sizes: int) -> nn.Module:
    """A linear layer whose gradient is small."""
    return Bare(lambda m, x: m.by * m.inner(x), inner=nn.Linear(*sizes), by=by)


def heads_case(dtype: torch.dtype, by: float) -> tuple[nn.Module, tuple[Tensor, Tensor], Rows]:
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
    model, batch, rows = heads_case(dtype, by)
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
    model, batch, rows = heads_case(torch.float64, 1e-3)
    checked = check_rows(model, batch, losses_of, norms(rows), coverage=1.0)
    assert [line.name for line in checked.parameters] == [WHOLE]
    for left_out in rows:
        with pytest.raises(VerificationFailed, match="wrong"):
            check_rows(model, batch, losses_of, norms({name: x for name, x in rows.items() if name != left_out}))


def test_one_sample_is_enough_to_tell() -> None:
    """A parameter that only sample 2 reaches, such as an expert's."""
    model, batch, _ = heads_case(torch.float32, 0.0)
    model.small.by = (torch.arange(N) == 2).float()[:, None]
    rows = rows_of(model, batch)
    lines = [line.name for line in check_rows(model, batch, losses_of, norms(rows)).parameters]
    assert lines == [WHOLE, "smaller.inner.weight", "smaller.inner.bias"]


def test_a_gradient_of_zero_is_not_told_by_sums() -> None:
    model, batch, rows = heads_case(torch.float64, 0.0)
    checked = check_rows(model, batch, losses_of, norms(rows))
    assert checked.covered == 18
    assert [line.name for line in checked.parameters][1:] == list(rows)[2:]
    assert check_rows(model, batch, losses_of, rows, coverage=1.0).share == 1
