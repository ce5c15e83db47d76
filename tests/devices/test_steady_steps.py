"""What a steady step asks of the host: nothing, for on a GPU each question waits for all kernels before it.

Without a GPU, on the pretend accelerator: no step mixes devices, rows are right, and a step that proves nothing asks for no
number, copies nothing and makes no tensor on the CPU, but for what KNOWN lists.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from by_device import FAMILIES, SAMPLES, Family, losses, rows_of, step, vectors, words
from of_devices import batch_norm_by
from pretend import PACKAGE, Far, MixedDevices, Note, near, noted, placed, pretending
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.capture import backward, lean


def normed(m: nn.Module, x: Tensor) -> Tensor:
    """By cuDNN's own kernel where there seems to be one."""
    own = batch_norm_by(torch.cudnn_batch_norm) if isinstance(x, Far) else F.batch_norm
    with mock.patch.object(F, "batch_norm", own):
        return m.o(m.n(m.c(x)).mean((2, 3)))


def padded_bag(mode: str) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.EmbeddingBag(11, 5, mode=mode, padding_idx=0), nn.Tanh(), nn.Linear(5, 3))


MODELS = FAMILIES | {
    # Tied embeddings with padding, attention with dropout, a parameter by itself.
    "padded text": Family(
        lambda: Bare(
            lambda m, x: (m.block(m.token(x)) * m.scale) @ m.token.weight.t(),
            token=nn.Embedding(11, 8, padding_idx=0),
            scale=torch.ones(8),
            block=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1),
        ),
        words(7),
    ),
    "untied embedding": Family(
        lambda: nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 3)), words(7)
    ),
    # Norms of its layers are taken from products between positions.
    "wide": Family(lambda: nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), vectors(4, 256)),
    # A table that is large enough for products of its positions to be cheaper than its rows; those may cancel.
    "large and tied": Family(
        lambda: Bare(lambda m, x: m.token(x).tanh() @ m.token.weight.t(), token=nn.Embedding(1000, 32)), words(7)
    ),
    "padded bag": Family(padded_bag("sum"), words(7)),
    "largest of a bag": Family(padded_bag("max"), words(7)),
    "batch norm": Family(
        lambda: Bare(normed, c=nn.Conv2d(3, 4, 3), n=nn.BatchNorm2d(4).eval(), o=nn.Linear(4, 3)), vectors(3, 5, 5)
    ),
}
SIBLINGS = ("mlp", "lstm", "gru", "causal language model", "embedding bag", "untied embedding", "wide", "largest of a bag")
"""Models that another is like: the usual tests leave them out."""
DRAWS = {"padded text"}
"""Models with dropout, whose rows are another step's."""


@dataclass(frozen=True)
class Known:
    """What a steady step asks for all the same.  families: the models whose steps do"""

    what: str
    where: str
    why: str
    families: tuple[str, ...]


PADDED = "how many entries of bags count"
ROUTED = "whose each routed position is, the values say"
IN_MEMORY = "in which order the arguments have the samples, their strides say"
CERTIFIED = "whether rows add up to gradients that came to a parameter from several uses: one question, when rows are read"
SEVERAL = ("encoder", "causal language model", "padded text", "large and tied")
RECURRENT, BAGS = ("lstm", "gru"), ("embedding bag", "padded bag", "largest of a bag")
ASKED_OF_ROUTES = {"_local_scalar_dense": "forms/composite.py:gathered", "equal": "graph/memo.py:_equal"}
KNOWN = [
    Known("tolist", "reading/certificate.py:check", CERTIFIED, (*SEVERAL, *RECURRENT)),
    Known("nonzero", "formulas/embedding.py:embedding_bag", PADDED, ("padded bag",)),
    Known("tensor on the CPU", "graph/roots.py:_order", IN_MEMORY, (*RECURRENT, *BAGS)),
    Known("tensor on the CPU", "graph/roots.py:_agree", IN_MEMORY, (*RECURRENT, *BAGS)),
    *[Known(what, at, ROUTED, ("routed experts",)) for what, at in ASKED_OF_ROUTES.items()],
]
"""docs/developers.rst has this list for people, and what these small models don't ask."""

Step = Callable[[nn.Module, Tensor], None]


def verbs(model: nn.Module, x: Tensor) -> None:
    losses(model(x)).mean().backward()
    grads, w = autograd_hacks.per_sample_grads(model), ones(SAMPLES)
    grads.norms()
    grads.norms(per_parameter=True)
    grads.dot(direction(model))
    grads.gram()
    grads.weighted_sum(w)
    grads.second_moment()
    grads.project(5)
    grads.preconditioned(autograd_hacks.attribution.Metric.low_rank(model, 2)).dense()
    grads.project(16, kind="sjlt")


def clip(model: nn.Module, x: Tensor) -> None:
    autograd_hacks.backward(losses(model(x)))
    autograd_hacks.clip_grad1_norm_(model, 1.0)


def arriving(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.during_backward(model, "grad1", "norms", "gram", dot=direction(model), project=4):
        losses(model(x)).mean().backward()


def summing(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.during_backward(model, dot=direction(model), weights=ones(SAMPLES)):
        losses(model(x)).mean().backward()


def streamed(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.during_backward(model, "norms", "gram"):
        losses(model(x)).mean().backward()


STEPS: tuple[Step, ...] = (step, verbs, clip, arriving, summing, streamed)


def ones(*shape: int) -> Tensor:
    return Far(torch.ones(shape))


def direction(model: nn.Module) -> dict[str, Tensor]:
    return {name: ones(*p.shape) for name, p in model.named_parameters()}


def asked(name: str, param_grad: bool, steps: tuple[Step, ...] = STEPS) -> Counter[Note]:
    """What later steps ask, whose graphs are known."""
    model, x = MODELS[name].on("cpu", torch.float32)
    expected = {} if name in DRAWS else rows_of(model, x)
    with pretending():
        placed(model)
        x = Far(x)
        with autograd_hacks.add_hooks(model, param_grad=param_grad):
            for number in range(13):
                (steps[number // 2] if number % 2 and number // 2 < len(steps) else step)(model, x)
                model.zero_grad()
            for parameter, right in expected.items():
                own = model.get_parameter(parameter).grad1
                assert_close(torch.zeros_like(right) if own is None else near(own), right, rtol=1e-4, atol=1e-5)
            with noted() as found:
                for own in steps:
                    own(model, x)
                    model.zero_grad()
    return found


@pytest.mark.parametrize("param_grad", [True, *rarely(False)])
@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in SIBLINGS), *rarely(*SIBLINGS)])
def test_a_steady_step_asks_for_what_is_known_alone(name: str, param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backward, lean):  # the pretend accelerator is a mode, and passes under users' modes are compared
        monkeypatch.setattr(module, "count_dispatch_modes", int)
    found = asked(name, param_grad)
    # Else nothing arrives at parameters that rows could be compared with.  What recurrent layers' rules run again can't be
    # compared with the outputs here, so their rows always are.
    arrives = param_grad or name in RECURRENT
    known = {(own.what, own.where) for own in KNOWN if name in own.families and (arrives or own.why != CERTIFIED)}
    assert set(found) - known == set(), "the host waits for the device, or copies"
    assert known - set(found) == set(), "this is asked no more: take it from KNOWN and from docs/developers.rst"


SEEN = {
    "bool((x > 0).any())": "_local_scalar_dense",
    "x[x > 0]": "index by a mask",
    "x.cpu()": "copy to the host",
    "x * torch.tensor(2.0)": "copy to the device",
    "torch.ones(3)": "tensor on the CPU",
    "x.tolist()": "tolist",
}


def test_questions_of_the_package_are_seen() -> None:
    """Those of the user's own code are none of its concern; devices that mix are an error."""
    for question, what in SEEN.items():
        found = {}
        for file in (f"{PACKAGE}asking.py", __file__):
            namespace = {"torch": torch}
            exec(compile(f"def ask(x):\n    {question}", file, "exec"), namespace)
            with pretending(), noted() as found[file]:
                namespace["ask"](ones(6, 5))
        assert [(what, "asking.py:ask") in own for own in found.values()] == [True, False]
        assert not found[__file__]
    with pretending(), pytest.raises(MixedDevices):
        ones(6, 5) + torch.ones(6, 5)
