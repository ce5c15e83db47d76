"""What is timed on a GPU: parts of a few cases, each a model with random weights, and ways to run it.

Sizes are those of one card of 140 GB, or tiny, with which the same code runs on a CPU in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from architectures import adapted
from families import FULL, Size, sizes
from measuring import Case
from torch import Tensor
from workloads import MODELS, Batch, Model, Workload, hugging_face, next_token, of_shape, pictures, sentences, stack, tokens

DOT, ROWS, NORMS, CLIP, PROJECT = (f"{what}: ours, param_grad=False" for what in ("dot", "rows", "norms", "clip", "project"))
HOOKED, VMAP, GHOST = "hooks alone", "clip: vmap(grad)", "clip: Opacus, ghost"


def in_graph(tiny: bool) -> list[str]:
    """Compiled steps; of the uncompiled graph on a CPU, where compiling takes longest."""
    return [f"{what}: {'graph' if tiny else 'compiled'}" for what in ("norms", "clip")]


@dataclass(frozen=True)
class Part:
    title: str
    cases: Callable[[bool], dict[str, Case]]  # of whether they are tiny
    rounds: int = 20
    minutes: float = 8.5


def of(samples: int, width: int, layers: int, heads: int, words: int, length: int) -> Size:
    return replace(FULL, samples=samples, width=width, layers=layers, heads=heads, words=words, length=length)


def under_autocast(work: Workload) -> Workload:
    """In bfloat16, with weights in single precision."""

    def run(model: Model, batch: Batch) -> Tensor:
        with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16):
            found = work.losses(model, batch)
        return found.float()

    return replace(work, losses=run)


def language(kind: str, size: Size, **more: Any) -> Workload:
    """A model of texts: GPT2LMHead, GPTNeoXForCausalLM, ..."""
    config = kind.removesuffix("LMHeadModel").removesuffix("ForCausalLM") + "Config"
    # With a padding token, models look for it in the batch, which vmap can't do.
    arguments = sizes(size, **{"intermediate_size": 4 * size.width, "pad_token_id": None} | more)
    return Workload(
        hugging_face(kind, config, training=True, use_cache=False, **arguments),
        tokens(size.samples, size.length, size.words),
        next_token,
    )


def smoke(tiny: bool) -> dict[str, Case]:
    ways = ("plain", HOOKED, ROWS, NORMS, CLIP, DOT, "rows: loop", "rows: vmap(grad)")
    models = {} if tiny else {name: MODELS[name] for name in ("MLP 784-512-512-10, N 256", "tutorial CNN, N 64")}
    texts = language("GPT2LMHeadModel", of(8, 64, 2, 2, 100, 32))
    models |= {"2 layers of 10, N 4": stack(2, 10, 4), "GPT-2, 2 layers of 64, N 8, T 32": texts}
    models["GPT-2, 2 layers of 64, N 8, T 32, bfloat16"] = under_autocast(texts)
    return {name: Case(work, ways, tokens=8 * 32 if "GPT" in name else 0) for name, work in models.items()}


def gpt2(tiny: bool) -> dict[str, Case]:
    size = of(4, 16, 2, 2, 50, 8) if tiny else of(16, 768, 12, 12, 50_257, 1024)
    ways = ("plain", HOOKED, DOT, NORMS, CLIP, *in_graph(tiny), ROWS, VMAP, GHOST)
    work = under_autocast(language("GPT2LMHeadModel", size, max_position_embeddings=size.length))
    return {f"GPT-2 small, N {size.samples}, T {size.length}, bfloat16": Case(work, ways, size.samples * size.length)}


PYTHIA = {
    "70m": (512, 6, 8), "160m": (768, 12, 12), "410m": (1024, 24, 16), "1b": (2048, 16, 8), "1.4b": (2048, 24, 16),
    "2.8b": (2560, 32, 32), "6.9b": (4096, 32, 32),
}  # fmt: skip
"""{size: width, layers, heads}"""
ROWS_FIT = ("70m", "160m", "410m", "1b")
"""Where eight samples' rows fit in a card beside the model, as vmap(grad) makes them before they are projected."""


def pythia(tiny: bool) -> dict[str, Case]:
    found = {}
    for name, shape in ({"70m": (16, 2, 2)} if tiny else PYTHIA).items():
        size = of(4, *shape, 50, 8) if tiny else of(8, *shape, 50_304, 1024)
        ways = ("plain", PROJECT, *(["rows: vmap(grad)"] if name in ROWS_FIT else []))
        case = Case(language("GPTNeoXForCausalLM", size), ways, size.samples * size.length, torch.bfloat16, apart=True)
        found[f"Pythia's shape of {name}, N {size.samples}, T {size.length}, weights in bfloat16"] = case
    return found


def wide(tiny: bool) -> dict[str, Case]:
    found, total = {}, 32 if tiny else 16_384
    for length in (8,) if tiny else (512, 1024, 2048, 4096, 8192):
        size = of(total // length, *((16, 2, 2, 50) if tiny else (1280, 36, 20, 50_257)), length)
        work = under_autocast(language("GPT2LMHeadModel", size, max_position_embeddings=length))
        name = f"{size.layers} × {size.width}, N {size.samples}, T {length}, bfloat16"
        found[name] = Case(work, ("plain", CLIP, VMAP, GHOST), total, apart=True)
    return found


def lora(tiny: bool) -> dict[str, Case]:
    size, inner, keys, rank = (
        (of(4, 16, 2, 2, 50, 8), 32, 1, 2) if tiny else (of(4, 4096, 32, 32, 128_256, 1024), 14_336, 8, 16)
    )
    base = language("LlamaForCausalLM", size, intermediate_size=inner, num_key_value_heads=keys)
    ways = ("plain", CLIP, NORMS, ROWS, VMAP, "rows: Opacus", GHOST)
    name = f"LoRA of rank {rank} on Llama-8B's shape, N {size.samples}, T {size.length}, weights in bfloat16"
    return {name: Case(adapted(base, rank), ways, size.samples * size.length, torch.bfloat16, apart=True)}


def cnn(tiny: bool) -> dict[str, Case]:
    ways = ("plain", HOOKED, ROWS, CLIP, "rows: loop", "rows: vmap(grad)", "rows: Opacus")
    name, samples = "tutorial CNN, N 64", 4 if tiny else 64
    return {f"the tutorial's CNN, N {samples}": Case(replace(MODELS[name], batch=of_shape(samples, 1, 28, 28)), ways)}


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


def bert(tiny: bool) -> dict[str, Case]:
    found = {}
    for samples in (4,) if tiny else (32, 128, 512, 2048):
        size = of(samples, 16, 2, 2, 50, 8) if tiny else of(samples, 768, 12, 12, 30_522, 128)
        more = {"intermediate_size": 4 * size.width, "max_position_embeddings": 512}
        model = hugging_face("BertForSequenceClassification", "BertConfig", training=True, **sizes(size, **more))
        work = Workload(last_layers(model, 1 if tiny else 3), sentences(samples, size.length, size.words), labels_of)
        case = Case(work, ("plain", CLIP, VMAP, GHOST), samples * size.length, apart=samples > 512)
        found[f"BERT-base, the last three layers, N {samples}, T {size.length}"] = case
    return found


def class_of_image(model: Model, batch: Batch) -> Tensor:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return -logits.log_softmax(1)[:, 0]


def vit(tiny: bool) -> dict[str, Case]:
    samples, image, patch = (4, 8, 4) if tiny else (128, 224, 16)
    size = of(samples, 16, 2, 2, 0, 0) if tiny else of(samples, 768, 12, 12, 0, 0)
    shape = sizes(size, intermediate_size=4 * size.width, image_size=image, patch_size=patch, num_labels=10)
    work = under_autocast(
        Workload(
            hugging_face("ViTForImageClassification", "ViTConfig", training=True, **shape),
            pictures(samples, image),
            class_of_image,
        )
    )
    ways = ("plain", HOOKED, CLIP, *in_graph(tiny), VMAP, GHOST)
    return {f"ViT-B/{patch}, N {samples}, {image} × {image}, bfloat16": Case(work, ways)}


PARTS = {
    "smoke": Part("Everything runs", smoke, rounds=3, minutes=2.0),
    "gpt2": Part("GPT-2 small", gpt2),
    "pythia": Part("Projections of Pythia's shapes, rank 16 a parameter", pythia),
    "wide": Part("Clipping, 36 layers of 1280", wide),
    "cnn": Part("The tutorial's CNN", cnn),
    "bert": Part("BERT-base, the last three layers", bert),
    "lora": Part("LoRA on Llama-8B's shape", lora),
    "vit": Part("ViT-B", vit),
}
