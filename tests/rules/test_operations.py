"""Operations where a value of parameters meets the batch, against one backward per sample and against the layers' rules."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.rules import Call, rule_for
from autograd_hacks.rules.operations import BY_CHANNEL, ELEMENTWISE, OPERATIONS

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

    def gradient(self) -> Tensor:
        out = self.call(self.given).requires_grad_()
        (g,) = torch.autograd.grad(squares(out.movedim(self.axis, 0)).sum(), out)
        return g.movedim(self.axis, 0)

    def ask(self, wanted: tuple[int | str, ...]) -> Any:
        given = self.given
        for place, axis in self.batch.items():
            given[place] = given[place].movedim(axis, 0)
        table = OPERATIONS if self.name in OPERATIONS else ELEMENTWISE
        args = [given[k] for k in range(len(self.args))]
        return table[self.name](wanted, self.gradient(), *args, **{k: given[k] for k in self.kwargs})


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
            Case("linear", F.linear, (), ("weight",), {"input": t(*lead, 3), "weight": t(2, 3)}, {"input": 0}),
            Case("linear", F.linear, (t(*lead, 3), t(3)), (1,)),
            Case("matmul", torch.matmul, (t(*lead, 3), t(3, 2)), (1,)),
            Case("matmul", torch.matmul, (t(*lead, 3), t(3)), (1,)),
            Case("matmul", torch.matmul, (t(*lead, 3),), ("other",), {"other": t(3, 2)}),
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
        Case("mm", torch.mm, (t(n, 3), t(3, 2)), (1,)),
        Case("mm", torch.mm, (t(2, 3), t(3, n)), (0,), batch={1: 1}, axis=1),
        Case("mv", torch.mv, (t(n, 3), t(3)), (1,)),
        Case("addmm", torch.addmm, (t(2), t(n, 3), t(3, 2)), (0, 2), {"alpha": 2, "beta": 0.5}, {1: 0}),
        Case("addmm", torch.addmm, (t(2), t(n, 3)), ("mat2",), {"mat2": t(3, 2)}, {1: 0}),
        Case("index_select", torch.index_select, (t(5, 3), 0, torch.randint(5, (n,))), (0,), batch={2: 0}),
        Case("index_select", torch.index_select, (t(5, 2, 3), -3, torch.randint(5, (n,))), (0,), batch={2: 0}),
        Case("expand", Tensor.expand, (t(1, 3), n, -1), (0,), batch={}),
        Case("broadcast_to", torch.broadcast_to, (t(3), (n, 2, 3)), (0,), batch={}),
        Case("expand_as", Tensor.expand_as, (t(3), t(n, 2, 3)), (0,), batch={1: 0}),
        Case("repeat", Tensor.repeat, (t(1, 3), n, 1), (0,), batch={}),
        Case("repeat", Tensor.repeat, (t(2, 3), (n, 1, 1)), (0,), batch={}),
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
            Case("embedding", F.embedding, (index,), ("weight",), {"weight": r(5, 3), "sparse": False}),
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
    return [pytest.param(c, id=f"{c.name}-{n}-{dtype}"[:40]) for n, dtype in given for c in cases(n, dtype)]


@pytest.mark.parametrize("case", all_cases())
def test_rows_are_those_of_one_backward_per_sample(case: Case) -> None:
    expected = case.rows()
    for wanted in [case.wanted, *[(w,) for w in case.wanted]]:
        found = case.ask(wanted)
        assert tuple(found) == wanted
        for w, form in found.items():
            value = case.given[w]
            if isinstance(form, Tensor):
                rows = torch.stack([term.sum_to_size(value.shape) for term in form.split(1)])
            else:
                assert form.shape == value.shape
                rows = form.dense()
            assert_close(rows, expected[w])


def test_each_operation_has_a_case() -> None:
    assert {case.name for case in cases(3, REAL)} == {*OPERATIONS, *ELEMENTWISE}
    assert set(OPERATIONS) > BY_CHANNEL


def test_a_real_value_beside_a_complex_batch_has_real_rows() -> None:
    x = r(3, 2, dtype=COMPLEX)
    for case in [Case("mul", torch.mul, (x, r(2)), (1,)), Case("add", torch.add, (x, r(2)), (1,), {"alpha": 2j})]:
        (rows,) = case.ask((1,)).values()
        assert_close(rows, case.rows()[1])


LAYERS: list[tuple[str, nn.Module, tuple[int, ...], Callable[[Any], tuple[Any, ...]]]] = [
    ("linear", nn.Linear(3, 2), (4, 3), lambda m: ()),
    ("linear", nn.Linear(3, 2), (3,), lambda m: ()),
    ("prelu", nn.PReLU(4), (4, 5), lambda m: ()),
    ("prelu", nn.PReLU(), (4, 5), lambda m: ()),
    ("embedding", nn.Embedding(5, 3, padding_idx=-1), (4,), lambda m: (m.padding_idx,)),
    *[
        (f"conv{d}d", conv(4, 6, 2, 2, padding, 2, 2), (4, *[5] * d), lambda m: (m.stride, m.padding, m.dilation, m.groups))
        for d, conv in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1)
        for padding in (1, "valid")
    ],
    ("conv2d", nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 6), lambda m: (m.stride, m.padding, m.dilation, m.groups)),
    *[
        (
            f"conv_transpose{d}d",
            conv(4, 6, 2, 2, 1, 1, 2),
            (4, *[5] * d),
            lambda m: (m.stride, m.padding, m.output_padding, m.groups, m.dilation),
        )
        for d, conv in enumerate((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), start=1)
    ],
    ("layer_norm", nn.LayerNorm((2, 3), eps=0.1), (4, 2, 3), lambda m: (m.eps,)),
    ("rms_norm", nn.RMSNorm((2, 3), eps=0.1), (4, 2, 3), lambda m: (m.eps,)),
    ("group_norm", nn.GroupNorm(2, 4, eps=0.1), (4, 5), lambda m: (m.eps,)),
    ("batch_norm", nn.BatchNorm2d(4, eps=0.1).eval(), (4, 2, 3), lambda m: (False, 0.1, m.eps)),
    ("instance_norm", nn.InstanceNorm2d(4, eps=0.1, affine=True), (4, 2, 3), lambda m: (True, 0.1, m.eps)),
]


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize(("name", "layer", "shape", "settings"), LAYERS)
def test_a_layers_rule_and_its_operation_agree(
    name: str, layer: nn.Module, shape: tuple[int, ...], settings: Callable[[Any], tuple[Any, ...]], samples: int
) -> None:
    if name == "instance_norm" and not samples:
        return  # torch takes no empty batch there
    layer = layer.double()
    x = torch.randint(5, (samples, *shape)) if name == "embedding" else r(samples, *shape)
    out = layer(x).detach()
    g = torch.randn_like(out)
    state = {k: (v, v._version) for k, v in [*layer.named_parameters(), *layer.named_buffers()]}
    rule = rule_for(layer)
    assert rule is not None
    expected = rule.formula(layer, Call("", layer, (x,), {}, layer.training, (g,), state, outputs=(out,)))
    before: dict[str, tuple[Any, ...]] = {
        "layer_norm": ((2, 3),),
        "rms_norm": ((2, 3),),
        "group_norm": (2,),
        "batch_norm": (getattr(layer, "running_mean", None), getattr(layer, "running_var", None)),
        "instance_norm": (None, None),
    }
    parameters = [p.detach() for p in layer.parameters()]
    args = (x, *before.get(name, ()), *parameters, *settings(layer))
    first = 1 + len(before.get(name, ()))
    found = OPERATIONS[name](tuple(range(first, first + len(parameters))), g, *args)
    assert found is not None
    for operation, of_layer in zip(found.values(), expected.values(), strict=True):
        assert type(operation) is type(of_layer)
        assert torch.equal(operation.dense(), of_layer.dense())


def test_bilinear_layers_and_operations_agree() -> None:
    layer, x1, x2, g = nn.Bilinear(3, 2, 4).double(), r(3, 5, 3), r(3, 5, 2), r(3, 5, 4)
    rule = rule_for(layer)
    assert rule is not None
    expected = rule.formula(layer, Call("", layer, (x1, x2), {}, True, (g,)))
    found = OPERATIONS["bilinear"]((2, 3), g, x1, x2, layer.weight.detach(), layer.bias.detach())
    assert found is not None
    for operation, of_layer in zip(found.values(), expected.values(), strict=True):
        assert torch.equal(operation.dense(), of_layer.dense())
