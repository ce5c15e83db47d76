"""What is timed on a GPU: models of texts with random weights, in the size of one card, or tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from families import FULL, Size, sizes
from torch import Tensor
from workloads import Batch, Model, Workload, hugging_face, next_token, sentences, tokens


def of(samples: int, width: int, layers: int, words: int, length: int) -> tuple[Size, dict[str, Any]]:
    """A size, and what configurations are told of it."""
    size = replace(FULL, samples=samples, width=width, layers=layers, heads=layers, words=words, length=length)
    # With a padding token, models look for it in the batch, which vmap can't do.
    return size, sizes(size, intermediate_size=4 * width, pad_token_id=None, max_position_embeddings=max(512, length))


def under_autocast(work: Workload) -> Workload:
    """In bfloat16, with weights in single precision."""

    def run(model: Model, batch: Batch) -> Tensor:
        with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16):
            found = work.losses(model, batch)
        return found.float()

    return replace(work, losses=run)


def gpt2(tiny: bool = False) -> dict[str, Workload]:
    """GPT-2 small."""
    size, arguments = of(4, 16, 2, 50, 8) if tiny else of(16, 768, 12, 50_257, 1024)
    model = hugging_face("GPT2LMHeadModel", "GPT2Config", training=True, use_cache=False, **arguments)
    work = Workload(model, tokens(size.samples, size.length, size.words), next_token)
    return {f"N {size.samples}, T {size.length}": under_autocast(work)}


def last_layers(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.Module]:
    """The encoder's last layers train, and what is behind them."""

    def build() -> nn.Module:
        model: Any = make()
        model.requires_grad_(False)
        for module in (*model.bert.encoder.layer[-count:], model.bert.pooler, model.classifier):
            module.requires_grad_()
        return model

    return build


def labels_of(model: Model, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["x"]).logits
    return nn.functional.cross_entropy(logits, batch["y"] % logits.shape[1], reduction="none")


def bert(tiny: bool = False) -> dict[str, Workload]:
    """BERT-base, whose last three layers train."""
    found = {}
    for samples in (4,) if tiny else (32, 128, 512):
        size, arguments = of(samples, 16, 2, 50, 8) if tiny else of(samples, 768, 12, 30_522, 128)
        model = hugging_face("BertForSequenceClassification", "BertConfig", training=True, **arguments)
        batch = sentences(samples, size.length, size.words)
        found[f"N {samples}, T {size.length}"] = Workload(last_layers(model, 1 if tiny else 3), batch, labels_of)
    return found
