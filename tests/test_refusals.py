"""What steps and the verbs of their rows refuse; `test_refused_passes` has passes of their own."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from refused import Given, Row, check_refused, of, said
from torch import Tensor
from torch.func import functional_call
from twin import Bare

import autograd_hacks
from autograd_hacks import (
    PerSampleGrads,
    accumulate,
    add_hooks,
    backward,
    clear_backprops,
    clip_grad1_norm_,
    compute_grad1,
    pause_hooks,
    per_sample_grads,
)
from autograd_hacks.attribution import NoiseScales
from autograd_hacks.errors import (
    BatchSizeError,
    HigherOrderError,
    NothingRecorded,
    ParamGradSkipped,
    ProbeFailed,
    SamplesMixed,
    StaleRecord,
    UnseenGradient,
)
from autograd_hacks.private import clip_and_noise_

HOOKS, PASSES, REDUCTION = "The model has no hooks", "Several backward passes", "How the loss is reduced"
VERBS, CLIPPING, OUTPUTS = "What verbs are given", "Clipping", "Rows of outputs"
NOISE, ARRIVING = "Noise and signal", "Smaller: while backward runs"


def of_one_batch(batch: Tensor) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if not torch.equal(x, batch):
            raise KeyError("another batch")
        return m.layer(x)

    return Bare(forward, layer=nn.Linear(3, 2).double())


def a_derivative_while_rows_are_read(s: Given) -> None:
    with autograd_hacks.during_backward(s.model, "norms"):
        s.out.sum().backward(create_graph=True)


def hooks_after_the_forward(s: Given, read: Callable[[nn.Module], Any], again: bool = False) -> None:
    """again: and one with hooks, which has nothing to do with it"""
    with pause_hooks():
        loss = s.out.sum()
    autograd_hacks.remove_hooks(s.model)
    add_hooks(s.model)
    if again:
        s.model(s.x)
    loss.backward()
    read(s.model)


def unbatched(s: Given, probe: bool) -> None:
    autograd_hacks.remove_hooks(s.model)
    add_hooks(s.model, probe=probe)
    s.model(s.x[0]).sum().backward()
    s.read()


def overwritten_before_the_backward(s: Given) -> None:
    for p in s.model[0].parameters():
        p.requires_grad_(p is s.model[0].bias)  # autograd itself has no use for x then, and says nothing
    loss = s.losses.mean()
    s.x.zero_()
    loss.backward()
    s.read()


def overwritten_where_it_is_needed(s: Given) -> None:
    loss = s.losses.mean()
    s.x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    s.read()


def overwritten_by_an_optimizer(s: Given) -> None:
    s.x = nn.Parameter(s.x)
    s.losses.mean().backward()
    torch.optim.SGD([s.x], 0.1).step()
    s.read()


def an_error_in_the_backward_pass(s: Given) -> None:
    (hidden := s.model[0](s.x)).register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        s.model[2](hidden).sum().backward()
    s.read()


def an_overwritten_gradient(s: Given) -> None:
    gradient = torch.ones(5, 2).double()
    s.out.backward(gradient)
    gradient.mul_(2)
    s.read()


def stepped(model: nn.Module, x: Tensor, only: str | None = None) -> PerSampleGrads:
    model(x).square().sum(1).mean().backward()
    return per_sample_grads(model, only=only)


def with_only(s: Given, call: Callable[[nn.Module], Any]) -> None:
    with add_hooks(s.model, only="*.weight"):
        s.losses.mean().backward()
        call(s.model)


STEPS: list[Row] = [
    (NothingRecorded, HOOKS, "add_hooks", lambda s: compute_grad1(nn.Linear(3, 2))),
    (TypeError, HOOKS, "", lambda s: add_hooks(lambda x: x)),
    *of(NothingRecorded, ..., [
        ("has not run.*forward and a backward", lambda s: s.read()),
        (r"no backward pass.*loss\.backward\(\)", lambda s: (s.out, s.read())),
        ("no backward pass", lambda s: (s.x.requires_grad_(), torch.autograd.grad(s.out.sum(), s.x), s.read())),
        ("", lambda s: (s.within(torch.no_grad(), lambda: s.out), s.read())),
        (r"disabled.*enable_hooks\(\)", lambda s: (s.grads, autograd_hacks.disable_hooks(), s.read())),
        ("", lambda s: (autograd_hacks.disable_hooks(), s.out.sum().backward(), autograd_hacks.enable_hooks(), s.read())),
        ("", lambda s: (s.within(pause_hooks(), lambda: s.out.sum().backward()), s.read())),
        ("", lambda s: (s.grads, s.read(), s.model(s.x), s.read())),
        ("did not finish", an_error_in_the_backward_pass),
        ("clear_backprops", lambda s: (s.grads, clear_backprops(s.model), s.read())),
        ("cleared", lambda s: (s.grads, clear_backprops(s.model), clip_grad1_norm_(s.model, 1.0))),
        ("losses without a graph.*create_graph=True", lambda s: (s.grads, backward(torch.ones(5)))),
        ("losses without a graph.*create_graph=True", lambda s: backward(s.grads.dot(s.v))),
    ]),
    *of(UnseenGradient, ..., [
        *[("^.*: got gradient through a forward without hooks", lambda s, read=read: hooks_after_the_forward(s, read))
          for read in (compute_grad1, per_sample_grads)],
        ("a forward before add_hooks", lambda s: hooks_after_the_forward(s, compute_grad1, again=True)),
        (r"0\.weight: got gradient", lambda s: (s.grads, s.model[0].weight.square().sum().backward(), s.read())),
        (r"2\.weight: used by a method that isn't forward",
         lambda s: (F.linear(s.model[0](s.x).tanh(), s.model[2].weight).sum().backward(), s.read())),
        (r"0\.weight, 0\.bias", lambda s: (s.model[2](s.model[0].forward(s.x)).sum().backward(), s.read())),
        ("", lambda s: (s.grads, functional_call(s.model, s.doubled, s.x).sum().backward(), s.read())),
        ("", lambda s: ((s.out.sum() + s.model[0].weight.square().sum()).backward(), s.read())),
    ]),
    (NothingRecorded, PASSES, "", lambda s: ([s.model(x).sum().backward() for x in s.x.split(3)], s.read())),
    (RuntimeError, PASSES, "", lambda s: s.within(accumulate(s.model), lambda: s.within(accumulate(s.model)))),
    *of(BatchSizeError, ..., [
        (r"layer '0' \(Linear\), input \(5, 3\): 5.*layer '2' \(Linear\), input \(3, 4\): 3",
         lambda s: ((s.model[0](s.x).sum() + s.model[2](torch.ones(3, 4).double()).sum()).backward(), s.read())),
        (r"layer '0' \(Linear\).*\(3,\).*\(N, \.\.\., in_features\).*x\[None\]", lambda s: unbatched(s, False)),
        *[(rf"backward\(losses\): {length}.*layer '0' \(Linear\), input \(5, 3\): 5",
           lambda s, length=length: backward(s.losses.mean().expand(length)))
          for length in (1, 4, 10)],
        (r"backward\(losses\)", lambda s: (s.grads, backward(s.model(s.x).sum(1)[:3]))),
    ]),
    (SamplesMixed, ..., "", lambda s: stepped(s.other(nn.BatchNorm1d(4)), s.x)),
    (SamplesMixed, ..., r"^layer '0' \(Linear\), which ran first, .* without a batch axis.*x\[None\]",
     lambda s: unbatched(s, True)),
    *of(StaleRecord, ..., [
        (r"layer '0' \(Linear\).*overwritten in place.*x\.clone\(\)", lambda s: (s.grads, s.x[0].zero_(), s.read())),
        (r"'0\.weight'.*overwritten", lambda s: (s.grads, s.x.zero_(), s.grads.norms())),
        ("", lambda s: (s.grads, s.x.zero_(), s.grads.reduce(torch.sign))),
        (r"layer '0' \(Linear\): its input, of shape \(5, 3\)", overwritten_before_the_backward),
        (r"layer '0' \(Linear\): its input, of shape \(5, 3\)", overwritten_where_it_is_needed),
        ("layer '0'", overwritten_by_an_optimizer),
        (r"layer '2' \(Linear\): its gradient at the output", an_overwritten_gradient),
    ]),
    *of(ValueError, REDUCTION, [
        *[(f"{given!r}.*'mean', 'sum'", lambda s, given=given: (s.grads, s.read(given))) for given in ("average", "", 1)],
        *[(repr(given), lambda s, given=given: backward(s.losses, given)) for given in ("average", "", 1)],
        ("'sum'.*'mean'", lambda s: (backward(s.losses), s.read("sum"))),
        (r"\(\).*reduction='none'", lambda s: backward(s.losses.sum())),
        ("expected real numbers", lambda s: backward(s.losses * 1j)),
        (r"\(5, 1\).*reduction='none'", lambda s: backward(s.losses[:, None])),
    ]),
    (TypeError, REDUCTION, "list", lambda s: backward([1.0])),
    (HigherOrderError, "What is refused", "create_graph=True", a_derivative_while_rows_are_read),
    (ProbeFailed, ..., "", lambda s: (model := of_one_batch(s.x.clone()), add_hooks(model, independent=True), model(s.x))),
    (ParamGradSkipped, ..., "",
     lambda s: (m := s.other(param_grad=False), m(s.x).sum().backward(), torch.optim.SGD(m.parameters(), 0.1).step())),
    (ValueError, VERBS, r"0\.wieght.*0\.weight", lambda s: add_hooks(s.model, only="0.wieght")),
    *of(ValueError, HOOKS, [
        ("param_grad", lambda s: add_hooks(s.model, only="norms", param_grad=False)),
        *[(r"\d+ parameters have no rows, '.*because the model was hooked with only",
           lambda s, call=call: with_only(s, call))
          for call in [
             lambda m: clip_grad1_norm_(m, 1.0), lambda m: clip_and_noise_(m, 1.0, 1.0, 5),
             lambda m: compute_grad1(m, set_grad=True)]],
    ]),
    (TypeError, VERBS, "names of parameters", lambda s: add_hooks(s.model, only=[s.model[0].weight])),
]  # fmt: skip

READS: list[Row] = [
    *of(ValueError, VERBS, [
        (r"\(2, 5\); expected \(N,\)", lambda s: s.grads.second_moment(torch.ones(2, 5))),
        (r"\(\)", lambda s: s.grads.weighted_sum(torch.tensor(1.0))),
        (r"^dot: the direction is without '0\.bias'; expected an entry for each of '0",
         lambda s: s.grads.dot({k: x for k, x in s.v.items() if k != "0.bias"})),
        ("^dot: the direction is with 'more' too many; expected",
         lambda s: s.grads.dot(s.v | {"more": torch.zeros(1)})),
        (r"entry for '2\.weight' is .*\(4, 2\); expected.*\(2, 4\)",
         lambda s: s.grads.dot(s.v | {"2.weight": torch.zeros(4, 2)})),
        *[("complex one only for complex parameters", lambda s, f=f: s.grads.dot({k: f(x) for k, x in s.v.items()}))
          for f in (torch.Tensor.long, lambda x: x * 1j)],
        ("another model", lambda s: s.grads.gram(stepped(s.other(), s.x))),
        (r"the other gradients are without '0\.weight', '0\.bias'; expected two batches",
         lambda s: (whole := s.grads, whole.gram(stepped(s.model, s.x, "2.*")))),
        (r"\(4,\); expected \(5,\)", lambda s: s.grads.group(torch.ones(4, dtype=torch.long))),
        (r"\[0, 2\)", lambda s: s.grads.group(torch.arange(5), 2)),
        ("kind='gauss'; expected one of 'signs', 'sjlt'", lambda s: s.grads.project(8, kind="gauss")),
        *[(words, lambda s, f=f: s.grads.reduce(f))
          for f, words in [
             (torch.norm, r"shape \(\)"), (lambda g: g.sum(1, keepdim=True), "returned a torch.float64 tensor of shape"),
             (lambda g: g.tolist(), "returned list")]],
    ]),
    *of(TypeError, VERBS, [
        ("dot was given v=a torch", lambda s: s.grads.dot(torch.zeros(3))),
        ("", lambda s: s.grads.dot([s.x])),
        ("gram was given other=dict; expected per_sample_grads", lambda s: s.grads.gram(s.grads.dense())),
        ("N integers", lambda s: s.grads.group(torch.ones(5))),
        ("expected", lambda s: s.grads.group(torch.zeros(5, dtype=torch.long), 2.5)),
        *[("vector of booleans or integers", lambda s, w=w: s.grads.select(w))
          for w in (torch.ones(5, dtype=torch.uint8), torch.zeros(2), torch.zeros(0))],  # bytes may be a mask, or numbers
        ("expected", lambda s: s.grads.select(0)),
        ("expected", lambda s: s.grads.select(torch.tensor([[0, 1]]))),
        ("reduce was given f=str; expected an elementwise function", lambda s: s.grads.reduce("sign")),
    ]),
    *of(IndexError, VERBS, [
        *[(rf"select: index {wrong} is out of bounds .*; expected .* numbers in \[-5, 5\)",
           lambda s, wrong=wrong: s.grads.select(torch.tensor([0, wrong])))
          for wrong in (5, -6)],
        (r"mask \[4\] .*; expected a mask of 5 booleans",
         lambda s: s.grads.select(torch.ones(4, dtype=torch.bool))),
    ]),
    *of(ValueError, NOISE, [
        ("a variance needs two samples or more, but there are 1", lambda s: s.grads.select(slice(1)).noise_scale()),
        ("no step", lambda s: NoiseScales(0.9).noise_scale()),
        ("two samples", lambda s: NoiseScales(0.9).update(s.grads.select(slice(1)))),
        (r"'0\.weight' are not finite",
         lambda s: NoiseScales(0.9).update(s.grads.scaled(torch.tensor([1.0, torch.inf, 1, 1, 1])))),
        ("per='all'", lambda s: (n := NoiseScales(0.9), n.update(s.grads), n.noise_scale("all"))),
    ]),
    *of(NothingRecorded, ..., [
        ("not gradients of losses", lambda s: s.passes.noise_scale()),
        ("", lambda s: s.within(autograd_hacks.during_backward(s.model, "grad1"))),
    ]),
    *[(TypeError, None, r"take dense\(\)", lambda s, copies=copies: copies(s.grads))
      for copies in (copy.deepcopy, pickle.dumps)],
    (TypeError, HOOKS, "expected", lambda s: per_sample_grads(3)),
    *of(KeyError, None, [
        *[(words, lambda s, given=given: s.grads[given])
          for given, words in {
             "weight": "there is no trainable parameter 'weight'.*'0.weight', '2.weight'",
             "0.wieght": "expected a trainable parameter.*: '0.weight'", "nowhere": "'0.weight', '0.bias', '2.weight'",
             0: r"select\(index\)"}.items()],
        ("'2.bias' is frozen; expected", lambda s: (s.model[2].bias.requires_grad_(False), s.grads[s.model[2].bias])),
        (r"tensor of shape \(2,\) is not a parameter of the model", lambda s: s.grads[nn.Parameter(torch.ones(2))]),
    ]),
    *of(AttributeError, None, [
        *[(f"{kind}.*'{name}'.*{words}",
           lambda s, thing=thing, name=name: (hasattr(thing(s), name) and pytest.fail(name), getattr(thing(s), name)))
          for kind, thing in [
             ("PerSampleGrads", lambda s: s.grads), ("Scaled", lambda s: s.grads["0.weight"]),
             ("Scaled", lambda s: s.grads.select(slice(2))["0.bias"])]
          for name, words in [
             ("norm", "norms"), ("cpu", r"dense\(\)"), ("mean", "weighted_sum"), ("gramm", "gram"), ("nothing", "$")]],
    ]),
    *of(ValueError, ARRIVING, [
        *[("expected one or several of 'grad1', 'norms', 'gram'", lambda s, what=what: s.during(*what))
          for what in ((), ("rows",), ("grad1", "norm"))],
        *[(r"of shape \(4,\).*\(5,\).*has 5 samples", lambda s, word=word: s.during(**{word: torch.ones(4)}))
          for word in ("weights", "dot")],
    ]),
    *of(TypeError, ARRIVING, [
        *[("expected N weights", lambda s, w=w: s.during(weights=w))
          for w in (torch.ones(5, 1), torch.ones(5, dtype=torch.long), [1.0] * 5)],
    ]),
    (ValueError, HOOKS, "because the model was hooked with only",
     lambda s: s.within(add_hooks(s.model, only="*.bias"), lambda: s.during(weights=torch.ones(5)))),
    (TypeError, NOISE, "update was given grads=dict; expected per_sample_grads",
     lambda s: NoiseScales(0.9).update(s.grads.dense())),
    *[(error, VERBS, words, lambda s, verb=verb, w=w: getattr(s.grads, verb)(w))
      for verb in ("weighted_sum", "second_moment")
      for w, error, words in [
         (torch.ones(4), ValueError, r"\(4,\).*N = 5"),
         (torch.ones(5, dtype=torch.long), TypeError, "expected a floating-point tensor"),
         (torch.ones(5, dtype=torch.bool), TypeError, "expected a floating-point tensor"),
         ([1.0] * 5, TypeError, "expected a floating-point tensor")]],
    # Numbers are in a table of their own, see `test_numbers`; the page is the function's.
    (ValueError, CLIPPING, "max_norm.*expected", lambda s: (s.grads, clip_grad1_norm_(s.model, 0))),
    (TypeError, REDUCTION, "expected", lambda s: (s.grads, per_sample_grads(s.model, scale=torch.ones(2)))),
]  # fmt: skip


@pytest.mark.parametrize("row", STEPS, ids=said)
def test_a_step_is_refused(row: Row) -> None:
    check_refused(row, goes_on=True)


@pytest.mark.parametrize("row", READS, ids=said)
def test_a_reading_is_refused(row: Row) -> None:
    check_refused(row)
