"""Positions that are sorted to experts: rows in the order of a sort, and what would let samples see each other there."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from oracle import one_backward_per_sample
from rarely import rarely
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed, UnsupportedOperation

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler
transformers = pytest.importorskip("transformers")
N, T, D, E = 3, 4, 8, 5


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch._dynamo.reset()


def check(model: nn.Module, ids: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for verb in ("rows", "clip"):
        numbers = {"max_norm": 0.01} if verb == "clip" else {}
        step = autograd_hacks.compile(model, verb, backend=None, **numbers)  # type: ignore[arg-type]
        model.zero_grad()
        run(step, ids).square().flatten(1).sum(1).sum().backward()
        made = {name: (p.grad1 if verb == "rows" else p.grad) for name, p in model.named_parameters()}
        rows = one_backward_per_sample(model, torch.square, ids, run=lambda x: run(model, x))
        own = {name: torch.zeros(len(ids), *model.get_parameter(name).shape) if x is None else x for name, x in rows.items()}
        norms = torch.stack([x.flatten(1).norm(dim=1) for x in own.values()]).norm(dim=0)
        for name, x in own.items():
            right = x if verb == "rows" else torch.tensordot((0.01 / norms).clamp(max=1), x, 1)
            assert_close(torch.zeros_like(right) if made[name] is None else made[name], right, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_language_models_with_routed_experts(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 11, "hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": E, "head_dim": 4, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    ids = torch.randint(11, (N, T))
    check(model, ids, lambda of, x: of(input_ids=x).logits)
    model(input_ids=ids)
    with autograd_hacks.add_hooks(model, independent=True):
        model(input_ids=ids).logits.square().sum().backward()
        # A sort of positions has no law, so copies run with other samples replaced.
        assert autograd_hacks.describe(model).independence.startswith("Independent: ")


def routing(inner: Callable[..., Tensor]) -> nn.Module:
    """x: N T D.  Positions, sorted by the largest of their scores, and what is done to them in that order."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layer(x)
        ids = m.score(x).argmax(-1).view(-1)
        keys, order = torch.sort(ids)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return inner(m, h.view(-1, D), ids, keys, order, back).view(x.shape)

    return Bare(run, layer=nn.Linear(D, D), score=nn.Linear(D, E), bias=torch.randn(E, D))


RIGHT = {
    "there and back": lambda m, h, ids, keys, order, back: h[order].tanh()[back],
    "a table of experts": lambda m, h, ids, keys, order, back: (h[order] * m.bias[keys])[back],
    "the sorted numbers": lambda m, h, ids, keys, order, back: (h[order] * keys[:, None])[back],
    "parts of features": lambda m, h, ids, keys, order, back: torch.cat(h[order].chunk(2, -1)[::-1], -1)[back],
    "two sorts": lambda m, h, ids, keys, order, back: h[order][back] + h[order].softmax(-1)[back],
}
WRONG = {
    "not brought back": lambda m, h, ids, keys, order, back: h[order],
    "brought back twice": lambda m, h, ids, keys, order, back: h[order][back][back],
    "the one before": lambda m, h, ids, keys, order, back: (h[order] + h[order].roll(1, 0))[back],
    "a running sum": lambda m, h, ids, keys, order, back: h[order].cumsum(0)[back],
    "its place": lambda m, h, ids, keys, order, back: (h[order] * torch.arange(N * T)[:, None])[back],
    "a number by its place": lambda m, h, ids, keys, order, back: torch.where(
        torch.arange(N * T)[:, None] > 5, h[order], 0.0
    )[back],
    "noise by its place": lambda m, h, ids, keys, order, back: torch.cat([h[order], torch.rand(N * T, D)], 1)[back][:, :D],
    "met by what is not sorted": lambda m, h, ids, keys, order, back: (h[order] * h)[back],
    "the first half": lambda m, h, ids, keys, order, back: (h[order][:6].repeat(2, 1))[back],
    "how many there are": lambda m, h, ids, keys, order, back: h * torch.histc(keys.float(), E, 0, E - 1).sum(),
    "folded otherwise": lambda m, h, ids, keys, order, back: h[order].view(N, T, D).sum(1).repeat(T, 1)[back],
    "the order as a number": lambda m, h, ids, keys, order, back: h * order[:, None],
    "sorted from the largest on": lambda m, h, ids, keys, order, back: h[ids.sort(descending=True).indices],
}


@pytest.mark.parametrize("name", ["a table of experts", *rarely(*(name for name in RIGHT if name != "a table of experts"))])
def test_what_is_done_in_the_order_of_a_sort(name: str) -> None:
    check(routing(RIGHT[name]), torch.randn(N, T, D), lambda of, x: of(x))


OFTEN = "not brought back", "the one before", "its place", "met by what is not sorted", "how many there are"


@pytest.mark.parametrize("name", [*OFTEN, *rarely(*(name for name in WRONG if name not in OFTEN))])
def test_what_lets_positions_see_each_other_is_refused(name: str) -> None:
    with pytest.raises((SamplesMixed, UnsupportedOperation)):
        autograd_hacks.compile(routing(WRONG[name]), "rows", backend=None)(torch.randn(N, T, D))
