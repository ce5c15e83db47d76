"""How models of timm and transformers are made, in two sizes: FULL is timed, TINY is what the tests compare."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn as nn
from torch import Tensor
from workloads import Batch, Model, Workload, classification, hugging_face, next_token, of_shape, tokens

Make = Callable[["Size"], Workload]
Losses = Callable[[Model, Batch], Tensor]


@dataclass(frozen=True)
class Size:
    """What an architecture is scaled by."""

    samples: int
    width: int
    layers: int
    heads: int
    words: int
    length: int  # of texts
    image: int  # pixels a side
    patch: int
    dims: tuple[int, ...]  # channels of a pyramid's stages
    frames: int  # of a recording


FULL = Size(16, 128, 3, 4, 1000, 64, 64, 8, (32, 64, 128, 256), 4000)
TINY = Size(4, 16, 2, 2, 37, 6, 32, 8, (8, 16, 16, 16), 200)


def outputs(name: str) -> Losses:
    """The mean square of an output, for each sample."""
    return lambda model, batch: getattr(model(**batch), name).flatten(1).square().mean(1)


def seeded(losses: Losses) -> Losses:
    """The same random numbers in each step, so that systems that run the whole batch can be compared."""

    def run(model: Model, batch: Batch) -> Tensor:
        torch.manual_seed(0)
        return losses(model, batch)

    return run


def with_dropout(make: Make) -> Make:
    """The model in train mode."""

    def build(size: Size) -> Workload:
        own = make(size)
        return replace(own, model=lambda: own.model().train(), losses=seeded(own.losses), drawn=True)

    return build


def import_timm() -> Any:
    """timm, where need be without torchvision, of which its models use names alone; wheels of it ask for one torch each."""
    absent = []
    if "timm" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        inside = "transforms", "transforms.functional", "datasets", "ops", "ops.misc", "models", "models.feature_extraction"
        absent = ["torchvision", *(f"torchvision.{name}" for name in inside)]
        sys.modules |= {name: MagicMock() for name in absent}
        vars(sys.modules["torchvision.ops.misc"])["FrozenBatchNorm2d"] = nn.Identity
    try:
        return importlib.import_module("timm")
    finally:
        for name in absent:
            del sys.modules[name]


def timm(name: str, arguments: Callable[[Size], dict[str, Any]]) -> Make:
    """A classifier of images, of a class or a name of timm's, in eval mode: BatchNorm normalises by running statistics."""

    def make(size: Size) -> Workload:
        def build() -> nn.Module:
            library, own = import_timm(), arguments(size) | {"num_classes": 10}
            made = getattr(library.models, name)(**own) if name[0].isupper() else library.create_model(name, **own)
            net: nn.Module = made.eval()
            return net

        return Workload(build, of_shape(size.samples, 3, size.image, size.image), classification)

    return make


def plain_vit(size: Size) -> dict[str, Any]:
    return {
        "img_size": size.image, "patch_size": size.patch, "embed_dim": size.width, "depth": size.layers,
        "num_heads": size.heads,
    }  # fmt: skip


def hugging(
    model: str,
    config: str,
    arguments: Callable[[Size], dict[str, Any]],
    batch: Callable[[Size], Callable[[int], Batch]],
    losses: Losses,
) -> Make:
    """A model of the transformers library in eval mode."""
    return lambda size: Workload(hugging_face(model, config, **arguments(size)), batch(size), losses)


def text(
    model: str, config: str, arguments: Callable[[Size], dict[str, Any]], losses: Losses = next_token, longest: int = 64
) -> Make:
    def batch(size: Size) -> Callable[[int], Batch]:
        return tokens(size.samples, min(size.length, longest), size.words)

    return hugging(model, config, arguments, batch, losses)


def sizes(size: Size, **more: Any) -> dict[str, Any]:
    """The names that most configurations have."""
    return {
        "vocab_size": size.words, "hidden_size": size.width, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "intermediate_size": 3 * size.width, "max_position_embeddings": 2 * size.length,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    } | more  # fmt: skip


def grouped(size: Size, **more: Any) -> dict[str, Any]:
    """Of decoders whose heads share keys."""
    return sizes(size, num_key_value_heads=size.heads // 2, head_dim=size.width // size.heads, **more)


def sequences(size: Size, **more: Any) -> dict[str, Any]:
    """Of encoders with decoders."""
    return {
        "vocab_size": size.words, "d_model": size.width, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": size.heads, "decoder_attention_heads": size.heads, "encoder_ffn_dim": 2 * size.width,
        "decoder_ffn_dim": 2 * size.width, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    } | more  # fmt: skip
