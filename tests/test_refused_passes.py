"""What is refused by whatever takes passes of its own: curvature, rows of outputs, data sets, the check of others' rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from nets import LossesInside, checkpointed
from refused import Given, Row, check_refused, of, said
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks import (
    PerSampleGrads,
    accumulate,
    add_hooks,
    backprop_hess,
    clear_backprops,
    compute_hess,
    pause_hooks,
    per_sample_grads,
    per_sample_jacobian,
)
from autograd_hacks.attribution import Metric
from autograd_hacks.check import check_rows
from autograd_hacks.curvature import compute_hess_over
from autograd_hacks.errors import (
    BatchSizeError,
    BlockTooLarge,
    NothingRecorded,
    SamplesMixed,
    ShardedParameters,
    UnseenGradient,
    UnsupportedLayer,
)

CURVATURE, OUTPUTS, DATA, CHECKING = "What can be had", "Rows of outputs", "A whole data set", "Check anyone's rows"
PASSES, VERBS, RECORD, METRICS = "Several backward passes", "What verbs are given", "Nothing was recorded", "Metrics"


def named() -> nn.Module:
    """As transformers' models: tensors by name."""
    return Bare(lambda m, x: {"logits": m.layer(x)}, layer=nn.Linear(3, 2).double())


def past_net() -> nn.Module:
    """Its weight is used past its layer."""
    return Bare(lambda m, x: F.linear(m.layer(x), m.layer.weight), layer=nn.Linear(3, 3).double())


def mixing() -> nn.Module:
    return Bare(lambda m, x: (out := m.layer(x)) - out.mean(0), layer=nn.Linear(3, 2).double())


def hooked(model: nn.Module, **options: Any) -> nn.Module:
    add_hooks(model, **options)
    return model


def curved(model: nn.Module, x: Tensor, **options: Any) -> None:
    backprop_hess(model(x))
    compute_hess(model, **options)


def a_freed_graph(s: Given) -> None:
    s.out.sum().backward()
    backprop_hess(s.out)


def of_kinds(s: Given, *hess_types: str | None) -> None:
    with accumulate(s.model):
        for kind in hess_types:
            out = s.model(s.x)
            out.sum().backward() if kind is None else backprop_hess(out, kind)
    per_sample_grads(s.model) if None in hess_types else compute_hess(s.model)


def interrupted(s: Given, read: Callable[[nn.Module], Any]) -> None:
    ran: list[Tensor] = []

    def interrupt(grad: Tensor) -> None:
        ran.append(grad)
        if len(ran) == 2:
            raise KeyboardInterrupt

    s.out.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backprop_hess(s.out)
    read(s.model)


def an_ekfac(s: Given) -> None:
    compute_hess_over(s.model, [s.x], kind="ekfac")


CURVES: list[Row] = [
    *of(NothingRecorded, ..., [
        *[("ended with KeyboardInterrupt", lambda s, read=read: interrupted(s, read))
          for read in (compute_hess, per_sample_grads)],
        ("retain_graph=True", a_freed_graph),
        ("different kinds", lambda s: of_kinds(s, "CrossEntropy", None)),
        ("different kinds", lambda s: of_kinds(s, "CrossEntropy", "LeastSquares")),
        ("without a graph", lambda s: (s.out, s.within(torch.no_grad(), lambda: backprop_hess(s.model(s.x))))),
        ("hooks enabled", lambda s: (s.out, s.within(pause_hooks(), lambda: backprop_hess(s.out)))),
        ("", lambda s: compute_hess(s.model)),
        ("", lambda s: (s.passes, clear_backprops(s.model), compute_hess(s.model))),
        ("no parameter of the model has ekfac", lambda s: Metric.from_ekfac(s.model)),
    ]),
    (SamplesMixed, ..., "", lambda s: curved(s.other(nn.BatchNorm1d(4)), s.x)),
    (RuntimeError, PASSES, "Leave accumulate",
     lambda s: s.within(accumulate(s.model), lambda: compute_hess_over(s.model, [s.x]))),
    *of(TypeError, CURVATURE, [
        (r"compute_hess_over.*model\(batch\) raised TypeError for a dict.*forward=lambda model, batch",
         lambda s: compute_hess_over(hooked(named()), [{"x": s.x}], "diag")),
        ("compute_hess_over.*output=dict.*forward=lambda model, batch",
         lambda s: compute_hess_over(hooked(named()), [s.x], "diag")),
        (r"was given output=dict; .*output\.logits", lambda s: backprop_hess(hooked(named())(s.x))),
        ("manual_seed", lambda s: backprop_hess(s.out, draws=1, generator=3)),
    ]),
    *of(ValueError, CURVATURE, [
        ("without samples", lambda s: compute_hess_over(s.model, [])),
        (r"parameters: '0\.bia' matches no", lambda s: s.hess(parameters="0.bia")),
        *[(words, lambda s, o=options: s.hess(**o))
          for options, words in [
             ({"kind": "half"}, "expected one of"),
             ({"kind": "ek-fac"}, "'ekfac'")]],
    ]),
    *of(ValueError, METRICS, [
        (r"at '0\.bias': L and R of shapes",
         lambda s: (an_ekfac(s), Metric.from_ekfac(s.model)({"0.bias": torch.zeros(3)}))),
    ]),
    *of(BlockTooLarge, ..., [
        *[("weight.*max_bytes is.*diag.*kfac.*matvec", call)
          for call in [
             lambda s: s.hess(max_bytes=100), lambda s: s.hess("full", max_bytes=8), lambda s: s.hess("kfac", max_bytes=9)]],
    ]),
    (UnseenGradient, ..., "", lambda s: curved(hooked(past_net(), probe=False), s.x)),
    (RuntimeError, None, "use_reentrant",
     lambda s: backprop_hess(checkpoint(s.model, s.x.requires_grad_(), use_reentrant=True))),
    *[(error, CURVATURE if error in (TypeError, ValueError) else ..., words,
       lambda s, change=change: backprop_hess(change(s.out)))
      for change, error, words in [
         (lambda out: out.detach(), NothingRecorded, "without a graph"),
         (lambda out: torch.randn(5, 2, requires_grad=True), NothingRecorded, "no hooked layer"),
         (lambda out: out.sum(1), ValueError, r"output\[:, None\]"),
         (lambda out: out[:, :, None, None], ValueError, r"\(N, T, C\)"),
         (lambda out: out[:, :0], ValueError, "which has no entries"),
         (lambda out: out[:, :1], ValueError, "zero for a single class.*BinaryCrossEntropy"),
         (lambda out: out.mT, BatchSizeError, "disagree"),
         (lambda out: out[:3], BatchSizeError, "disagree"),
         (lambda out: 3.0, TypeError, "floating-point"),
         (lambda out: torch.zeros(5, 2, dtype=torch.long), TypeError, "floating-point")]],
    *[(error, CURVATURE, "expected", lambda s, o=options: backprop_hess(s.out, **o))
      for options, error in [
         ({"hess_type": "Hinge"}, ValueError)]],
]  # fmt: skip


@pytest.mark.parametrize("row", CURVES, ids=said)
def test_a_curvature_is_refused(row: Row) -> None:
    given = check_refused(row, goes_on=True)
    curved(given.model, given.x.detach())


@dataclass
class Result:
    logits: Tensor


def a_loss_inside(read: Callable[[dict[str, Tensor]], Tensor]) -> None:
    model, tokens = hooked(LossesInside("mean").double()), torch.randint(7, (3, 4))
    per_sample_jacobian(model, read(model(tokens, tokens)))


def of_no_hooked_forward(s: Given, way: str) -> None:
    with pause_hooks():
        paused = s.model(s.x)
    own = {name: p.detach().requires_grad_() for name, p in s.model.named_parameters()}
    outputs = {
        "paused": lambda: paused,
        "another model's": lambda: s.other()(s.x),
        "layer by layer": lambda: s.model[2](s.model[1](s.model[0](s.x))),
        "of other parameters": lambda: torch.func.functional_call(s.model, own, (s.x,)),
    }
    s.jacobian(outputs[way]())


ENTRIES: list[Row] = [
    *[((SamplesMixed, BatchSizeError), ..., "", lambda s, read=read: a_loss_inside(read))
      for read in [
         lambda out: out["losses"], lambda out: out["losses"].view(1), lambda out: out["logits"].mean()]],
    *of(SamplesMixed, ..., [
        *[("axis 0", lambda s, change=change: s.jacobian(change(s.out)))
          for change in [
             lambda out: out - out.mean(0), lambda out: out.flip(0), lambda out: out @ out.mT,
             lambda out: out.sum(0).expand(5, -1), lambda out: out[[0, 1, 1, 2, 3]]]],
        ("axis 0", lambda s: per_sample_jacobian((m := hooked(nn.Linear(3, 3).double())), m(s.x[:3]).mT)),
        *[("", lambda s, change=change: per_sample_jacobian((m := hooked(mixing())), change(m(s.x))))
          for change in (lambda out: out, torch.tanh)],
    ]),
    *of(BatchSizeError, ..., [
        *[("axis 0", lambda s, change=change: s.jacobian(change(s.out)))
          for change in (lambda out: out[:2], lambda out: out.flatten(), lambda out: out.mT)],
    ]),
    *of(NothingRecorded, ..., [
        *[("does not come from a forward", lambda s, way=way: of_no_hooked_forward(s, way))
          for way in ("paused", "another model's", "layer by layer", "of other parameters")],
        ("without a graph", lambda s: s.jacobian(s.out.detach())),
        ("trainable parameters", lambda s: (s.model.requires_grad_(False), s.jacobian(s.model(s.x.requires_grad_())))),
    ]),
    (NothingRecorded, "The model has no hooks", "has no hooks", lambda s: per_sample_jacobian(nn.Linear(3, 2), s.out)),
    (RuntimeError, None, "use_reentrant",
     lambda s: per_sample_jacobian((m := hooked(checkpointed(True))), m(torch.randn(3, 4, requires_grad=True)))),
    *of(TypeError, OUTPUTS, [
        *[("an output of the model", lambda s, wrong=wrong: s.jacobian(wrong))
          for wrong in (3, None, torch.zeros(3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.complex64), Result)],
    ]),
    (ValueError, OUTPUTS, "which has no entries", lambda s: s.jacobian(s.out[:, :0])),
    *of(ValueError, VERBS, [
        *[(r"expected \(N, 2\) or \(K, N, 2\)", lambda s, shape=shape: s.rows.weighted_sum(torch.ones(shape)))
          for shape in [(5,), (5, 3), (10,), (2, 2, 5, 2)]],
    ]),
    (ValueError, "Noise and signal", "entries of an output", lambda s: s.rows.noise_scale()),
]  # fmt: skip


@pytest.mark.parametrize("row", ENTRIES, ids=said)
def test_rows_of_outputs_are_refused(row: Row) -> None:
    check_refused(row)


SUMS = PerSampleGrads.second_moment
LOADERS: list[Row] = [
    *of(ValueError, DATA, [
        ("without batches", lambda s: autograd_hacks.over(s.model, [], len, PerSampleGrads.norms)),
        (r"shape \(12,\); expected 3 rows",
         lambda s: s.over(lambda g: g.weighted_sum(torch.ones(g.samples).double())["0.weight"].flatten())),
        ("out= for rows and total=True", lambda s: s.over(SUMS, total=True, out="a.npy")),
        ("returned a dictionary", lambda s: s.over(lambda g: g.norms(per_parameter=True), out="a.npy")),
        ("without against=, so it would compare samples of one batch only", lambda s: s.over(PerSampleGrads.gram)),
        *[("this verb returns rows", lambda s, verb=verb, more=more: s.over(verb, total=True, **more))
          for verb, more in [(PerSampleGrads.gram, {"against": [torch.ones(2, 3).double()]}), (PerSampleGrads.norms, {})]],
        ("which can be iterated only once", lambda s: s.over(PerSampleGrads.gram, against=iter(s.x.split(2)))),
        (r"rows of shape \(2,\) for one batch, and of \(3,\) for the first",
         lambda s: s.over(lambda g: torch.zeros(g.samples, g.samples))),
        ("samples of one batch only.*lambda grads, others",
         lambda s: s.over(lambda grads: grads.scaled(torch.ones(5).double()).gram(), 5)),
        (r"sums of shape \(2,\) for one batch", lambda s: s.over(lambda grads: grads.norms(), total=True)),
    ]),
    (NothingRecorded, "The model has no hooks", "", lambda s: (autograd_hacks.remove_hooks(s.model), s.over())),
    (RuntimeError, PASSES, "leave accumulate", lambda s: s.within(accumulate(s.model), s.over)),
]  # fmt: skip


@pytest.mark.parametrize("row", LOADERS, ids=said)
def test_a_pass_over_data_is_refused(row: Row, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(row)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def checked(s: Given, change: Callable[[Any], Any] = lambda rows: rows, loss: Any = losses_of, **options: Any) -> None:
    check_rows(s.model, (s.x,), loss, change(s.grads.dense()), **options)


def of_a_checkpoint(model: Any, x: Tensor) -> Tensor:
    return model[2](model[1](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))).square().sum(1)


def parts_of_parameters(s: Given) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model := s.other(), mesh=init_device_mesh("cpu", (1,)))
        check_rows(model, (s.x,), losses_of, torch.zeros(5))
    finally:
        dist.destroy_process_group()


CHECKS: list[Row] = [
    *of(ValueError, CHECKING, [
        *[(words, lambda s, change=change: checked(s, change))
          for change, words in [
             (lambda r: {"0.wieght": r["0.weight"]}, "'0.wieght', which the model lacks; it has '0.weight'"),
             (lambda r: {"0.weight": r["0.weight"].mT}, r"shape \(5, 3, 4\) for '0.weight'; expected \(5, 4, 3\)"),
             (lambda r: {"0.weight": r["0.weight"][:1]}, r"shape \(1, 4, 3\).*expected \(5, 4, 3\)"),
             (lambda r: {**r, "0.weight": torch.zeros(5)}, r"shape \(5,\) for '0.weight'"),
             (lambda r: torch.zeros(4), r"shape \(4,\) .*expected \(5,\), .*since the loss returned 5 numbers"),
             (lambda r: torch.zeros(5, 2), r"shape \(5, 2\)"),
             (lambda r: {}, "without rows"),
             (lambda r: {"0.weight": None}, "without rows")]],
        ("'2.bias', which is frozen",
         lambda s: (s.model[2].requires_grad_(False), checked(s, lambda r: {"2.bias": torch.zeros(5)}))),
        *[(words, lambda s, of=of: checked(s, loss=lambda m, x: of(losses_of(m, x), m(x))))
          for of, words in [
             (lambda losses, out: losses.mean(), r"of shape \(\); expected a vector of N losses"),
             (lambda losses, out: out, r"tensor of shape \(5, 2\)"),
             (lambda losses, out: None, "returned NoneType"),
             (lambda losses, out: losses[:0], "no losses"),
             (lambda losses, out: losses.detach(), "depend on no trainable parameter"),
             (lambda losses, out: losses[1:], r"expected \(4, 4, 3\)")]],
        ("without trainable parameters", lambda s: check_rows(nn.ReLU(), (s.x,), losses_of, {})),
        ("'weight' has no shape yet", lambda s: check_rows(nn.LazyLinear(3), (s.x,), losses_of, {})),
    ]),
    *of(TypeError, CHECKING, [
        ("function for the model", lambda s: check_rows(losses_of, (s.x,), s.model, {})),
        ("loss=a torch.float64 tensor", lambda s: check_rows(s.model, (s.x,), s.x, {})),
        ("rows=list", lambda s: checked(s, lambda r: list(r.values()))),
        (r"rows\['0.weight'\]=list", lambda s: checked(s, lambda r: {"0.weight": r["0.weight"].tolist()})),
    ]),
    (UnsupportedLayer, CHECKING, "use_reentrant=False", lambda s: checked(s, loss=of_a_checkpoint)),
    (ShardedParameters, CHECKING, "the whole model, in one process", parts_of_parameters),
]  # fmt: skip


@pytest.mark.parametrize("row", CHECKS, ids=said)
def test_a_check_of_rows_is_refused(row: Row) -> None:
    check_refused(row)
