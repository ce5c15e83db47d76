"""Models of each kind of architecture, with other words or pictures in each step: labels and rows against one backward pass
a sample, and what a memo knows of the next step."""

import warnings
from typing import Any

import pytest
import torch
from one_at_a_time import by_memo, check, judge
from rarely import rarely

from autograd_hacks.graph.label import Entries
from autograd_hacks.graph.memo import Memo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    from test_architectures import MODELS, TEXT, Inputs, batch_of, built, text

OLMOE = ("OlmoeForCausalLM", "OlmoeConfig", TEXT | {"num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2,
         "pad_token_id": 0, "eos_token_id": 1, "experts_implementation": "eager"}, text, "logits")  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, *rarely(False)])
@pytest.mark.parametrize(
    ("model", "config", "arguments", "inputs", "output"),
    [*MODELS, OLMOE], ids=[f"{case[0]}-{case[3].__name__}" for case in [*MODELS, OLMOE]],
)  # fmt: skip
def test_model(model: str, config: str, arguments: dict[str, Any], inputs: Inputs, output: str, training: bool) -> None:
    net, memo = built(model, config, arguments, training), Memo()
    for _ in range(2):
        batch = batch_of(inputs, 4)
        out = net(**batch)[output]
        own = by_memo(memo, out, 4, net, list(batch.values()))
        assert not own["walk"].mixes
        assert not own["walk"].asked
        found = check([out], 4, net, **own)
        assert not found.early
        assert found.owned > len(own["trace"].nodes) // 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [next(c for c in MODELS if c[0].startswith("Mixtral")), OLMOE], ids=["Mixtral", "OLMoE"])
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_routing_is_followed_in_each_step(case: Any, way: str) -> None:
    """Which rows an expert gets is said anew for other words, though the graph looks the same."""
    model, config, arguments, inputs, output = case
    net = built(model, config, arguments | {"experts_implementation": way}, True)
    if way == "grouped_mm":
        net = net.float()
    memo, routed = Memo(), set()
    for _ in range(4):
        batch = batch_of(inputs, 4)
        out = net(**batch)[output]
        own = by_memo(memo, out, 4, net, list(batch.values()))
        found, walk = judge([out], 4, net, **own), own["walk"]
        assert not found.wrong
        assert not walk.mixes
        assert found.rows < (1e-9 if way == "eager" else 1e-4)
        entries = [own.samples for labels in walk.labels for own in labels if isinstance(own, Entries)]
        assert all(sum(size > 1 for size in own.shape) <= 1 for own in entries)  # tokens differ, not their parts
        uses = [walk.labels[use.node][0] for use in walk.uses if use.node >= 0]
        routed.add(str([label.samples.flatten().tolist() for label in uses if isinstance(label, Entries)]))
    assert len(routed) > 1
    assert torch.is_grad_enabled()
