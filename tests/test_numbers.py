"""Every number that a public function takes has a range in one table, and is checked by it before anything happens.

The test walks the signatures: what is legal for an argument is read from the table, everything else must be refused with the
argument's name, the value and the range, and leave the model as it is.
"""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_errors import POINTER
from test_face import public

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.curvature.ekfac import EKFAC
from autograd_hacks.integrations.steps import Steps
from autograd_hacks.private.accounting import noise_for
from autograd_hacks.support.ranges import RANGES, Range
from autograd_hacks.verbs.matrix import INTERNAL

NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, 0, -1, 2.5, 10**400, True, "x", None, [], {}, torch.ones(2), 1j]
TREES = ["batch_dim", "compile.batch"]
"""None stands for what has no batch."""
NUMERIC = re.compile(r"\b(int|float|BatchDim)\b")
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def numeric(f: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(f).parameters.values() if NUMERIC.search(str(p.annotation))]


def entry_points(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A class and its public methods."""
    if kind is not PerSampleGrads:  # of forms, which only the library makes
        yield kind.__name__, kind
    for name in dir(kind):
        raw = inspect.getattr_static(kind, name)
        if not name.startswith("_") and name not in INTERNAL and inspect.isfunction(found := getattr(raw, "__func__", raw)):
            yield f"{kind.__name__}.{name}", found


def face() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"noise_for": noise_for}
    kinds: list[type] = [EKFAC, Steps]
    for name, thing in public().items():
        if inspect.isclass(thing):
            kinds.append(thing)
        elif inspect.isfunction(thing):
            found[name.rpartition(".")[2]] = thing
    for kind in kinds:
        found |= entry_points(kind)
    return {name: f for name, f in found.items() if numeric(f)}


FACE = face()
TOOLS = {"opacus": ["DPOptimizer", "PrivacyEngine.make_private"]}
"""Entry points of integrations whose tools may not be installed."""


def range_of(f: Callable[..., Any], name: str) -> Range:
    """Raises KeyError for an argument without a range."""
    owner = f.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    return RANGES.get(f"{owner}.{name}") or RANGES[name]


def look_of(model: nn.Module) -> list[Any]:
    """What a call may have changed: numbers, gradients, attributes, hooks, modes, random states."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
    kept = [None if x is None else x.clone() for x in tensors]
    attributes = [sorted(vars(p)) for p in model.parameters()]
    modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]
    return [[None if x is None else x.tolist() for x in kept], attributes, modules]


class Anything:
    """Stands for arguments that a check of numbers doesn't reach."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read before the numbers were checked")


def refuses_all(f: Callable[..., Any], model: nn.Module) -> int:
    """Checks that a function refuses what is out of range.  Returns how many numbers it was given."""
    given, before = 0, look_of(model)
    parameters = [p for p in inspect.signature(f).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = {p.name: model if p.name == "model" else Anything() for p in parameters if p.default is p.empty}
    legal = {p.name: [x for x in (1, 0.5) if not range_of(f, p.name).refusal(x)] for p in numeric(f)}
    valid = {name: found[0] for name, found in legal.items() if name in needed}
    for p in numeric(f):
        allowed = range_of(f, p.name)
        for wrong in NUMBERS:
            if allowed.refusal(wrong) is None or (wrong is None and p.default is None):
                continue
            with pytest.raises((TypeError, ValueError)) as raised:
                f(**needed | valid | {p.name: wrong})
            text = str(raised.value)
            assert f"{p.name}={wrong!r}; expected {allowed.text}" in text
            assert POINTER.search(text)
            given += 1
    assert look_of(model) == before
    return given


def stepped() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    autograd_hacks.add_hooks(model)
    autograd_hacks.backward(model(X).sum(1))
    autograd_hacks.compute_grad1(model)
    return model


@pytest.mark.parametrize("name", FACE)
def test_numbers_out_of_range_are_refused_before_anything_happens(name: str) -> None:
    assert refuses_all(FACE[name], stepped()) >= 4


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_refuse_them_too(tool: str) -> None:
    pytest.importorskip(tool)
    module = importlib.import_module(f"autograd_hacks.integrations.{tool}")
    for name in TOOLS[tool]:
        owner, _, method = name.partition(".")
        assert refuses_all(getattr(getattr(module, owner), method) if method else getattr(module, owner), stepped()) >= 4


def test_the_walk_reaches_what_the_library_offers() -> None:
    assert len(FACE) >= 40
    assert {"add_hooks", "compile", "PrivateTraining", "PrivateTraining.loader", "PerSampleGrads.norms", "Steps"} <= set(
        FACE
    )
    assert {"Metric.low_rank", "QuantileClip", "Store.search", "NoiseScales.update", "compute_hess_over"} <= set(FACE)


# The table itself.


@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        ("delta", [0, 1, 5, -1e-5, math.nan], [1e-5, 0.5]),
        ("epsilon", [0, -1, math.inf, math.nan, "1"], [0.1, 3]),
        ("steps", [0, -1, 2.5, 2.0, "3", True], [1, 10**9]),
        ("max_bytes", [0, -1, 2.5, "1", None], [1, 2**30]),
        ("over.max_bytes", [-1, "1", math.nan], [0, 1e8, math.inf]),
        ("seed", ["a", 0.5, None, math.nan], [0, -1, 2**128]),
        ("batch_dim", ["0", 0.5, {"x": 0.5}, (0, "1")], [0, -1, (0, None), {"x": 0, "mask": None}, []]),
        ("max_norm", [0, -1, math.nan, "1", {"*": 1.0}], [1, math.inf, torch.tensor(2.0)]),
        ("clip_and_noise_.max_norm", [{}, {"*": 0}, {"*": None}, [1.0]], [{"*": 1.0, "0.*": math.inf}]),
        ("noise_multiplier", [-1, math.inf, math.nan], [0, 1.1]),
        ("batch_size", [0, -1, math.inf, math.nan, True, "5", torch.tensor([5.0])], [1, 2.5]),
        ("damping", [0, -1, math.nan, True, "much"], [0.1]),
        ("draws", [0, 1.5], [1]),
        ("smoothing", [-0.1, 1, math.nan], [0, 0.99]),
        ("scale", [0, math.inf, torch.ones(2), torch.tensor(0.0)], [1, 65536.0, torch.tensor(2.0)]),
    ],
)
def test_what_ranges_hold(name: str, refused: list[Any], allowed: list[Any]) -> None:
    assert [x for x in refused if RANGES[name].refusal(x) is None] == []
    assert [x for x in allowed if RANGES[name].refusal(x) is not None] == []


def test_every_range_refuses_what_is_no_number_of_one() -> None:
    for name, allowed in RANGES.items():
        assert allowed.refusal("x") is allowed.refusal(1j) is TypeError, name
        assert allowed.refusal(None) is (None if name in TREES else TypeError), name
        assert allowed.refusal(math.nan) is not None, name


def test_numbers_of_numpy_draw_the_same_as_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    grads = autograd_hacks.per_sample_grads(stepped())
    assert torch.equal(grads.project(numpy.int64(8), seed=numpy.int64(3)), grads.project(8, seed=3))
    with pytest.raises(ValueError, match=r"project was given dim=0; expected a whole number in \[1, inf\)"):
        grads.project(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: autograd_hacks.private.clip_and_noise_(model, math.inf, 1.0, 4),
        lambda model: autograd_hacks.private.clip_and_noise_(model, {"*": math.inf}, 1.0, 4),
        lambda model: private(math.inf),
        lambda model: autograd_hacks.private.PrivateTraining(math.inf, epsilon=1.0, steps=3),
        lambda model: autograd_hacks.compile(
            model, "clip_and_noise", max_norm=math.inf, noise_multiplier=1.0, expected_batch_size=4
        ),
    ],
)
def test_a_bound_is_finite_where_there_is_noise(call: Callable[[nn.Module], object]) -> None:
    before = look_of(model := stepped())
    with pytest.raises(ValueError, match="expected a finite max_norm"):
        call(model)
    assert look_of(model) == before


# Other arguments that failed in their own ways, or were accepted.


NORMS = PerSampleGrads.norms


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum(1)


def private(max_norm: float = 1.0) -> autograd_hacks.private.PrivateTraining:
    return autograd_hacks.private.PrivateTraining(max_norm, 1.0, 4)


OTHERS: list[tuple[Callable[[nn.Module], object], type[Exception], str]] = [
    (lambda model: autograd_hacks.attribution.Store(3), TypeError, "given path=int; expected the path"),
    (lambda model: private().attach(None), TypeError, "attach was given NoneType"),
    (lambda model: Steps().attach(None), TypeError, "attach was given NoneType"),
    (lambda model: private().load_state_dict({}), ValueError, "no entry; expected .*'seed'"),
    (lambda model: autograd_hacks.private.QuantileClip().load_state_dict({"b": 1.0}), ValueError, "'b'; expected .*'bound'"),
    (lambda model: autograd_hacks.attribution.NoiseScales().load_state_dict(3), ValueError, "int; expected .*'means'"),
    (lambda model: autograd_hacks.over(model, 3, loss, NORMS), TypeError, "loader=3; expected batches"),
    (lambda model: autograd_hacks.over(model, [X], loss, "norms"), TypeError, "verb=str; expected a function"),
    (lambda model: autograd_hacks.over(model, [X], "loss", NORMS), TypeError, "loss=str; expected a function"),
    (lambda model: autograd_hacks.curvature.compute_hess_over(model, 3), TypeError, "loader=3; expected batches"),
    (lambda model: autograd_hacks.accumulate(None), TypeError, r"expected the torch\.nn\.Module"),
    (lambda model: autograd_hacks.add_hooks(model, only=[]), TypeError, r"only=\[\] names no parameter"),
]


@pytest.mark.parametrize(("call", "kind", "says"), OTHERS, ids=range(len(OTHERS)))
def test_other_arguments_are_refused_by_errors_that_explain(call: Callable[..., object], kind: type, says: str) -> None:
    before = look_of(model := stepped())
    with pytest.raises(kind, match=says) as raised:
        call(model)
    assert POINTER.search(str(raised.value))
    assert look_of(model) == before


@pytest.mark.parametrize("axis", [2, 7, -3])
def test_an_axis_that_no_argument_has_is_refused(axis: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    autograd_hacks.add_hooks(model, batch_dim=axis)
    with pytest.raises(ValueError, match=rf"batch_dim is {axis}, but .* \[\(4, 3\)\]; expected the axis"):
        model(X)
    autograd_hacks.add_hooks(model)
    autograd_hacks.backward(model(X).sum(1))
    autograd_hacks.compute_grad1(model)
