"""What is timed: models, batches, and the losses of their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """model: makes one    batch: of a step's number    losses: N, of the model and a batch

    beyond_write: the aim for the time that a step with per-sample gradients takes beyond writing them once, in plain steps
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]
    beyond_write: float = 2.0


class TutorialNet(nn.Module):
    """https://docs.pytorch.org/tutorials/intermediate/per_sample_grads.html"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


class Classifier(nn.Module):
    """A Transformer on vectors, pooled over the positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def classification(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).logits
    targets = batch.get("decoder_input_ids", batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none").mean(1)


def pooled(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).pooler_output.square().mean(1)


def images(samples: int) -> Callable[[int], Batch]:
    return lambda step: {"x": torch.randn(samples, 1, 28, 28), "y": torch.randint(10, (samples,))}


def vectors(samples: int, width: int) -> Callable[[int], Batch]:
    """A new length at each step."""
    return lambda step: {
        "x": torch.randn(samples, 48 + 7 * (step % 9), width),
        "y": torch.randint(10, (samples,)),
    }


def tokens(samples: int, length: int, words: int) -> Callable[[int], Batch]:
    return lambda step: {"input_ids": torch.randint(3, words, (samples, length))}


def translation(samples: int, length: int, words: int) -> Callable[[int], Batch]:
    return lambda step: {name: torch.randint(3, words, (samples, length)) for name in ("input_ids", "decoder_input_ids")}


def pictures(samples: int, size: int) -> Callable[[int], Batch]:
    return lambda step: {"pixel_values": torch.randn(samples, 3, size, size)}


def hugging_face(model: str, config: str, **arguments: Any) -> Callable[[], nn.Module]:
    """A randomly initialised model of the transformers library, in eval mode, which draws no dropout."""

    def build() -> nn.Module:
        import transformers

        net: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**arguments))
        return net.eval()

    return build


WORKLOADS = {
    "tutorial CNN, N 64": Workload(TutorialNet, images(64), classification),
    "Transformer d 128, a new length each step, N 16": Workload(
        lambda: Classifier(128, 2), vectors(16, 128), classification
    ),
    "GPT-2 d 128, T 64, N 16": Workload(
        hugging_face("GPT2LMHeadModel", "GPT2Config", vocab_size=2000, n_positions=64, n_embd=128, n_layer=2, n_head=4),
        tokens(16, 64, 2000),
        next_token,
    ),
    "T5 d 128, T 48, N 16": Workload(
        hugging_face(
            "T5ForConditionalGeneration", "T5Config", vocab_size=2000, d_model=128, d_kv=32, d_ff=512, num_layers=2,
            num_heads=4,
        ),
        translation(16, 48, 2000),
        next_token,
    ),
    "Swin d 32, 64 x 64, N 16": Workload(
        hugging_face(
            "SwinModel", "SwinConfig", image_size=64, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
        ),
        pictures(16, 64),
        pooled,
    ),
    "Mixtral d 64, 4 experts, T 32, N 16": Workload(
        hugging_face(
            "MixtralForCausalLM", "MixtralConfig", vocab_size=500, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
            max_position_embeddings=64, experts_implementation="eager",
        ),
        tokens(16, 32, 500),
        next_token,
    ),
}  # fmt: skip
