"""What is timed on a GPU: parts of a few cases, each a model with random weights, ways to run it, and what is aimed for.

Sizes are those of one card of 140 GB, or tiny, with which the same code runs on a CPU in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from gpu_report import PLAIN
from gpu_tests import TESTS
from gpu_ways import (
    CLIP,
    CLIP_COMPILED,
    DOT,
    GHOST,
    HOOKED,
    LOOP,
    NORMS,
    NORMS_BY_KERNELS,
    NORMS_BY_TORCH,
    NORMS_COMPILED,
    OPACUS,
    PROJECT,
    ROWS,
    VMAP,
    VMAP_CLIP,
)
from torch import Tensor
from workloads import (
    Batch,
    Model,
    TutorialNet,
    Workload,
    classification,
    hugging_face,
    multilayer,
    next_token,
    of_shape,
    pictures,
    sentences,
    tokens,
)

Losses = Callable[[Model, Batch], Tensor]
STEPS, TOKENS = "of plain", "tokens/s"


@dataclass(frozen=True)
class Goal:
    """What is aimed for, which is no result.

    unit: `STEPS`, in plain steps, or `TOKENS`, or a way's name: in its steps    bound: at most; of tokens, at least
    """

    way: str
    bound: float
    unit: str = STEPS

    def __str__(self) -> str:
        if self.unit == TOKENS:
            return f"at least {self.bound:,.0f} {TOKENS}"
        if self.unit == STEPS:
            return f"at most {self.bound:.3g} plain steps"
        return f"at least {1 / self.bound:.3g} × as fast as {self.unit}"


@dataclass(frozen=True)
class Case:
    """A model, and in which ways it is run."""

    workload: Workload
    ways: tuple[str, ...]
    goals: tuple[Goal, ...] = ()
    tokens: int = 0  # of a step, where models read texts
    dtype: torch.dtype = torch.float32  # of weights
    apart: bool = False  # one way after the other, by turns of several rounds: together they are too large


@dataclass(frozen=True)
class Part:
    title: str
    cases: Callable[[bool], dict[str, Case]]  # of whether they are tiny
    rounds: int = 20
    minutes: float = 8.5


def under_autocast(losses: Losses) -> Losses:
    """In bfloat16, with weights in single precision."""

    def run(model: Model, batch: Batch) -> Tensor:
        kind = next(iter(batch.values())).device.type
        with torch.autocast(kind, torch.bfloat16):
            found = losses(model, batch)
        return found.float()

    return run


def in_training(model: str, config: str, *dropouts: str, **arguments: Any) -> Callable[[], nn.Module]:
    """A model of transformers in training mode, which Opacus wants, without dropout."""
    make = hugging_face(model, config, **arguments, **dict.fromkeys(dropouts, 0.0))
    return lambda: make().train()


def gpt2(width: int, layers: int, heads: int, length: int, words: int) -> Callable[[], nn.Module]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length, "vocab_size": words}
    dropouts = "resid_pdrop", "embd_pdrop", "attn_pdrop"
    return in_training("GPT2LMHeadModel", "GPT2Config", *dropouts, **sizes, use_cache=False)


# Smoke


def smoke(tiny: bool) -> dict[str, Case]:
    ways = (PLAIN, HOOKED, ROWS, NORMS, CLIP, DOT, LOOP, VMAP)
    language = Workload(gpt2(64, 2, 2, 32, 100), tokens(8, 32, 100), next_token)
    widths, samples = ((6, 5, 10), 4) if tiny else ((784, 512, 512, 10), 256)
    name = f"MLP {'-'.join(map(str, widths))}, N {samples}"
    found = {name: Case(Workload(multilayer(*widths), of_shape(samples, widths[0]), classification), ways)}
    half = Workload(language.model, language.batch, under_autocast(next_token))
    found["GPT-2, 2 layers of 64, N 8, T 32, bfloat16"] = Case(half, ways, tokens=8 * 32)
    if tiny:
        return found
    return found | {
        "tutorial CNN, N 64": Case(Workload(TutorialNet, of_shape(64, 1, 28, 28), classification), ways),
        "GPT-2, 2 layers of 64, N 8, T 32": Case(language, ways, tokens=8 * 32),
    }


# Norms' kernels


class Positions(nn.Module):
    """One layer on vectors or ids, and the mean of its outputs over the positions."""

    def __init__(self, layer: nn.Module, transposed: bool = False) -> None:
        super().__init__()
        self.layer, self.transposed = layer, transposed

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT if self.transposed else x)


class Experts(nn.Module):
    """Each position goes to one of some experts in one stack, as tokens of a mixture do."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        score, chosen = self.gate(flat).softmax(-1).max(-1)
        out = flat.new_zeros(len(flat), 2 * flat.shape[1])
        for number, expert in enumerate(self.up):
            own = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, own, (expert(flat[own]) * score[own, None]).to(out.dtype))
        return out.unflatten(0, x.shape[:2])


def squared(model: Model, batch: Batch) -> Tensor:
    return model(batch["x"]).flatten(1).square().mean(1)


def kernels(tiny: bool) -> dict[str, Case]:
    samples, length, width, words = (4, 6, 8, 50) if tiny else (16, 1024, 1280, 50_257)
    vectors = of_shape(samples, length, width)
    layers: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
        "LayerNorm": (lambda: nn.LayerNorm(width), vectors),
        "RMSNorm": (lambda: nn.RMSNorm(width), vectors),
        "Embedding": (lambda: nn.Embedding(words, width), sentences(samples, length, words)),
        "Linear, to as many": (lambda: nn.Linear(width, width), vectors),
        "Linear, to four times as many": (lambda: nn.Linear(width, 4 * width), vectors),
        "depthwise Conv1d": (lambda: Positions(nn.Conv1d(width, width, 4, padding=3, groups=width), True), vectors),
        "8 experts": (lambda: Experts(8, width), vectors),
    }
    norms = (NORMS, NORMS_BY_TORCH, NORMS_BY_KERNELS)
    ways = (PLAIN, *norms) if tiny else (PLAIN, HOOKED, *norms, CLIP, ROWS)
    return {
        f"{name}, N {samples}, T {length}, d {width}": Case(
            Workload(layer, batch, under_autocast(squared)), ways, tokens=samples * length
        )
        for name, (layer, batch) in layers.items()
    }


# Language models


def gpt2_small(tiny: bool) -> dict[str, Case]:
    samples, length, words = (4, 8, 50) if tiny else (16, 1024, 50_257)
    model = gpt2(16, 2, 2, length, words) if tiny else gpt2(768, 12, 12, length, words)
    ways = (PLAIN, HOOKED, DOT, NORMS, CLIP, NORMS_COMPILED, CLIP_COMPILED, ROWS, VMAP_CLIP, GHOST)
    goals = Goal(DOT, 1 / 0.925), Goal(NORMS_COMPILED, 1.15)
    work = Workload(model, tokens(samples, length, words), under_autocast(next_token))
    return {f"GPT-2 small, N {samples}, T {length}, bfloat16": Case(work, ways, goals, samples * length)}


PYTHIA = {
    "70m": (512, 6, 8), "160m": (768, 12, 12), "410m": (1024, 24, 16), "1b": (2048, 16, 8), "1.4b": (2048, 24, 16),
    "2.8b": (2560, 32, 32), "6.9b": (4096, 32, 32),
}  # fmt: skip
"""{size: width, layers, heads}"""
ROWS_FIT = {"70m", "160m", "410m", "1b"}
"""Where eight samples' rows fit in a card beside the model, as vmap(grad) makes them before they are projected."""


def pythia(tiny: bool) -> dict[str, Case]:
    samples, length, words = (4, 8, 50) if tiny else (8, 1024, 50_304)
    shapes = {"1b": (16, 2, 2)} if tiny else PYTHIA
    goals = {"1b": 60_000, "6.9b": 13_000}
    found = {}
    for size, (width, layers, heads) in shapes.items():
        model = in_training(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=words, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=4 * width, max_position_embeddings=max(length, 64), use_cache=False,
        )  # fmt: skip
        goal = (Goal(PROJECT, goals[size], TOKENS),) if size in goals else ()
        work = Workload(model, tokens(samples, length, words), next_token)
        name = f"Pythia's shape of {size}, N {samples}, T {length}, weights in bfloat16"
        ways = (PLAIN, PROJECT, VMAP) if size in ROWS_FIT or tiny else (PLAIN, PROJECT)
        found[name] = Case(work, ways, goal, samples * length, torch.bfloat16, apart=True)
    return found


def wide(tiny: bool) -> dict[str, Case]:
    found, total = {}, 32 if tiny else 16_384
    width, layers, heads, words = (16, 2, 2, 50) if tiny else (1280, 36, 20, 50_257)
    for length in (8,) if tiny else (512, 1024, 2048, 4096, 8192):
        work = Workload(
            gpt2(width, layers, heads, length, words), tokens(total // length, length, words), under_autocast(next_token)
        )
        name = f"{layers} × {width}, N {total // length}, T {length}, bfloat16"
        found[name] = Case(work, (PLAIN, CLIP, VMAP_CLIP, GHOST), (Goal(CLIP, 1.5),), total, apart=True)
    return found


class LoRA(nn.Module):
    """A frozen Linear, and beside it two thin ones that train."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)  # not zero, as it is after a step

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora(make: Callable[[], nn.Module], rank: int, names: tuple[str, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make().requires_grad_(False)
        for module in list(model.modules()):
            for name in names:
                if isinstance(own := getattr(module, name, None), nn.Linear):
                    setattr(module, name, LoRA(own, rank))
        return model

    return build


def lora(tiny: bool) -> dict[str, Case]:
    samples, length, words, rank = (4, 8, 50, 2) if tiny else (4, 1024, 128_256, 16)
    width, inner, layers, heads, keys = (16, 32, 2, 2, 1) if tiny else (4096, 14_336, 32, 32, 8)
    model = in_training(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=words, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        max_position_embeddings=max(length, 64), use_cache=False,
    )  # fmt: skip
    work = Workload(with_lora(model, rank, ("q_proj", "v_proj")), tokens(samples, length, words), next_token)
    ways = (PLAIN, CLIP, NORMS, ROWS, VMAP_CLIP, OPACUS, GHOST)
    name = f"LoRA of rank {rank} on Llama-8B's shape, N {samples}, T {length}, weights in bfloat16"
    return {name: Case(work, ways, (Goal(CLIP, 1.1),), samples * length, torch.bfloat16, apart=True)}


# Others


def tutorial_cnn(tiny: bool) -> dict[str, Case]:
    samples = 4 if tiny else 64
    work = Workload(TutorialNet, of_shape(samples, 1, 28, 28), classification)
    ways = (PLAIN, HOOKED, ROWS, CLIP, LOOP, VMAP, OPACUS)
    return {f"the tutorial's CNN, N {samples}": Case(work, ways, (Goal(ROWS, 1 / 26, LOOP),))}


def last_layers(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.Module]:
    """The encoder's last layers train, and what is behind them."""

    def build() -> nn.Module:
        model: Any = make()
        model.requires_grad_(False)
        for layer in model.bert.encoder.layer[-count:]:
            layer.requires_grad_()
        for module in (model.bert.pooler, model.classifier):
            module.requires_grad_()
        return model

    return build


def labels_of(model: Model, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["x"]).logits
    return nn.functional.cross_entropy(logits, batch["y"] % logits.shape[1], reduction="none")


def bert(tiny: bool) -> dict[str, Case]:
    length, words = (8, 50) if tiny else (128, 30_522)
    sizes = (16, 2, 2, 32) if tiny else (768, 12, 12, 3072)
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    dropouts = "hidden_dropout_prob", "attention_probs_dropout_prob"
    model = in_training(
        "BertForSequenceClassification", "BertConfig", *dropouts, vocab_size=words, **dict(zip(names, sizes))
    )
    found = {}
    for samples in (4,) if tiny else (32, 128, 512, 2048):
        work = Workload(last_layers(model, 1 if tiny else 3), sentences(samples, length, words), labels_of)
        name = f"BERT-base, the last three layers, N {samples}, T {length}"
        found[name] = Case(
            work,
            (PLAIN, CLIP, VMAP_CLIP, GHOST),
            (Goal(CLIP, 1.0, GHOST),),
            samples * length,
            apart=not tiny and samples > 512,
        )
    return found


def class_of_image(model: Model, batch: Batch) -> Tensor:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return -logits.log_softmax(1)[:, 0]


def vit(tiny: bool) -> dict[str, Case]:
    samples, image, patch = (4, 8, 4) if tiny else (128, 224, 16)
    sizes = (16, 2, 2, 32) if tiny else (768, 12, 12, 3072)
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    dropouts, shape = ("hidden_dropout_prob", "attention_probs_dropout_prob"), dict(zip(names, sizes))
    model = in_training(
        "ViTForImageClassification", "ViTConfig", *dropouts, image_size=image, patch_size=patch, num_labels=10, **shape
    )
    work = Workload(model, pictures(samples, image), under_autocast(class_of_image))
    ways = (PLAIN, HOOKED, CLIP, NORMS_COMPILED, CLIP_COMPILED, VMAP_CLIP, GHOST)
    return {f"ViT-B/{patch}, N {samples}, {image} × {image}, bfloat16": Case(work, ways, (Goal(CLIP, 1.3),))}


PARTS = {
    TESTS: Part("The tests by device", lambda tiny: {}),  # files, and no cases: see `gpu_tests`
    "smoke": Part("Everything runs", smoke, rounds=3, minutes=2.0),
    "norms": Part("Norms of single layers", kernels),
    "gpt2": Part("GPT-2 small", gpt2_small),
    "pythia": Part("Projections of Pythia's shapes, rank 16 a parameter", pythia),
    "wide": Part("Clipping, 36 layers of 1280", wide),
    "cnn": Part("The tutorial's CNN", tutorial_cnn),
    "bert": Part("BERT-base, the last three layers", bert),
    "lora": Part("LoRA on Llama-8B's shape", lora),
    "vit": Part("ViT-B", vit),
}
