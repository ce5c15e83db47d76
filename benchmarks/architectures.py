"""What people train: small models of timm, transformers and peft, randomly initialised, and a denoiser.

Each is made in two sizes: FULL is timed, TINY is what the tests compare with one backward pass per sample.
"""

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
from workloads import ARCHITECTURE, Batch, Model, UNet, Workload, classification, hugging_face, next_token, of_shape, tokens

Make = Callable[["Size"], Workload]


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


def outputs(name: str) -> Callable[[Model, Batch], Tensor]:
    """The mean square of an output, for each sample."""
    return lambda model, batch: getattr(model(**batch), name).flatten(1).square().mean(1)


def own_losses(model: Model, batch: Batch) -> Tensor:
    """Of a model that returns them."""
    return model(**batch)


def seeded(losses: Callable[[Model, Batch], Tensor]) -> Callable[[Model, Batch], Tensor]:
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
        inside = (
            "transforms",
            "transforms.functional",
            "datasets",
            "ops",
            "ops.misc",
            "models",
            "models.feature_extraction",
        )
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

        return Workload(build, of_shape(size.samples, 3, size.image, size.image), classification, ARCHITECTURE)

    return make


def plain_vit(size: Size) -> dict[str, Any]:
    return {
        "img_size": size.image, "patch_size": size.patch, "embed_dim": size.width, "depth": size.layers,
        "num_heads": size.heads,
    }  # fmt: skip


def text(model: str, config: str, arguments: Callable[[Size], dict[str, Any]], output: str = "", longest: int = 64) -> Make:
    """A model of the transformers library on tokens; the loss is of the next ones, or of an output."""

    def make(size: Size) -> Workload:
        build = hugging_face(model, config, **arguments(size))
        losses = outputs(output) if output else next_token
        return Workload(build, tokens(size.samples, min(size.length, longest), size.words), losses, ARCHITECTURE)

    return make


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


def t5(size: Size) -> Workload:
    build = hugging_face(
        "T5ForConditionalGeneration", "T5Config", vocab_size=size.words, d_model=size.width,
        d_kv=size.width // size.heads, d_ff=2 * size.width, num_layers=2, num_heads=size.heads,
    )  # fmt: skip

    def batch(step: int) -> Batch:
        # The decoder has as many positions as there are samples.
        encoded, decoded = (torch.randint(3, size.words, (size.samples, n)) for n in (size.length, size.samples))
        return {"input_ids": encoded, "decoder_input_ids": decoded}

    return Workload(build, batch, next_token, ARCHITECTURE)


def wav2vec2(size: Size) -> Workload:
    build = hugging_face(
        "Wav2Vec2Model", "Wav2Vec2Config", hidden_size=size.width, num_hidden_layers=2, num_attention_heads=size.heads,
        intermediate_size=2 * size.width, conv_dim=size.dims[1:3], conv_stride=(5, 4), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=size.heads,
        mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    return Workload(
        build,
        lambda step: {"input_values": torch.randn(size.samples, size.frames)},
        outputs("last_hidden_state"),
        ARCHITECTURE,
    )


def whisper(size: Size) -> Workload:
    build = hugging_face(
        "WhisperModel", "WhisperConfig",
        **sequences(size, num_mel_bins=16, max_source_positions=2 * size.length, max_target_positions=size.length),
    )  # fmt: skip

    def batch(step: int) -> Batch:
        heard = torch.randn(size.samples, 16, 4 * size.length)
        return {"input_features": heard, "decoder_input_ids": torch.randint(3, size.words, (size.samples, size.length))}

    return Workload(build, batch, outputs("last_hidden_state"), ARCHITECTURE)


def clip(size: Size) -> Workload:
    build = hugging_face(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=3 * size.width, image_size=size.image, patch_size=size.patch,
        projection_dim=size.width // 2,
    )  # fmt: skip

    def batch(step: int) -> Batch:
        return {"pixel_values": torch.randn(size.samples, 3, size.image, size.image)}

    return Workload(build, batch, outputs("image_embeds"), ARCHITECTURE)


def mixtral(size: Size) -> Workload:
    """By grouped products, which torch has for single precision."""
    build = hugging_face("MixtralForCausalLM", "MixtralConfig", **grouped(size, num_local_experts=4))
    return replace(one_by_one(size), model=build, dtype=torch.float32)


def lora(size: Size) -> Workload:
    """Low-rank adapters, random ones, of a frozen Llama."""
    base = llama(size)

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted: nn.Module = peft.get_peft_model(base.model(), config)
        return adapted.eval()

    return Workload(build, base.batch, base.losses, ARCHITECTURE)


def unet(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        return {"x": torch.randn(size.samples, 3, size.image // 2, size.image // 2)}

    return Workload(lambda: UNet(size.dims[0]), batch, seeded(own_losses), ARCHITECTURE, drawn=True)


def denoiser(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        x, noise = torch.randn(2, size.samples, 3, size.image // 2, size.image // 2)
        return {"x": x, "time": torch.rand(size.samples), "noise": noise}

    return Workload(lambda: UNet(size.dims[0]), batch, own_losses, ARCHITECTURE)


vit = timm("vit_tiny_patch16_224", lambda size: plain_vit(size) | {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1})
convnext = timm(
    "convnext_atto",
    lambda size: {"dims": size.dims, "depths": (1, 1, 2, 1), "patch_size": 2, "ls_init_value": 0.1, "drop_path_rate": 0.1},
)
one_by_one = text(
    "MixtralForCausalLM",
    "MixtralConfig",
    lambda size: grouped(size, num_local_experts=4, experts_implementation="eager"),
)
bert = text("BertForMaskedLM", "BertConfig", sizes)
llama = text("LlamaForCausalLM", "LlamaConfig", grouped)
gpt2 = text(
    "GPT2LMHeadModel",
    "GPT2Config",
    lambda size: {
        "vocab_size": size.words, "n_positions": 64, "n_embd": size.width, "n_layer": size.layers, "n_head": size.heads,
    },
)  # fmt: skip

ARCHITECTURES: dict[str, Make] = {
    "vit": vit,
    "vit, dropout": with_dropout(vit),
    "deit, layer scale": timm("deit3_small_patch16_224", lambda size: plain_vit(size) | {"init_values": 0.1}),
    "beit, position tables": timm("beit_base_patch16_224", lambda size: plain_vit(size) | {"init_values": 0.1}),
    "cait": timm("cait_xxs24_224", plain_vit),
    "mixer": timm(
        "MlpMixer",
        lambda size: {
            "img_size": size.image, "patch_size": size.patch, "embed_dim": size.width, "num_blocks": size.layers,
        },
    ),
    "swin": timm(
        "swin_tiny_patch4_window7_224",
        lambda size: {
            "img_size": size.image, "patch_size": size.patch // 2, "window_size": 4, "embed_dim": size.dims[0],
            "depths": (2, 2), "num_heads": (2, 4),
        },
    ),
    "convnext": convnext,
    "convnext, drop path": with_dropout(convnext),
    "resnet18, BatchNorm in eval": timm("resnet18", lambda size: {"channels": [2 * width for width in size.dims]}),
    "mobilenet, BatchNorm in eval": timm("mobilenetv3_small_050", lambda size: {}),
    "bert": bert,
    "bert, dropout": with_dropout(bert),
    "deberta-v2": text(
        "DebertaV2Model",
        "DebertaV2Config",
        lambda size: sizes(size, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
        "last_hidden_state",
    ),
    "gpt2": gpt2,
    "gpt2, dropout": with_dropout(gpt2),
    "llama": llama,
    "llama, LoRA": lora,
    "gemma2": text("Gemma2ForCausalLM", "Gemma2Config", grouped),
    "qwen3": text("Qwen3ForCausalLM", "Qwen3Config", grouped),
    "phi": text("PhiForCausalLM", "PhiConfig", sizes),
    "opt": text(
        "OPTForCausalLM",
        "OPTConfig",
        lambda size: sizes(size, ffn_dim=3 * size.width, word_embed_proj_dim=size.width),
    ),
    "mixtral": mixtral,
    "mixtral, one expert after the other": one_by_one,
    "t5": t5,
    "t5, dropout": with_dropout(t5),
    "mamba": text(
        "MambaForCausalLM", "MambaConfig", lambda size: sizes(size, state_size=8, num_hidden_layers=2), longest=16
    ),
    "wav2vec2": wav2vec2,
    "wav2vec2, dropout": with_dropout(wav2vec2),
    "whisper": whisper,
    "clip": clip,
    "UNet, noise drawn inside": unet,
    "denoiser": denoiser,
}  # fmt: skip
"""{name: makes it in a size}"""
