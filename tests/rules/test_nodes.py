"""Nodes at which parameters meet the batch, read off the graph, against one backward per sample."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from of_devices import BATCH_NORMS, first_of
from oracle import assert_rows, one_loss_at_a_time, squares
from rarely import crossed
from steps import check_hooked
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks import forms
from autograd_hacks.formulas.met import Formula, Met
from autograd_hacks.formulas.table import NODES

REAL, COMPLEX = torch.float64, torch.complex128


@dataclass
class Case:
    """A function and how it is called: values of parameters at `wanted`, tensors of the batch at `batch`."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    wanted: tuple[int | str, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: positions and names of the batch's tensors, and the axis of the samples in each
    batch: dict[int | str, int] = field(default_factory=lambda: {0: 0})
    #: the samples' axis in the output
    axis: int = 0

    @property
    def given(self) -> dict[int | str, Any]:
        return {**dict(enumerate(self.args)), **self.kwargs}

    def call(self, given: dict[int | str, Any]) -> Tensor:
        positional = [given[k] for k in range(len(self.args))]
        return self.function(*positional, **{k: given[k] for k in self.kwargs})

    def rows(self) -> dict[int | str, Tensor]:
        """One backward for each sample."""
        given = {w: v.clone().requires_grad_() if w in self.wanted else v for w, v in self.given.items()}
        losses = squares(self.call(given).movedim(self.axis, 0))
        values = [given[w] for w in self.wanted]
        rows = [torch.autograd.grad(loss, values, retain_graph=True) for loss in losses]
        return {w: torch.stack(found) for w, found in zip(self.wanted, zip(*rows))}

    def model(self, by_way: bool) -> nn.Module:
        """by_way: whether the function gets something that follows from each parameter, in its place"""
        return _Called(self, by_way)

    def batch_dim(self) -> dict[str, int | None]:
        return {f"x{place}": axis for place, axis in self.batch.items()}


class _Called(nn.Module):
    def __init__(self, case: Case, by_way: bool) -> None:
        super().__init__()
        self.case, self.by_way = case, by_way
        for place in case.wanted:
            self.register_parameter(f"p{place}", nn.Parameter(case.given[place].clone()))

    def forward(self, **batch: Tensor) -> Tensor:
        given = self.case.given | {place: batch[f"x{place}"] for place in self.case.batch}
        for place in self.case.wanted:
            p = getattr(self, f"p{place}")
            given[place] = p * 2 - p if self.by_way else p
        return self.case.call(given).movedim(self.case.axis, 0)


def r(*shape: int, dtype: torch.dtype = REAL) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def cases(n: int, dtype: torch.dtype) -> list[Case]:
    def t(*shape: int) -> Tensor:
        return r(*shape, dtype=dtype)

    found = []
    for lead in [(n,), (n, 4), (n, 2, 3)]:
        found += [
            Case("linear", F.linear, (t(*lead, 3), t(2, 3), t(2)), (1, 2)),
            Case("linear", F.linear, (t(*lead, 3), t(2, 3)), ("bias",), {"bias": t(2)}),
            Case("linear", F.linear, (t(*lead, 3), t(3)), (1,)),
            Case("matmul", torch.matmul, (t(*lead, 3), t(3, 2)), (1,)),
            Case("matmul", torch.matmul, (t(*lead, 3), t(3)), (1,)),
            Case("matmul", torch.matmul, (t(2, 3), t(*lead, 3, 4)), (0,), batch={1: 0}),
            Case("matmul", torch.matmul, (t(3), t(*lead, 3, 4)), (0,), batch={1: 0}),
            Case("mul", torch.mul, (t(*lead, 3), t(3)), (1,)),
            Case("mul", torch.mul, (t(*[1] * (len(lead)), 3), t(*lead, 1)), (0,), batch={1: 0}),
            Case("add", torch.add, (t(*lead, 3), t(3)), (1,), {"alpha": 2.5}),
            Case("add", torch.add, (t(3), t(*lead, 3)), (0,), batch={1: 0}),
            Case("sub", torch.sub, (t(*lead, 3), t(3)), (1,), {"alpha": 2}),
            Case("sub", torch.sub, (t(3),), (0,), {"other": t(*lead, 3)}, {"other": 0}),
            Case("rsub", torch.rsub, (t(*lead, 3), t(3)), (1,), {"alpha": 2}),
            Case("rsub", torch.rsub, (t(3), t(*lead, 3)), (0,), {"alpha": 2}, {1: 0}),
        ]
        index = torch.randint(5, lead)
        for table in [t(5), t(5, 3), t(5, 2, 3)]:
            found += [
                Case("getitem", Tensor.__getitem__, (table, index), (0,), batch={1: 0}),
                Case("getitem", Tensor.__getitem__, (table, index.int() - 5), (0,), batch={1: 0}),
            ]
    found += [
        Case("matmul", torch.matmul, (t(2, 3), t(3, n)), (0,), batch={1: 1}, axis=1),
        Case("matmul", torch.matmul, (t(3), t(3, n)), (0,), batch={1: 1}),
        Case("bmm", torch.bmm, (t(2, n, 3), t(2, 3, 4)), (1,), batch={0: 1}, axis=1),
        Case("bmm", torch.bmm, (t(2, 4, 3), t(2, 3, n)), (0,), batch={1: 2}, axis=2),
        Case("baddbmm", torch.baddbmm, (t(4), t(2, n, 3), t(2, 3, 4)), (0, 2), {"alpha": 2, "beta": 0.5}, {1: 1}, 1),
        Case("baddbmm", torch.baddbmm, (t(2, 4, 1), t(2, 4, 3), t(2, 3, n)), (0, 1), batch={2: 2}, axis=2),
        Case("div", torch.div, (t(n, 3), t(3)), (1,)),
        Case("div", torch.div, (t(3), t(n, 3)), (0,), batch={1: 0}),
        Case("addmm", torch.addmm, (t(2), t(n, 3), t(3, 2)), (0, 2), {"alpha": 2, "beta": 0.5}, {1: 0}),
        Case("index_select", torch.index_select, (t(5, 3), 0, torch.randint(5, (n,))), (0,), batch={2: 0}),
        Case("index_select", torch.index_select, (t(5, 2, 3), -3, torch.randint(5, (n,))), (0,), batch={2: 0}),
        Case("expand", Tensor.expand, (t(1, 3), n, -1), (0,), batch={}),
        Case("repeat", Tensor.repeat, (t(1, 3), n, 1), (0,), batch={}),
        Case("repeat", Tensor.repeat, (t(2, 3), (n, 1, 1)), (0,), batch={}),
        Case("repeat", Tensor.repeat, (t(3), (n, 2, 2)), (0,), batch={}),
    ]
    convs: list[tuple[int, Any, Any]] = [(1, F.conv1d, F.conv_transpose1d), (2, F.conv2d, F.conv_transpose2d)]
    in_space = [(3, F.conv3d, F.conv_transpose3d)] if dtype == REAL else []  # torch has none of complex numbers
    for d, conv, transposed in [*convs, *in_space]:
        x, w, b = t(n, 4, *[5] * d), t(6, 2, *[2] * d), t(6)
        found += [
            Case(f"conv{d}d", conv, (x, w, b, 2, 1, 2, 2), (1, 2)),
            Case(f"conv{d}d", conv, (x, w), (1,), {"padding": "same", "groups": 2}),
            Case(f"conv{d}d", conv, (x, t(6, 4, *[1] * d)), (1, "bias"), {"padding": "valid", "bias": b, "stride": (1,)}),
            Case(f"conv_transpose{d}d", transposed, (x, t(4, 3, *[2] * d), b, 2, 1, 1, 2, 1), (1, 2)),
            Case(f"conv_transpose{d}d", transposed, (x, t(4, 3, *[2] * d)), (1,), {"dilation": (2,) * d}),
        ]
    if dtype == REAL:
        found += cases_of_real_numbers(n)
    return found


def cases_of_real_numbers(n: int) -> list[Case]:
    found = []
    for lead in [(n,), (n, 4), (n, 2, 2)]:
        index = torch.randint(5, lead)
        found += [
            Case("bilinear", F.bilinear, (r(*lead, 3), r(*lead, 2), r(4, 3, 2), r(4)), (2, 3), batch={0: 0, 1: 0}),
            Case("embedding", F.embedding, (index, r(5, 3)), (1,)),
            Case("embedding", F.embedding, (index, r(5, 3)), (1,), {"padding_idx": -2}),
            Case("embedding", F.embedding, (index, r(5, 3), int(index.flatten()[0])), (1,)),
        ]
        x = r(*lead, 2, 3)
        found += [
            Case("layer_norm", F.layer_norm, (x, (2, 3), r(2, 3), r(2, 3)), (2, 3)),
            Case("layer_norm", torch.layer_norm, (x, (3,)), ("weight",), {"weight": r(3), "eps": 0.1}),
            Case("layer_norm", F.layer_norm, (x, [3]), ("bias",), {"bias": r(3)}),
            Case("rms_norm", F.rms_norm, (x, (3,), r(3)), (2,), {"eps": 0.1}),
            Case("rms_norm", F.rms_norm, (x, (2, 3)), ("weight",), {"weight": r(2, 3)}),
        ]
    for shape in [(n, 4), (n, 4, 5), (n, 4, 2, 3)]:
        x, mean, var = r(*shape), r(4), r(4).exp()
        found += [
            Case("batch_norm", F.batch_norm, (x, mean, var, r(4), r(4)), (3, 4)),
            Case("batch_norm", F.batch_norm, (x, mean, var), ("bias",), {"bias": r(4), "eps": 0.1}),
            *[
                Case(name, first_of(own), (x, r(4), r(4), mean, var, False, 0, 0.1), (1, 2))
                for name, own in BATCH_NORMS.items()
            ],
            Case("prelu", F.prelu, (x, r(1)), (1,)),
            Case("prelu", F.prelu, (x, r(4)), (1,)),
        ]
        if len(shape) > 2:
            found += [
                Case("group_norm", F.group_norm, (x, 2, r(4), r(4)), (2, 3)),
                Case("group_norm", F.group_norm, (x, 2), ("weight",), {"weight": r(4), "eps": 0.1}),
                Case("instance_norm", F.instance_norm, (x, None, None, r(4), r(4)), (3, 4)),
                Case(
                    "instance_norm", F.instance_norm, (x, mean, var), ("weight",), {"weight": r(4), "use_input_stats": False}
                ),
            ]
    return found


def all_cases() -> list[Any]:
    torch.manual_seed(0)
    given = [(n, dtype) for n in (1, 3) for dtype in (REAL, COMPLEX)]
    found = [(n, dtype, case) for n, dtype in given for case in cases(n, dtype) if n > 1 or case.batch]
    return [
        pytest.param(
            case, by_way, id=f"{case.name}-{n}-{dtype}-{by_way}", marks=() if by_way == number % 2 else pytest.mark.slow
        )
        for number, (n, dtype, case) in enumerate(found)
        for by_way in (False, True)
    ]


def rows_of(case: Case, by_way: bool) -> dict[str, Tensor]:
    model = case.model(by_way)
    with autograd_hacks.add_hooks(model, batch_dim=case.batch_dim() or None):
        squares(model(**{f"x{place}": case.given[place] for place in case.batch})).sum().backward()
        autograd_hacks.compute_grad1(model, loss_type="sum")
        return {name: p.grad1 for name, p in model.named_parameters()}


@pytest.mark.parametrize(("case", "by_way"), all_cases())
def test_rows_are_those_of_one_backward_per_sample(case: Case, by_way: bool) -> None:
    expected = case.rows()
    for wanted in [case.wanted, *[(w,) for w in case.wanted if len(case.wanted) > 1]]:
        found = rows_of(replace(case, wanted=wanted), by_way)
        assert found.keys() == {f"p{w}" for w in wanted}
        for w in wanted:
            assert_close(found[f"p{w}"], expected[w])


def test_each_formula_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    for name, formula in NODES.items():

        def noted(met: Met, name: str = name, formula: Formula = formula) -> Any:
            if (form := formula(met)) is not None:
                asked.add(name)
            return form

        monkeypatch.setitem(NODES, name, noted)
    for case in cases(3, REAL):
        rows_of(case, by_way=True)
    assert asked == NODES.keys() - {"FusedRmsNormBackward0"}  # which the CPU doesn't make


def test_a_real_value_beside_a_complex_batch_has_real_rows() -> None:
    x = r(3, 2, dtype=COMPLEX)
    for case in [Case("mul", torch.mul, (x, r(2)), (1,)), Case("add", torch.add, (x, r(2)), (1,), {"alpha": 2j})]:
        assert_close(rows_of(case, by_way=False)["p1"], case.rows()[1])


def normed(m: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([one * m.norm(m.token) for one in x.split(1)])


def convolved(m: nn.Module, x: Tensor) -> Tensor:
    weights = m.layer(x).view(len(x) * 3, 3, 1)  # each sample has its own
    signal = m.token.view(1, 3, 1).repeat(len(x), 1, 1).view(1, -1, 1)
    return F.conv1d(signal, weights, groups=len(x)).view(len(x), 3)


def joined(m: nn.Module, x: Tensor) -> Tensor:
    made = m.layer(m.table)
    return x @ (m.weight @ made.T) * made[: len(x), :1]


def one_by_one(m: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([one * row for one, row in zip(x, m.table.cumsum(0))])  # there are more rows than samples


def of_columns(m: nn.Module, x: Tensor) -> Tensor:
    return torch.addmm(m.token.T, m.weight, x.T).T + (m.weight @ x.sin().T).T  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("program", [normed, convolved, joined, one_by_one, of_columns])
def test_a_value_of_parameters_is_no_layers_own_weight(program: Callable[..., Tensor], samples: int) -> None:
    """It may be the input of a layer; and meet the batch sample by sample and as a whole."""
    model = Bare(
        program, layer=nn.Linear(3, 9 if program is convolved else 3), norm=nn.LayerNorm(3), token=torch.randn(1, 3),
        table=torch.randn(6, 3), weight=torch.randn(3, 3),
    ).double()  # fmt: skip
    for _ in range(3):
        x = r(samples, 3)
        check_hooked(model, lambda x=x: squares(model(x)))


# Experts in one stack, all applied by one grouped product


if not hasattr(F, "grouped_mm"):
    pytest.skip("this torch has no grouped product", allow_module_level=True)

EXPERTS, WIDTH, OUT = 4, 8, 12


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """Each token goes to one expert, and expert 3 gets none."""
    tokens = x.flatten(0, 1)
    score, expert = m.gate(tokens).softmax(-1).max(-1)
    order = expert.argsort(stable=True)
    ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0).int()
    weight = m.stack.transpose(-2, -1) if m.transposed else m.stack
    y = F.grouped_mm(m.before(tokens)[order], weight, offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return (y[back] * score[:, None]).unflatten(0, x.shape[:2])


@crossed(transposed=[False, True], param_grad=[True, False])
@pytest.mark.parametrize(("samples", "tokens"), [(5, 3), (4, 4), (1, 6), (6, 1)])
def test_rows_of_a_stack(samples: int, tokens: int, transposed: bool, param_grad: bool) -> None:
    stack = torch.randn(EXPERTS, *((OUT, WIDTH) if transposed else (WIDTH, OUT)))
    layers = {"before": nn.Linear(5, WIDTH), "gate": nn.Linear(5, EXPERTS - 1)}
    model = Bare(routed, **layers, stack=stack, transposed=transposed)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(4):
            x = torch.randn(samples, tokens, 5)
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            squares(model(x)).mean().backward()
            grads = autograd_hacks.per_sample_grads(model)
            autograd_hacks.compute_grad1(model)
            assert_rows(model, expected, torch.float32)
            rows = model.stack.grad1.flatten(1)
            assert not any(isinstance(leaf, forms.Dense) for leaf in grads["stack"].leaves())  # it stays a sum of products
            assert_close(grads.norms(per_parameter=True)["stack"], rows.norm(dim=1))
            assert_close(
                grads.weighted_sum(torch.arange(samples).float())["stack"].flatten(), torch.arange(samples).float() @ rows
            )
            assert_close(grads["stack"].gram(grads["stack"]), rows @ rows.T, rtol=1e-4, atol=1e-4)
